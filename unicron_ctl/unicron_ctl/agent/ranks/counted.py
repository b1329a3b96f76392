"""Reads the counts in the pages of plain programs (`unicron_detector/processes/counters.py`), for their ranks' progress
and the steps that the agent reports for them."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from unicron_ctl.agent.connections.held_folders import let_go, try_hold
from unicron_ctl.agent.ranks.ranks import stacks_file
from unicron_ctl.shared.protocol import structs
from unicron_detector.processes import counters, stacks, step_signals
from unicron_detector.processes.counters import AT, BYTES, TEXT, VERSION
from unicron_detector.processes.rank_messages import Step

MEMORY = "/dev/shm"  # a page on a disk is written back from time to time, and a process that writes to it then waits
# A rank that finishes no iteration for this many seconds, and for this many usual ones, is asked about its collectives.
STALL_SECONDS, STALL_FACTOR = 1.5, 2.0
ASK_SECONDS = 1.0  # between two such questions


class Folder:
    """The folder of an agent's pages."""

    def __init__(self, ranks: str) -> None:
        """Name the folder after `ranks`, the folder of the ranks' socket."""
        self.endpoint = f"ipc://{ranks}/ranks"
        try:
            self.path = tempfile.mkdtemp(prefix=os.path.basename(ranks) + "-", dir=MEMORY)
        except OSError:
            self.path = tempfile.mkdtemp(prefix="counters-", dir=ranks)
        self._held = try_hold(Path(self.path))
        self.autoload = f"{self.path}/torch"
        """The entry of Python's path by which torch loads the counters."""
        about = f"{self.autoload}/{counters.NAME}-{VERSION}.dist-info"
        os.makedirs(about)
        # Copies: a container in which only the ranks run has this folder, but may not have Unicron's.
        for module in (counters, stacks, step_signals):
            shutil.copy(str(module.__file__), self.path)
        os.symlink(f"../{os.path.basename(counters.__file__)}", f"{self.autoload}/{counters.NAME}.py")
        for name, text in (
            ("METADATA", f"Metadata-Version: 2.1\nName: {counters.NAME}\nVersion: {VERSION}\n"),
            ("entry_points.txt", f"[torch.backends]\n{counters.NAME} = {counters.NAME}:install\n"),
        ):
            with open(f"{about}/{name}", "w") as file:
                file.write(text)

    def close(self) -> None:
        """Remove the pages."""
        shutil.rmtree(self.path, ignore_errors=True)
        let_go(self._held)
        self._held = -1


@dataclass
class Count:
    """The page's numbers at one moment (`counters.FIELDS`)."""

    values: list[int]

    def __getattr__(self, name: str) -> int:
        return self.values[AT[name]]


