"""Tries to reach other nodes for the controller, and lets others see that this node lives."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from unicron_ctl.shared.protocol.reach import Door, Reach, reach
from unicron_ctl.shared.system.mailbox import Mailbox

REACH_SECONDS = 0.7  # for one address; several connections are tried in that time
AT_ONCE = 64  # addresses that are being tried; further ones are answered with "unknown"


class Witness:
    """Tries other nodes for the controller, and answers other nodes' tries of this one. Raises OSError without a port
    for the door."""

    def __init__(self) -> None:
        self.door = Door()
        self.answers: Mailbox[tuple[int, list[str]]] = Mailbox()
        """The number of a question, and a word for each address."""
        self._trying = 0
        self._lock = threading.Lock()

    def try_addresses(self, number: int, targets: Sequence[str]) -> None:
        """Try the addresses in parallel; the answer comes within REACH_SECONDS once names are resolved."""
        words = [str(Reach.UNKNOWN)] * len(targets)
        wanted = [place for place, target in enumerate(targets) if target]
        with self._lock:
            free = self._trying + len(wanted) <= AT_ONCE
            self._trying += len(wanted) if free else 0
        if not wanted or not free:
            self.answers.put((number, words))
            return
        left = [len(wanted)]

        def try_one(place: int) -> None:
            words[place] = str(reach(targets[place], REACH_SECONDS))
            count_answer()

        def count_answer() -> None:
            with self._lock:
                self._trying -= 1
                left[0] -= 1
                last = not left[0]
            if last:
                self.answers.put((number, words))

        for place in wanted:
            try:
                threading.Thread(target=try_one, args=(place,), name="unicron-witness", daemon=True).start()
            except RuntimeError:  # the system grants no more threads: this address stays "unknown"
                count_answer()

    def close(self) -> None:
        """Close the door, and drop answers that are still to come."""
        self.door.close()
        self.answers.close()
