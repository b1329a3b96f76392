"""The controller's core in one process, without sockets.

Time passes only while the controller computes and while nothing is to be done. So a time is the controller's own CPU
time, however busy the machine is.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

from unicron_ctl.controller.api import answers
from unicron_ctl.controller.core.core import Core
from unicron_ctl.controller.model.asker import EVERYBODY
from unicron_ctl.controller.model.cluster_state import ClusterState
from unicron_ctl.controller.server.server import PAUSE_SECONDS, RECEIVE_SECONDS, TICK_SECONDS
from unicron_ctl.shared.log.store import Store
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.settings.config import ControllerConfig
from unicron_ctl.shared.settings.partitions import PartitionConfig
from unicron_detector.failures.classify import Classifier

START = 1_000_000.0  # on this clock


class Alone:
    """Lines to a core with its event log in the folder. It takes `unicrond`'s turns without encryption and Slurm."""

    def __init__(self, folder: Path) -> None:
        self._idle, self._began = START, 0.0
        self.used = 0.0
        """Seconds of CPU time that it has taken."""
        self._arrived: deque[tuple[int, bytes]] = deque()
        self._waiting: Counter[int] = Counter()  # messages that have arrived, by line
        self._left: dict[int, list[bytes]] = {}
        self._left_at: dict[int, float] = {}
        self._next_tick, self._settled_in = START, 0.0
        act = PartitionConfig(mode="act")
        config = ControllerConfig(
            auth="none", forming_settle_seconds=2.0, metrics_seconds=0.0, partitions={"default": act}
        )
        self._store = Store(folder / "events.sqlite")
        self.core = Core(config, ClusterState(), START, Classifier())
        self.core.view.unread = lambda route: int.from_bytes(route[0]) in self._waiting

    def now(self) -> float:
        computing = time.process_time() - self._began if self._began else 0.0
        return self._idle + self.used + computing

    def send(self, index: int, data: bytes) -> None:
        self._arrived.append((index, data))
        self._waiting[index] += 1

    def flush(self) -> None:
        pass

    def receive(self) -> Iterator[tuple[int, list[bytes], float]]:
        left, self._left = self._left, {}
        for index, messages in left.items():
            yield index, messages, self._left_at[index]

    def rest(self, seconds: float) -> None:
        """Let the controller take its turns, and the rest of the time pass."""
        until = self.now() + seconds
        while self.now() < until and (self._arrived or self.core.pending or self.now() >= self._next_tick):
            self._began = time.process_time()
            self._turn()
            self.used, self._began = self.used + time.process_time() - self._began, 0.0
        self._idle += max(0.0, until - self.now())

    def close(self) -> None:
        self._store.close()

    def _turn(self) -> None:
        """Take a turn as `Server.run` does."""
        core = self.core
        until = self.now() + max(RECEIVE_SECONDS, min(self._settled_in, PAUSE_SECONDS))
        while self._arrived and self.now() < until:
            self._take(*self._arrived.popleft())
        heard = self.now()
        core.advance_jobs()
        self._settled_in = self.now() - heard
        if core.pending:
            self._let_out()
        if (now := self.now()) >= self._next_tick:
            core.tick(now)
            ended = self.now()
            self._next_tick = max(now + TICK_SECONDS, ended + min(ended - now, PAUSE_SECONDS))
        self._let_out()

    def _take(self, index: int, data: bytes) -> None:
        self._waiting[index] -= 1
        if not self._waiting[index]:
            del self._waiting[index]
        message = wire.decode(data, wire.ToController)
        route = (index.to_bytes(4),)
        if isinstance(message, wire.Ask):
            self.core.now = self.now()
            self.core.advance_jobs()
            self._let_out()
            found = answers.answer(self.core, self._store, message.what, message.args, EVERYBODY)
            self._post(route, wire.encode(wire.Answer(ok=True, data=found)))
        else:
            self.core.receive(route, message, self.now())

    def _let_out(self) -> None:
        """Flush as `Server.flush` does."""
        core = self.core
        if core.events:
            events, core.events = core.events, []
            self._store.append(events)
        outbox, core.outbox = core.outbox, []
        last: tuple[wire.Message | None, bytes] = None, b""
        for send in outbox:
            if send.message is not last[0]:
                last = send.message, wire.encode(send.message)
            self._post(send.route, last[1])
        core.requests.clear()

    def _post(self, route: tuple[bytes, ...], data: bytes) -> None:
        index = int.from_bytes(route[0])
        self._left.setdefault(index, []).append(data)
        self._left_at[index] = self.now()
