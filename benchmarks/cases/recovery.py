"""From the kill of a rank to the next optimizer step, by layout and number of ranks; and the cost of reports.

The ranks, gloo and ZeroMQ are real, under the test harness and without Slurm. The time of repeated work is subtracted:
from the last survivor's entry into the new generation until the last one has computed its micro-batches. The model is
the smallest possible, so that nearly all other time is Unicron's, but for the reduce and the step that any iteration
has: with sixteen ranks on two cores they take longer than the rest. So the growth is also given without those of the
next iteration.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import Report, quartiles
from tests.support import rank_harness
from tests.support.moments import fault
from tests.support.rank_harness import Ranks
from unicron_ctl.shared.protocol.wire import Plan


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    repeats: int = 5
    """Runs of each layout and number of ranks, with a kill at two moments."""
    rounds: int = 80
    """Healthy iterations of each kind."""
    only: str = "layouts,growth,overhead"
    """Parts, with commas between."""
    models: int = 3
    """Models of the healthy iterations, the smallest first."""
    rows: str = ""
    """The beginning of the layouts' names; empty for all."""


SMALLEST = Sizes(1, 8, models=1, rows="DP4")
AT = 2  # the iteration in which a rank is killed
MODEL = {"TINY_HIDDEN": "32", "TINY_MICRO_BATCHES": "32", "TINY_ITERATIONS": "4", "TINY_SAVE": "0"}
SHAPES = {  # TP PP VPP, ranks of a replica, ranks
    "DP4": ("1 1 1", 1, 4),
    "DP2 TP2": ("2 1 1", 2, 4),
    "DP2 PP2": ("1 2 1", 2, 4),
    "DP8": ("1 1 1", 1, 8),
    "DP4 TP2": ("2 1 1", 2, 8),
    "DP4 PP2": ("1 2 1", 2, 8),
    "DP2 TP2 PP2": ("2 2 1", 4, 8),
}
GOALS = {4: 0.5, 8: 1.0}  # seconds, by ranks
COUNTS = (2, 4, 8, 16)  # ranks that share this machine's cores
PARTS = ("detected", "planned", "grouped", "entered", "computed", "stepped")
MODELS = ((64, 8, 1.0), (512, 8, 0.5), (512, 64, 0.2))  # hidden, micro-batches, share of the rounds
RANKS, WARM_UP = 4, 3  # of healthy iterations
SCRIPT = Path(__file__).with_name("ranks") / "recovery.py"


def measure(sizes: Sizes, report: Report) -> None:
    """Measure the chosen parts."""
    rank_harness.LIMIT = 3600.0  # seconds of a run, on a busy machine
    for part in sizes.only.split(","):
        {"layouts": layouts, "growth": growth, "overhead": overhead}[part](sizes, report)


def middle(runs: Sequence[object], name: str) -> float:
    """Return the median of a field."""
    return statistics.median(getattr(run, name) for run in runs)


# ------------------------------------------------------------ layouts, and numbers of ranks
@dataclass(frozen=True)
class Row:
    """A layout, with or without a distributed optimizer."""

    shape: str
    replica: int
    size: int
    sharded: bool


@dataclass
class LayoutRecovery:
    """One run in milliseconds."""

    parts: list[float]
    """The time of each of `PARTS`, until the last survivor was there."""
    busy: float
    """Median CPU time of a survivor from the Break to the new generation."""
    usual: float
    """Median reduce and step of a survivor in the next iteration, which nothing disturbs."""

    @property
    def overhead(self) -> float:
        """The sum without repeated work."""
        return sum(self.parts) - self.parts[PARTS.index("computed")]

    @property
    def transition(self) -> float:
        """The same without the reduce and the step that an undisturbed iteration has, too."""
        return max(1.0, self.overhead - self.usual)


class CountedRanks(Ranks):
    """Ranks whose CPU time is read from the Break until all are in the new generation."""

    busy: dict[int, float]
    """Milliseconds by slot."""

    def _break(self, lost: list[int]) -> None:
        self.busy = {slot: -busy_ms(self.ranks[slot].child.pid) for slot in self.members if slot not in lost}
        super()._break(lost)

    def _announce(self, plan: Plan) -> None:
        super()._announce(plan)
        if self.breaks and len(self.plans) == 2:
            self.busy = {slot: self.busy[slot] + busy_ms(self.ranks[slot].child.pid) for slot in plan.members}


def busy_ms(pid: int) -> float:
    """Return the CPU time of a process, ended threads included (clock_getcpuclockid(3))."""
    return 1e3 * time.clock_gettime((~pid << 3) | 2)


def recover_in(row: Row, at: str, count: int) -> LayoutRecovery:
    """Run with one kill, of the first rank of the second replica."""
    with tempfile.TemporaryDirectory(prefix="unicron-bench-") as folder:
        out, victim = Path(folder), row.replica
        settings = {**MODEL, "TINY_LAYOUT": row.shape, "TINY_DISTOPT": str(int(row.sharded))}
        faults = [fault(victim, AT, at, count)]
        ranks = CountedRanks(out, row.size, faults, fork=True, replica=row.replica, **settings)
        ranks.drive()
        survivors = ranks.plans[1].members  # the rest of the victim's replica stands by to the end
        assert victim not in survivors and all(ranks.exits[slot] == [0] for slot in survivors), ranks.exits
        killed = float((out / f"fault.{victim}.0.{AT}").read_text())
        timings = [timing for timing in ranks.timings if "broken" in timing["seconds"]]
        assert {timing["slot"] for timing in timings} == set(survivors), "not all survivors reported their times"
        moments = {part: max(moment(timing, part) for timing in timings) for part in PARTS[1:]}
        ends = [killed, ranks.ended[victim], *moments.values()]
        parts = [1e3 * max(0.0, end - began) for began, end in itertools.pairwise(ends)]
        next_one = [step["phases"] for step in ranks.steps if step["iteration"] == AT + 1 and step["slot"] in survivors]
        usual = statistics.median(1e3 * (phases["reduce"] + phases["step"]) for phases in next_one)
        return LayoutRecovery(parts, statistics.median(ranks.busy.values()), usual)


