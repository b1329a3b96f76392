"""Shares by speed: how often healthy jobs change them, and what one slow rank of a real job costs with them.

The micro-batches of the real job mostly sleep, so that four ranks on two cores do not slow each other down.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path

import msgspec

from benchmarks.report import Report
from tests.support import rank_harness
from tests.support.paces import PACES, Job, noise
from tests.support.processes import ROOT
from tests.support.slowed import Slow, SlowedRanks
from unicron_transition.iteration.shares import Schedule, best, equal, slowest


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    iterations: int = 200_000
    """Healthy iterations of each distribution."""
    trials: int = 100
    """Slow replicas of each distribution."""
    each: int = 8
    """Micro-batches of a rank in the real job."""
    milliseconds: int = 50
    """Time of each."""


SMALLEST = Sizes(1000, 2, 4, 20)
RANKS, SLOW, FACTOR = 4, 1, 2.0
HEALTHY, SLOWED, SETTLED = 12, 24, 10  # iterations before the injection, after it, and until the shares must fit
SOON = 40  # iterations after which shares in noisy jobs are looked at


def measure(sizes: Sizes, report: Report) -> None:
    """Measure both parts."""
    healthy(sizes, report)
    slow_replicas(sizes, report)
    real(sizes, report)


def healthy(sizes: Sizes, report: Report) -> None:
    """Count changes of shares in healthy jobs of four replicas."""
    total = 0
    for name in PACES:
        job, began = Job(RANKS, RANKS * 8, noise(name), random.Random(name)), time.process_time()
        job.run(sizes.iterations)
        micros = 1e6 * (time.process_time() - began) / sizes.iterations
        report.row(f"  {name}: changes, us of CPU an iteration", job.changes, micros, label=44)
        total += job.changes
    report.figure("changes of shares in healthy iterations, all distributions", total, "", most=0)


def slow_replicas(sizes: Sizes, report: Report) -> None:
    """Let one of four replicas become half as fast, in jobs of each distribution."""
    paces = [FACTOR if replica == SLOW else 1.0 for replica in range(RANKS)]
    optimum = slowest(best(RANKS * 8, paces, Schedule()), paces, Schedule())
    report.text(f"one of four becomes {FACTOR:g}x slower: jobs within 5 % of the optimum after so many iterations")
    for name in ("normal 2 %", *PACES):
        within = [0, 0]
        for trial in range(sizes.trials):
            job = Job(RANKS, RANKS * 8, noise(name), random.Random(f"{name} {trial}"))
            job.run(60)
            job.factors[SLOW] = FACTOR
            for number, iterations in enumerate((SETTLED, SOON - SETTLED)):
                job.run(iterations)
                within[number] += slowest(job.shares, paces, Schedule()) <= 1.05 * optimum
        report.row(
            f"  {name}: {SETTLED}, {SOON}", *(100.0 * count / sizes.trials for count in within), label=44, digits=0
        )
        if name == "normal 2 %":
            report.figure(
                f"within 5 % of the optimum after {SETTLED} iterations, {name}",
                100.0 * within[0] / sizes.trials,
                "%",
                least=99,
            )


def real(sizes: Sizes, report: Report) -> None:
    """Train a real job of which one rank becomes slow, with shares by speed and with equal ones."""
    rank_harness.LIMIT = 3600.0  # seconds of a run, on a busy machine
    total = RANKS * sizes.each
    paces = [FACTOR if slot == SLOW else 1.0 for slot in range(RANKS)]
    usual, least = (slowest(of, paces, Schedule()) for of in (equal(total, RANKS), best(total, paces, Schedule())))
    optimum = least / sizes.each
    report.text(f"a gloo job of {RANKS} ranks, {sizes.each} micro-batches of {sizes.milliseconds} ms each, one slow:2")
    for mode in ("equal", "speed"):
        before, after, shares = train(sizes, total, mode)
        report.row(f"  {mode}: iteration before, after; ratio", before, after, after / before, label=44, digits=3)
        report.text(f"  rounds at the end: {shares}")
        if mode == "speed":
            what = f"iteration after {SETTLED} iterations over the healthy one's {optimum:.3g}x, the integer optimum"
            report.figure(what, after / before / optimum, "", most=1.05)
    report.text(f"  with equal shares {usual / sizes.each:.3g}x, with the best ones {optimum:.3g}x")


def train(sizes: Sizes, total: int, mode: str) -> tuple[float, float, list[int]]:
    """Return the seconds of an iteration before and well after one rank became slow, and the last shares."""
    iterations = HEALTHY + SLOWED
    settings = {
        "TINY_SCRIPT": str(ROOT / "tests" / "support" / "tiny_plain.py"),
        "TINY_ITERATIONS": str(iterations),
        "TINY_MICRO_BATCHES": str(total),
        "TINY_SAVE": "0",
        "TINY_SLOW": str(sizes.milliseconds / 1e3),
        "UNICRON_SHARES": mode,
    }
    with tempfile.TemporaryDirectory(prefix="unicron-bench-") as folder:
        ranks = SlowedRanks(Path(folder), RANKS, [Slow(SLOW, HEALTHY - 1, FACTOR)], **settings)
        ranks.drive()
        assert not ranks.breaks, ranks.breaks
        seconds = {step["iteration"]: step["seconds"] for step in ranks.steps if step["slot"] == 0}
        shares = [ranks.share(slot, iterations - 1) for slot in range(RANKS)]
    before = statistics.median(seconds[number] for number in range(2, HEALTHY))
    after = statistics.median(seconds[number] for number in range(HEALTHY + SETTLED, iterations))
    return before, after, shares
