"""From the kill of a rank to the next step and to full strength, by the number of ranks, beside the peers.

The systems take turns with the leaderboard's training, one micro-batch a rank. All ranks share this machine's cores, so
a part of the growth is the machine's. Three things tell it apart: the processors' time of a rank's share, which does
not depend on the cores; the share of the time in which processes of the job were ready and had no core; and the job of
the fewest ranks beside idle processes, as many as are missing to the most.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from benchmarks.leaderboard import play, processes
from benchmarks.leaderboard.failures import Missed
from benchmarks.leaderboard.play import BROKE_OFF, Limits, describe
from benchmarks.leaderboard.systems import SYSTEMS, System
from benchmarks.leaderboard.systems.base import Absent
from benchmarks.report import Report

TRAINS = "trains"  # what an idle process says when it has imported all that a rank imports
IDLE = f"import torch, torch.distributed; print({TRAINS!r}, flush=True); input()"
GOAL = 4.0  # of the growth from 2 ranks to 16: the logarithm's
FIGURES = ("next_step", "full_strength", "busy", "waited")


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    repeats: int = 3
    """Failures of each system and number of ranks."""
    ranks: str = "2,4,8,16"
    """Numbers of ranks, rising, with commas between."""
    systems: str = "unicron,unicron-restart,torchrun,torchft"
    """Systems of the leaderboard, with commas between; the peers need `make peers`."""
    idle: bool = True
    """Whether the fewest ranks also run beside idle processes."""
    limit: float = 120.0
    """Seconds until a step, and until full strength."""


SMALLEST = Sizes(1, ranks="2", systems="unicron,unicron-restart", idle=False)


class Row(msgspec.Struct):
    """One failure of one system; None for what did not happen."""

    system: str
    ranks: int
    idle: int = 0
    """Idle processes beside it."""
    next_step: float | None = None
    """Seconds from the failure to the first step after it."""
    full_strength: float | None = None
    """Seconds from the failure to the first step of all ranks."""
    busy: float | None = None
    """Processors' time from the failure to the next step over the ranks, in seconds. What has ended in between is
    left out."""
    waited: float | None = None
    """Seconds in which the job's threads were ready and had no core, from the failure to the next step, over the
    ranks."""
    load: float = 0.0
    """The machine's load at the failure."""
    why: str = ""
    """Why a figure is missing."""


class Times:
    """The times of a job's threads from the failure to the next step."""

    def __init__(self) -> None:
        self._pids: list[int] = []
        self._before: dict[int, tuple[int, int]] = {}
        self.busy = self.waited = 0.0

    def observe(self, moment: str, system: System) -> None:
        """Take the times, as :data:`play.Observe` asks. The search for the processes takes too long for the failure."""
        if moment == "before":
            self._pids = processes.find(system.run)
        elif moment == "struck":
            self._before = times_of(self._pids)
        else:
            found = times_of(processes.find(system.run))
            pairs = [(now, self._before.get(thread, (0, 0))) for thread, now in found.items()]
            self.busy, self.waited = (1e-9 * sum(now[part] - before[part] for now, before in pairs) for part in (0, 1))


