"""Restart mode: the agent's part in stopping a world that was left behind before it works beside the next one
(docs/design/consensus.md, *A lease for plain programs*).

While the controller is connected nothing is asked. Without it, the agent tries the doors of the world's other agents.
When the lease runs out, this agent ends the node's processes, or its watchdog does if the agent itself is stopped.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from unicron_ctl.agent.connections.connections import Polling
from unicron_ctl.agent.ranks import watchdog
from unicron_ctl.shared.consensus.restart_lease import Lease
from unicron_ctl.shared.protocol.reach import Reach, reach
from unicron_ctl.shared.system.mailbox import Mailbox
from unicron_detector.processes.step_signals import STEP_SIGNALS
from unicron_detector.processes.supervise import Child, Surroundings

REACH_SECONDS = 0.7  # for one door
PASS_SECONDS = 2.0  # between two tries of all doors
SIDE_BY_SIDE = 16
WATCHDOG_SECONDS = 10.0  # before a watchdog that has ended is started again
CUT_OFF = (
    "neither the controller nor enough of the world's other nodes can be reached: the processes end, for a new world "
    "may begin without them"
)
NEVER = 1e18  # as the time at which the lease ends


class Fence:
    """Ends this node's processes when their lease is not renewed."""

    def __init__(self, polling: Polling) -> None:
        self._watch, self._unwatch = polling.watch, polling.unwatch
        self._lease = Lease()
        self._doors: list[str] = []
        self._world = self._answered = 0  # the number of this world, and of the last one whose doors were tried
        self._answers: Mailbox[tuple[int, int, float]] = Mailbox()
        self._trying = False
        self._tried = self._started = float("-inf")
        self._dog: Child | None = None
        self._line = -1
        self._sent: tuple[float, Sequence[int]] = (NEVER, ())  # the watchdog's last orders

    @property
    def holds(self) -> bool:
        """The processes end in time even if this agent dies, so that the controller may count on it."""
        return self._lease.armed and self._dog is not None

    @property
    def tried(self) -> bool:
        """This world's doors have been tried, so that a lease that can be held is held."""
        return not self._doors or self._answered == self._world

    def begin_world(self, doors: Sequence[str], now: float) -> None:
        """Begin a world. doors: of its other agents, as far as they are known."""
        self._doors, self._world, self._tried = list(doors), self._world + 1, float("-inf")
        self._lease.start_world(len(self._doors), now)

    def check_lease(self, connected: bool, muted: bool, pids: Sequence[int], now: float) -> bool:
        """Renew the lease; return whether it has run out, so that the processes must end. connected: to the controller.
        muted: this node has lost its network. pids: the processes of the world."""
        connected = connected and not muted
        for world, count, began in self._answers.take_all():
            self._trying, self._answered = False, world
            if world == self._world and not muted:
                self._lease.on_answers(count, began)
        if connected:
            self._lease.on_controller(now)
        if not pids and self.tried:
            self._renew(NEVER, pids)
            return False
        if self._doors and (not connected or not self._lease.armed) and now - self._tried >= PASS_SECONDS:
            self._try_all(now)
        self._keep_watchdog(now)
        if not pids:
            return False
        until = self._lease.expires_at
        self._renew(NEVER if math.isinf(until) else until, pids)
        return now >= until

    def _try_all(self, now: float) -> None:
        if self._trying:
            return
        self._trying, self._tried = True, now
        doors, world = list(self._doors), self._world

        def run() -> None:
            found = 0
            try:
                with ThreadPoolExecutor(SIDE_BY_SIDE, thread_name_prefix="unicron-door") as pool:
                    found = sum(
                        word is Reach.REACHED for word in pool.map(partial(reach, seconds=REACH_SECONDS), doors)
                    )
            finally:
                self._answers.put((world, found, now))

        try:
            threading.Thread(target=run, name="unicron-fence", daemon=True).start()
        except RuntimeError:  # the system grants no more threads: the next pass may get one
            self._trying = False

    def _keep_watchdog(self, now: float) -> None:
        if self._dog is not None and self._dog.ended():
            self._drop_watchdog()
        if self._dog is not None or not self._doors or now - self._started < WATCHDOG_SECONDS:
            return
        self._started = now
        with contextlib.suppress(OSError):
            reading, writing = os.pipe()
            try:
                command = [sys.executable, "-I", "-S", str(Path(watchdog.__file__))]
                command += [str(int(number)) for number in STEP_SIGNALS]
                self._dog = Child(command, os.environ, surroundings=Surroundings(reading))
            except OSError:
                os.close(writing)
                raise
            finally:
                os.close(reading)
            os.set_blocking(writing, False)
            self._line, self._sent = writing, (NEVER, ())
            self._watch(self._dog.stderr, self._pass_stderr)

    def _pass_stderr(self) -> None:
        if self._dog is not None and not self._dog.pass_stderr():
            self._unwatch(self._dog.stderr)

    def _renew(self, until: float, pids: Sequence[int]) -> None:
        if self._line < 0:
            return
        before, ranks = self._sent
        lines = f"until {until}\n" if until != before else ""
        if list(ranks) != list(pids):
            lines += f"ranks {' '.join(map(str, pids))}\n"
        try:
            os.write(self._line, lines.encode())
            self._sent = until, list(pids)
        except BlockingIOError:  # the watchdog is stopped, too
            pass
        except OSError:
            self._drop_watchdog()

    def _drop_watchdog(self) -> None:
        dog, self._dog = self._dog, None
        if self._line >= 0:
            os.close(self._line)
            self._line = -1
        if dog is not None:
            self._unwatch(dog.stderr)
            dog.signal(9)
            dog.reap(1.0)
            dog.close()

    @property
    def pid(self) -> int | None:
        """The watchdog's process."""
        return self._dog.pid if self._dog is not None else None

    def close(self) -> None:
        """End the watchdog."""
        self._drop_watchdog()
        self._answers.close()
