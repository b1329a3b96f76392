"""Kill to the next step in every layout, and how it grows with the number of ranks: the second part of
``benchmarks.recovery``.

The smallest model there is, so that almost nothing is computed again and what is left is Unicron's. What is computed
again is subtracted all the same: from when the last survivor is in the new generation to when the last has computed
what it owes.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.marks import print_figure
from tests.support.rank_harness import Ranks
from unicron_ctl.shared.protocol.wire import Plan

AT, ITERATIONS = 2, 4
MODEL = {"TINY_HIDDEN": "32", "TINY_MICRO_BATCHES": "32", "TINY_ITERATIONS": str(ITERATIONS), "TINY_SAVE": "0"}
POINTS = ({"at": "fetch", "count": 1}, {"at": "reduce", "count": 0})
SHAPES = {  # TP PP VPP, ranks of a replica, ranks
    "DP4": ("1 1 1", 1, 4),
    "DP2 TP2": ("2 1 1", 2, 4),
    "DP2 PP2": ("1 2 1", 2, 4),
    "DP8": ("1 1 1", 1, 8),
    "DP4 TP2": ("2 1 1", 2, 8),
    "DP4 PP2": ("1 2 1", 2, 8),
    "DP2 TP2 PP2": ("2 2 1", 4, 8),
}
ASKED = {4: 0.5, 8: 1.0}  # seconds, by ranks
SIZES = (2, 4, 8, 16)
PARTS = ("detected", "planned", "grouped", "entered", "computed", "stepped")


class Counted(Ranks):
    """Ranks whose processor's time is read from the Break to when all are in the new generation."""

    busy: dict[int, float]  # by slot, milliseconds

    def _break(self, lost: list[int]) -> None:
        self.busy = {slot: -_busy(self.ranks[slot].child.pid) for slot in self.members if slot not in lost}
        super()._break(lost)

    def _announce(self, plan: Plan) -> None:
        super()._announce(plan)
        if self.breaks and len(self.plans) == 2:
            self.busy = {slot: self.busy[slot] + _busy(self.ranks[slot].child.pid) for slot in plan.members}


def _busy(pid: int) -> float:
    """Milliseconds that a process has run, ended threads included: its clock (clock_getcpuclockid(3))."""
    return 1e3 * time.clock_gettime((~pid << 3) | 2)


@dataclass
class Recovery:
    """One run: milliseconds of each part, in the order of `PARTS`, each to when the last survivor was there; and of the
    processor, in the middle one of the survivors, from the Break to the new generation."""

    parts: list[float]
    busy: float

    @property
    def overhead(self) -> float:
        """Without what was computed again."""
        return sum(self.parts) - self.parts[PARTS.index("computed")]


def recover(shape: str, replica: int, size: int, point: dict[str, object], sharded: bool) -> Recovery:
    """One run with one kill, of the first rank of the second replica."""
    with tempfile.TemporaryDirectory(prefix="unicron-bench-") as folder:
        out, victim = Path(folder), replica
        fault = {"slot": victim, "iteration": AT, "kind": "kill", **point}
        settings = {**MODEL, "TINY_LAYOUT": shape, "TINY_DISTOPT": str(int(sharded))}
        ranks = Counted(out, size, [fault], fork=True, replica=replica, **settings)
        ranks.drive()
        survivors = ranks.plans[1].members  # what is left of the victim's replica stands by to the end
        assert victim not in survivors and all(ranks.exits[slot] == [0] for slot in survivors), ranks.exits
        killed = float((out / f"fault.{victim}.0.{AT}").read_text())
        found = [timing for timing in ranks.timings if "broken" in timing["seconds"]]
        assert {timing["slot"] for timing in found} == set(survivors), "not all survivors told their times"
        moments = {what: max(_at(timing, what) for timing in found) for what in PARTS[1:]}
        ends = [killed, ranks.ended[victim], *moments.values()]
        parts = [1e3 * max(0.0, end - began) for began, end in itertools.pairwise(ends)]
        return Recovery(parts, statistics.median(ranks.busy.values()))


def _at(timing: dict, what: str) -> float:
    """When a rank was there, on the clock that all share; where it had nothing to compute, when it had entered."""
    seconds = timing["seconds"]
    return timing["at"] - seconds["stepped"] + seconds.get(what, seconds["entered"])


def table(rows: dict[str, tuple[str, int, int, bool]], repeats: int) -> dict[str, list[Recovery]]:
    """Measures and prints rows; they take turns, so that a slow minute of the machine strikes all."""
    found: dict[str, list[Recovery]] = {name: [] for name in rows}
    for _ in range(repeats):
        for name, (shape, replica, size, sharded) in rows.items():
            found[name] += [recover(shape, replica, size, point, sharded) for point in POINTS]
    heads = ("runs", "min", "median", "max", "detect", "plan", "groups", "enter", "again", "step", "busy")
    print(f"{'layout':<38}" + "".join(f"{head:>8}" for head in heads))
    for name, runs in found.items():
        totals = [run.overhead for run in runs]
        parts = [statistics.median(run.parts[number] for run in runs) for number in range(len(PARTS))]
        busy = statistics.median(run.busy for run in runs)
        figures = [min(totals), statistics.median(totals), max(totals), *parts, busy]
        print(f"{name:<38}{len(runs):>8}" + "".join(f"{figure:>8.0f}" for figure in figures), flush=True)
    return found


def layouts(repeats: int) -> None:
    """The table of the layouts, and the marks."""
    print(
        f"\nkill -> next step less what is computed again, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; ms;"
    )
    print("medians of the parts: to the pidfd, to the plan, to the groups, state taken, computed again, stepped")
    rows = {}
    for name, (shape, replica, size) in SHAPES.items():
        rows[name] = (shape, replica, size, False)
        rows[f"{name}, distributed optimizer"] = (shape, replica, size, True)
    found = table(rows, repeats)
    for size, most in ASKED.items():
        runs = [1e-3 * run.overhead for name, row in rows.items() if row[2] == size for run in found[name]]
        print_figure(f"kill -> next step, all layouts of {size} ranks, median", statistics.median(runs), "s", most)
        print_figure(f"kill -> next step, all layouts of {size} ranks, slowest", max(runs), "s", most)


def growth(repeats: int) -> None:
    """2 to 16 ranks, all on this machine's cores; the logarithm grows from 1 to 4."""
    print(
        f"\nthe same by the number of ranks, which share {os.cpu_count()} cores; busy: what a rank needs of one of them"
    )
    for sharded in (False, True):
        kind = ", distributed optimizer" if sharded else ""
        rows = {f"DP{size}{kind}": ("1 1 1", 1, size, sharded) for size in SIZES}
        found = table(rows, repeats)
        for what in ("overhead", "busy"):
            medians = [statistics.median(getattr(run, what) for run in runs) for runs in found.values()]
            steepest = max(value / medians[0] / math.log2(size) for value, size in zip(medians, SIZES, strict=True))
            name = "time" if what == "overhead" else "processor's time of a rank"
            print_figure(f"growth{kind}: {name} over that of 2 ranks, over log2", steepest, "", 1.0)
