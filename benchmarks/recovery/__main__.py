"""Kill to the next optimizer step on this machine, and what the hooks cost while nothing fails: four ranks and every
moment, then all layouts, then 2 to 16 ranks (``layouts.py``), then healthy iterations (``overhead.py``).

Real ranks, gloo and ZeroMQ under the test harness; Slurm and its messages are not in it. Each figure is of several
runs; the machine's own load is in all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.marks import print_figure
from benchmarks.recovery.layouts import growth, layouts
from tests.support import proof
from tests.support.rank_harness import Ranks

SIZE, VICTIM, AT = 4, 2, 2
WARM_UP = 3  # rounds
SLOW = "0.02"  # seconds of sleep per micro-batch, so that computed work can be told from the rest
POINTS = {  # what is killed when, in an iteration of two micro-batches per rank
    "before the first micro-batch": {"at": "fetch", "count": 0, "kind": "kill"},
    "in the middle": {"at": "fetch", "count": 1, "kind": "kill"},
    "before the reduce": {"at": "reduce", "count": 0, "kind": "kill"},
    "in the reduce": {"at": "reduce", "count": 1, "kind": "late", "delay": 0.0003},
    "between reduce and commit": {"at": "reduce", "count": 2, "kind": "kill"},
    "just before the step": {"at": "step", "count": 0, "kind": "kill"},
}


@dataclass
class Recovery:
    """One run: seconds from the kill to the last survivor's next step, in parts, and what was kept."""

    total: float
    detected: float  # kill to readable pidfd
    stopped: float  # to the plan: Break, and all survivors at a known point
    grouped: float  # plan to entered: message, groups, re-pointing
    worked: float  # entered to stepped: restored buckets, lost micro-batches, reduce, commit, step
    gradient: float
    recomputed: int
    reused: int

    @property
    def overhead(self) -> float:
        """Seconds without the recomputed work."""
        return self.total - self.worked


def recover(point: dict, reference: Path) -> Recovery:
    """One run with one kill."""
    with tempfile.TemporaryDirectory(prefix="unicron-bench-") as folder:
        out = Path(folder)
        fault = {"slot": VICTIM, "iteration": AT, **point}
        ranks = Ranks(out, SIZE, [fault], fork=True, TINY_SLOW=SLOW)
        ranks.drive()
        proof.exactly_once(ranks, 5)
        proof.nothing_thrown_away(ranks)
        killed = float((out / f"fault.{VICTIM}.0.{AT}").read_text())
        last = max((timing for timing in ranks.timings if timing["generation"] == 2), key=lambda timing: timing["at"])
        stepped, parts = last["at"], last["seconds"]
        entered = stepped - (parts["stepped"] - parts["entered"])
        struck = ranks.plans[1].step if ranks.plans[1].step is not None else ranks.plans[1].iteration
        work = [index for has in proof.fetched(out)[struck].values() for index in has]
        done = sum(len(status.done) for status in ranks.reports[0].values() if status.iteration == struck)
        broken = ranks.breaks[0][2]
        return Recovery(
            total=stepped - killed,
            detected=ranks.ended[VICTIM] - killed,
            stopped=broken + ranks.rests[0] - ranks.ended[VICTIM],
            grouped=entered - broken - ranks.rests[0],
            worked=stepped - entered,
            gradient=proof.gradient_differences(out, reference, 5)[struck],
            recomputed=len(work) - len(set(work)),
            reused=proof.MICRO_BATCHES if ranks.plans[1].step is not None else done,
        )