def moment(timing: Mapping[str, Any], part: str) -> float:
    """Return when a rank had done a part; if it had nothing to compute, when it had entered."""
    seconds = timing["seconds"]
    found: float = timing["at"] - seconds["stepped"] + seconds.get(part, seconds["entered"])
    return found


def table(rows: Mapping[str, Row], repeats: int, report: Report) -> dict[str, list[LayoutRecovery]]:
    """Measure rows by turns, and print them."""
    found: dict[str, list[LayoutRecovery]] = {name: [] for name in rows}
    for _ in range(repeats):
        for name, row in rows.items():
            found[name] += [recover_in(row, "fetch", 1), recover_in(row, "reduce", 0)]
    heads = ("runs", "min", "median", "max", "detect", "plan", "groups", "enter", "again", "step", "busy", "usual")
    report.row("layout; ms", *heads, width=8)
    for name, runs in found.items():
        totals = [run.overhead for run in runs]
        parts = [statistics.median(run.parts[number] for run in runs) for number in range(len(PARTS))]
        figures = [
            min(totals),
            statistics.median(totals),
            max(totals),
            *parts,
            middle(runs, "busy"),
            middle(runs, "usual"),
        ]
        report.row(name, len(runs), *figures, width=8, digits=0)
    return found


def layouts(sizes: Sizes, report: Report) -> None:
    """Kill a rank in each layout, with and without a distributed optimizer."""
    report.text("\nkill -> next step without repeated work; medians of the parts: to the pidfd, to the plan, to the")
    report.text("groups, state taken, computed again, stepped; busy: CPU time of a rank; usual: reduce and step of the")
    report.text("next iteration")
    rows = {
        f"{name}, distributed optimizer" if sharded else name: Row(*shape, sharded)
        for name, shape in SHAPES.items()
        for sharded in (False, True)
        if name.startswith(sizes.rows)
    }
    found = table(rows, sizes.repeats, report)
    for size, most in GOALS.items():
        runs = [1e-3 * run.overhead for name, row in rows.items() if row.size == size for run in found[name]]
        if runs:
            what = f"kill -> next step, all layouts of {size} ranks"
            report.figure(f"{what}, median", statistics.median(runs), "s", most)
            report.figure(f"{what}, slowest", max(runs), "s", most)


def growth(sizes: Sizes, report: Report) -> None:
    """Kill a rank of 2 to 16."""
    report.text(f"\nthe same by the number of ranks, which share {os.cpu_count()} cores")
    for sharded in (False, True):
        kind = ", distributed optimizer" if sharded else ""
        found = table({f"DP{size}{kind}": Row("1 1 1", 1, size, sharded) for size in COUNTS}, sizes.repeats, report)
        fields = {
            "overhead": "time",
            "transition": "time without a usual reduce and step",
            "busy": "CPU time of a rank",
        }
        for field, name in fields.items():
            medians = [middle(runs, field) for runs in found.values()]
            steepest = max(value / medians[0] / math.log2(size) for value, size in zip(medians, COUNTS, strict=True))
            report.figure(f"growth{kind}: {name} over that of 2 ranks, over log2", steepest, "", 1.0)


# ------------------------------------------------------------ healthy iterations
def overhead(sizes: Sizes, report: Report) -> None:
    """Compare healthy iterations of a session that reports, one that does not, and plain Megatron (`SCRIPT`)."""
    report.text(
        f"\nhealthy iteration, {RANKS} ranks: a session that reports to its agent, one that does not, and plain"
    )
    report.text("Megatron, by turns; ms; ratios of neighbours: median and quartiles")
    report.row(
        "hidden, micro-batches", "rounds", "reports", "silent", "plain", "reports/silent, reports/plain", label=23
    )
    for hidden, micro_batches, share in MODELS[: sizes.models]:
        with tempfile.TemporaryDirectory(prefix="unicron-bench-") as folder:
            count = max(4, round(sizes.rounds * share))
            settings = {
                "TINY_HIDDEN": str(hidden),
                "TINY_MICRO_BATCHES": str(micro_batches),
                "TINY_ITERATIONS": str(2 * (count + WARM_UP)),
                "TINY_SCRIPT": str(SCRIPT),
            }
            Ranks(Path(folder), RANKS, [], fork=True, TINY_SAVE="0", **settings).drive()
            times = json.loads((Path(folder) / "overhead.json").read_text())[WARM_UP:]
        reports, silent, plain = zip(*times, strict=True)
        ratios = [quartiles(reports, other) for other in (silent, plain)]
        columns = [1e3 * statistics.median(each) for each in (reports, silent, plain)]
        texts = "  ".join(f"{each[1]:.3f} ({each[0]:.3f}..{each[2]:.3f})" for each in ratios)
        report.row(f"{hidden}, {micro_batches}", count, *columns, f"  {texts}", label=23, digits=1)
    report.figure("iteration with hooks / without them, the longest iteration, median", ratios[0][1], "", 1.005)