class Page:
    """One rank's page, made anew for each process, so that an old process cannot change it."""

    def __init__(self, folder: Folder, slot: int) -> None:
        self.path = f"{folder.path}/{slot}"
        self.environment = {counters.PAGE: self.path, "UNICRON_STACKS": stacks_file(folder.endpoint, slot)}
        for name in (self.path, self.path + counters.ASKS):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
        with open(self.path, "wb") as file:
            file.truncate(BYTES)
        os.mkfifo(self.path + counters.ASKS, 0o600)
        with open(self.path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), BYTES)
        self._numbers = memoryview(self._map).cast("Q")

    def read(self) -> Count:
        """Return the numbers, all of the same iteration."""
        while True:
            values = self._numbers[: len(AT)].tolist()
            if values[AT["done"]] == self._numbers[AT["done"]]:
                return Count(values)

    def text(self, length: int) -> str:
        """Return the first `length` bytes of the page's text."""
        return self._map[TEXT : TEXT + min(length, BYTES - TEXT)].decode(errors="replace")

    def ask_process(self) -> None:
        """Ask the process how far its collectives are. A process without a process group does not listen."""
        with contextlib.suppress(OSError):
            pipe = os.open(self.path + counters.ASKS, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(pipe, b"?")
            finally:
                os.close(pipe)

    def close(self) -> None:
        """Unmap the page."""
        self._numbers.release()
        self._map.close()


class Progress:
    """The progress of one rank's processes in the present generation."""

    def __init__(self, folder: Folder, slot: int) -> None:
        self._folder, self._slot = folder, slot
        self.page: Page | None = None
        self._pid = self._done = self._waited = self._outside = 0  # as in the last report
        self._steps = False  # a process of this slot has stepped, so this program is one that does
        self._complaint = ""

    def start(self, generation: int, base: int) -> dict[str, str]:
        """Prepare for a new process, and return the variables that it needs. base: the job's iterations before it."""
        self.close()
        self.page = Page(self._folder, self._slot)
        self._generation, self._base = generation, base
        self._pid, self._done, self._at, self._waited, self._outside = 0, 0, time.monotonic_ns(), 0, 0
        self._began, self._usual = self._at, 0.0
        self._idle = 0.0  # the longest idle period since the last step; waits for an answer do not count
        self._asked, self._answers = time.monotonic(), 0
        return self.page.environment

    @property
    def pid(self) -> int:
        """The process that trains; 0 if none does."""
        return self._pid

    def update(self, status: structs.RankStatus, now: float) -> tuple[bool, Step | None]:
        """Put the process's progress into the status. Return whether it has changed, and the steps since the last call.
        now: on the monotonic clock."""
        if self.page is None:
            return False, None
        count = self.page.read()
        if not count.version:
            return False, None
        if count.pid != self._pid:  # the first process that counts, or another one after it
            self._base += self._done
            self._began = count.began if self._pid else self._began
            self._pid, self._done, self._waited, self._outside = count.pid, 0, 0, 0
        if not status.waits:
            self._idle = max(self._idle, status.idle)
        step = self._step(count) if count.done > self._done else None
        iteration, phase = self._base + count.done, "computing"
        if count.wait:
            phase = "reducing"
        elif count.outside:
            iteration, phase = iteration - 1, "stepped"
        judged = int(bool(self._pid) and (self._steps or count.done > 0))
        before = status.iteration, status.phase, status.micro_batches, status.moved, status.collectives
        status.iteration, status.phase, status.micro_batches = iteration, phase, judged
        status.saved = self._base + count.saved_done if count.saves else -1
        status.iteration_seconds, status.moved = self._usual, count.heartbeats
        if step is not None:
            status.collectives = {}
        elif judged:
            self._question(status, count, now)
        after = status.iteration, status.phase, status.micro_batches, status.moved, status.collectives
        if after != before:
            status.changed = time.time()
        return after != before, step

    def _step(self, count: Count) -> Step:
        """Return the steps since the last report as one step, of the newest iteration."""
        number, since = count.done - self._done, self._at if self._done else self._began
        seconds = max(1e-6, (count.done_at - since) / 1e9 / number)
        waited = max(0, count.waited_then - self._waited) / 1e9 / number
        outside = max(0, count.outside_then - self._outside) / 1e9 / number
        self._done, self._at, self._usual, self._steps = count.done, count.done_at, seconds, True
        self._waited, self._outside = count.waited_then, count.outside_then
        phases = dict.fromkeys(structs.PHASES, 0.0)
        phases["reduce"], phases["outside"] = waited, outside
        own = max(0.0, seconds - waited - outside)
        phases["data"] = min(own, self._idle) if own > STALL_SECONDS else 0.0
        phases["forward"] = own - phases["data"]  # the page does not tell more
        self._idle = 0.0
        return Step(
            generation=self._generation,
            iteration=self._base + count.done - 1,
            micro_batches=[0],
            computed=[0],
            total=1,
            seconds=seconds,
            loss=None,
            at=time.time(),
            phases=phases,
        )

    def _question(self, status: structs.RankStatus, count: Count, now: float) -> None:
        """Ask a rank that stands still how far its collectives are, and read its answer."""
        assert self.page is not None
        if count.answers != self._answers:
            self._answers = count.answers
            with contextlib.suppress(ValueError, msgspec.ValidationError):
                answer: Any = json.loads(self.page.text(count.length))
                status.collectives = msgspec.convert(answer, structs.Collectives)
        stands = now - self._at / 1e9
        if stands > max(STALL_SECONDS, STALL_FACTOR * self._usual) and now - self._asked >= ASK_SECONDS:
            self._asked = now
            self.page.ask_process()

    def complaint(self) -> str:
        """Return why something is not counted, once; else nothing."""
        count = self.page.read() if self.page is not None else None
        if self._complaint or self.page is None or count is None or not count.length or count.answers:
            return ""
        self._complaint = self.page.text(count.length)
        return self._complaint

    def close(self) -> None:
        """Close the page of a process that is gone."""
        if self.page is not None:
            self.page.close()
            self.page = None
