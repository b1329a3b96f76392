"""Questions that wait for their answers; askers are served in turn. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.server.fair_queue import FairQueue
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.system.addresses import origin

OF_ONE, OF_ALL = 20, 1000  # questions that wait


@dataclass(frozen=True)
class Question:
    """A question that waits for its answer.

    route: where the answer goes. address: where it was asked.
    """

    route: tuple[bytes, ...]
    ask: wire.Ask
    asker: Asker
    address: str

    @property
    def whose(self) -> str:
        """The asker whose turn it takes: a user, or an address where nobody is proven."""
        return f"address {origin(self.address)}" if self.asker.uid is None else f"user {self.asker.uid}"

    @property
    def pays(self) -> str:
        """The name of the quota that pays for the answer; empty where nobody is proven. An admin has one at each
        address: root's checks run on all nodes at once."""
        if self.asker.uid is None:
            return ""
        return f"{self.asker.uid} {origin(self.address)}" if self.asker.admin else f"{self.asker.uid}"


class Asked:
    """The questions of each asker in their order."""

    def __init__(self) -> None:
        self._waiting: FairQueue[Question] = FairQueue(OF_ALL)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, question: Question) -> bool:
        """False when too many wait, of this asker or of all."""
        return self._waiting.waiting(question.whose) < OF_ONE and self._waiting.add([question.whose], question)

    def next(self) -> Question:
        """The next one; the asker's others come after those of everybody else."""
        return self._waiting.next()


class Answered:
    """A cache of answers that took long to make, for the same question with the same rights: `watch unicronctl status`
    may run on each node of a job. A new event or an order empties it."""

    READ_ONLY = frozenset(("status", "jobs", "nodes", "explain", "scenario"))
    LONG_SECONDS, KEPT_TIMES, KEPT_SECONDS, MOST_BYTES = 0.005, 20.0, 0.5, 16 << 20

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], tuple[float, bytes]] = {}
        self._bytes, self._event = 0, 0

    def get(self, question: Question, now: float, event: int) -> bytes | None:
        """An answer that is fresh enough. event: the last one in the log."""
        if event != self._event:
            self._forget()
            self._event = event
        until, data = self._kept.get(_key(question), (0.0, b""))
        return data if now < until else None

    def keep_answer(self, question: Question, data: bytes, seconds: float, now: float) -> None:
        """Keeps an answer that took `seconds` to make, if that was long."""
        if question.ask.what not in self.READ_ONLY:
            self._forget()
        elif seconds >= self.LONG_SECONDS and len(data) <= self.MOST_BYTES:
            if self._bytes + len(data) > self.MOST_BYTES:
                self._forget()
            self._bytes += len(data)
            self._kept[_key(question)] = now + min(self.KEPT_SECONDS, self.KEPT_TIMES * seconds), data

    def _forget(self) -> None:
        self._kept.clear()
        self._bytes = 0


def _key(question: Question) -> tuple[Any, ...]:
    return question.ask.what, repr(sorted(question.ask.args.items())), question.asker