def recoveries(repeats: int) -> None:
    """The table of failure points, and the marks."""
    with tempfile.TemporaryDirectory(prefix="unicron-bench-") as folder:
        reference = Path(folder)
        Ranks(reference, SIZE, [], fork=True, TINY_SLOW=SLOW).drive()
        found: dict[str, list[Recovery]] = {name: [] for name in POINTS}
        for _ in range(repeats):  # the points take turns: a slow minute of the machine strikes all of them
            for name, point in POINTS.items():
                found[name].append(recover(point, reference))
    print(f"kill -> next optimizer step, {SIZE} ranks, {repeats} runs each; ms; medians of the parts; micro-batches")
    heads = ("min", "median", "max", "detect", "stop", "groups", "work", "kept", "again")
    print(f"{'killed':<29}" + "".join(f"{head:>8}" for head in heads))
    for name, runs in found.items():
        totals = [1e3 * run.total for run in runs]
        figures = [min(totals), statistics.median(totals), max(totals)]
        for part in ("detected", "stopped", "grouped", "worked"):
            figures.append(1e3 * statistics.median(getattr(run, part) for run in runs))
        for part in ("reused", "recomputed"):
            figures.append(statistics.median(getattr(run, part) for run in runs))
        print(f"{name:<29}" + "".join(f"{figure:>8.0f}" for figure in figures))
    everything = [run for runs in found.values() for run in runs]
    overheads = [run.overhead for run in everything]
    print_figure("kill -> next step less the recomputed work, median", statistics.median(overheads), "s", 1.0)
    print_figure("kill -> next step less the recomputed work, slowest", max(overheads), "s", 1.0)
    print_figure("process exit -> pidfd, slowest", max(r.detected for r in everything), "s", 0.1)
    print_figure(
        "gradient difference at the failed iteration, fp32, largest", max(r.gradient for r in everything), "", 1e-6
    )


def overhead(rounds: int) -> None:
    """Healthy iterations: reporting, silent and plain by turns (see ``overhead.py``)."""
    script = str(Path(__file__).with_name("overhead.py"))
    print(f"\nhealthy iteration, {SIZE} ranks on {os.cpu_count()} cores: a session that reports to its agent, one that")
    print("does not, and plain Megatron, by turns; ms; ratios of neighbours: median and quartiles")
    print(
        f"{'hidden, micro-batches':<23}{'rounds':>7}{'reports':>9}{'silent':>9}{'plain':>9}{'reports/silent':>23}",
        end="",
    )
    print(f"{'reports/plain':>23}")
    for hidden, micro_batches, share in ((64, 8, 1.0), (512, 8, 0.5), (512, 64, 0.2)):
        with tempfile.TemporaryDirectory(prefix="unicron-bench-") as folder:
            count = max(4, round(rounds * share))
            settings = {
                "TINY_HIDDEN": str(hidden),
                "TINY_MICRO_BATCHES": str(micro_batches),
                "TINY_ITERATIONS": str(2 * (count + WARM_UP)),
                "TINY_SCRIPT": script,
            }
            Ranks(Path(folder), SIZE, [], fork=True, TINY_SAVE="0", **settings).drive()
            times = json.loads((Path(folder) / "overhead.json").read_text())[WARM_UP:]
        columns = [1e3 * statistics.median(turn[place] for turn in times) for place in range(3)]
        ratios = [statistics.quantiles([turn[0] / turn[place] for turn in times], n=4) for place in (1, 2)]
        print(
            f"{f'{hidden}, {micro_batches}':<23}{count:>7}"
            + "".join(f"{column:>9.1f}" for column in columns)
            + "".join(f"{f'{middle:.3f} ({low:.3f}..{high:.3f})':>23}" for low, middle, high in ratios),
            flush=True,
        )
    print_figure("iteration with hooks / without them, the longest iteration, median", ratios[0][1], "", 1.005)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="runs per failure point")
    parser.add_argument("--rounds", type=int, default=80, help="of healthy iterations of each kind")
    parser.add_argument("--only", action="append", choices=("points", "layouts", "growth", "overhead"))
    options = parser.parse_args()
    parts = {
        "points": lambda: recoveries(options.repeats),
        "layouts": lambda: layouts(options.repeats),
        "growth": lambda: growth(options.repeats),
        "overhead": lambda: overhead(options.rounds),
    }
    for name in options.only or parts:
        parts[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