def times_of(pids: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Return the nanoseconds in which each thread of these processes had a core, and those in which it waited for one
    (proc(5), schedstat). Those that have ended are left out."""
    found: dict[int, tuple[int, int]] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    ran, waited, _ = (thread / "schedstat").read_text().split()
                    found[int(thread.name)] = int(ran), int(waited)
    return found


@contextlib.contextmanager
def idlers(count: int) -> Iterator[None]:
    """Keep idle processes, which have imported what a rank imports."""
    started: list[subprocess.Popen[str]] = []
    try:
        for _ in range(count):
            pipes = subprocess.Popen([sys.executable, "-c", IDLE], stdin=-1, stdout=-1, text=True)
            started.append(pipes)
        for each in started:
            assert each.stdout is not None
            assert each.stdout.readline().strip() == TRAINS, "an idle process did not start"
        yield
    finally:
        for each in started:
            each.kill()
            each.communicate()


def once(name: str, ranks: int, idle: int, limit: float, folder: Path) -> Row:
    """Return the row of one failure."""
    row, times = Row(name, ranks, idle, load=os.getloadavg()[0]), Times()
    kind = functools.partial(SYSTEMS[name], size=ranks, LEADERBOARD_MICRO_BATCHES=str(ranks))
    try:
        SYSTEMS[name].version()
        with idlers(idle):
            outcome = play.fail(kind, "rank-kill", folder, Limits(limit, limit, look=0.01), times.observe)
    except (Absent, Missed, *BROKE_OFF) as error:
        row.why = describe(error)
        return row
    row.next_step, row.full_strength = outcome.figures.next_step_seconds, outcome.figures.full_strength_seconds
    row.why = outcome.why
    if outcome.survived:
        row.busy, row.waited = times.busy / ranks, times.waited / ranks
    return row


def medians(rows: list[Row], name: str, ranks: int, idle: int = 0) -> dict[str, float]:
    """Return the median of each figure that some repeat has."""
    some = [row for row in rows if (row.system, row.ranks, row.idle) == (name, ranks, idle)]
    kept = {each: [value for row in some if (value := getattr(row, each)) is not None] for each in FIGURES}
    return {each: statistics.median(values) for each, values in kept.items() if values}


def measure(sizes: Sizes, report: Report) -> None:
    """Let the systems take turns at each number of ranks."""
    play.START_LIMIT = 600.0  # sixteen imports of torch, on a busy machine
    names, counts = sizes.systems.split(","), [int(each) for each in sizes.ranks.split(",")]
    places = [(count, 0) for count in counts]
    if sizes.idle and len(counts) > 1:
        places.insert(1, (counts[0], counts[-1] - counts[0]))
    rows: list[Row] = []
    heads = ("ranks", "idle", "next step", "whole", "busy", "waited", "load")
    report.row("seconds; busy and waited by rank", *heads, width=11)
    with tempfile.TemporaryDirectory(prefix="transition-") as folder:
        for repeat in range(sizes.repeats):
            for count, idle in places:
                for name in names:
                    row = once(name, count, idle, sizes.limit, Path(folder, f"{name}.{count}.{idle}.{repeat}"))
                    rows.append(row)
                    cells = ["-" if (value := getattr(row, each)) is None else value for each in FIGURES]
                    report.row(name, count, idle, *cells, row.load, row.why[:200], width=11)
    report.details["rows"] = [msgspec.to_builtins(row) for row in rows]
    report.details["day"] = time.strftime("%Y-%m-%d", time.gmtime())
    for name in names:
        summarize(rows, name, counts, idle=places[-1][0] - counts[0] if sizes.idle else 0, report=report)


def summarize(rows: list[Row], name: str, counts: list[int], idle: int, report: Report) -> None:
    """Print a system's figures, and their growth from the fewest ranks to the most."""
    few, many = (medians(rows, name, count) for count in (counts[0], counts[-1]))
    beside = medians(rows, name, counts[0], idle) if idle else {}
    for each, words in (("next_step", "to the next step"), ("full_strength", "to full strength")):
        if each in many:
            report.figure(f"{name}, {counts[-1]} ranks: {words}", many[each], "s")
        if len(counts) > 1 and each in few and each in many:
            most = GOAL if name.startswith("unicron") and (counts[0], counts[-1]) == (2, 16) else None
            report.figure(f"{name}: growth of the time {words}", many[each] / few[each], "times", most)
        if each in few and each in beside:
            report.figure(f"{name}: {words}, idle processes beside it", beside[each] / few[each], "times")
    for each, words in (("busy", "the processors' time of a rank"), ("waited", "a rank's waiting for a core")):
        if len(counts) > 1 and few.get(each) and each in many:
            report.figure(f"{name}: growth of {words}", many[each] / few[each], "times")
