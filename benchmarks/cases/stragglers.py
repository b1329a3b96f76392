"""Slow ranks: none of a healthy job is ever named, and one that becomes half as fast is named within some iterations.

Each of four ranks draws its times by itself, which is the hardest case: common noise does not show between peers. In
the distributions "of uneven shares" the ranks compute 3, 3, 2 and 1 micro-batches, which the controller makes
comparable.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.report import Report
from unicron_ctl.controller.sense.timing import COLUMNS, PhaseTimes, Times
from unicron_detector.iterations.stragglers import OWN_TIMES, Row, Stragglers

Floats = npt.NDArray[np.float64]
RANKS, SHARES = 4, (3, 3, 2, 1)
USUAL = {"data": 0.02, "forward": 0.3, "backward": 0.6, "reduce": 0.05, "step": 0.03, "outside": 0.001}
BEFORE, AFTER = 600, 400  # healthy iterations before the rank becomes slow, and slow ones


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    iterations: int = 200_000
    """Healthy iterations of each distribution."""
    jobs: int = 20
    """Jobs of each distribution in which a rank becomes slow."""
    only: str = ""
    """A word in the names of the distributions; empty for all."""


SMALLEST = Sizes(1000, 1)


def distributions(rng: np.random.Generator, count: int) -> dict[str, Callable[[], Floats]]:
    """Return functions that draw `count` iterations of all ranks, as a share of the usual time."""
    shape = (count, RANKS)

    def normal(spread: float) -> Floats:
        return np.maximum(0.2, rng.normal(1.0, spread, shape))

    def correlated() -> Floats:
        found, value = np.empty(shape), np.zeros(RANKS)
        for row, noise in enumerate(rng.normal(0.0, 0.05 * np.sqrt(1.0 - 0.95**2), shape)):
            value = 0.95 * value + noise
            found[row] = 1.0 + value
        return np.maximum(0.3, found)

    def paused() -> Floats:
        found, number = normal(0.02), np.arange(count)
        found[number % 50 == 49] += 2.0  # a checkpoint of all ranks
        found[number % 200 == 7, 0] += 10.0  # a slower one of the first rank
        return found

    return {
        "normal, 5 %": lambda: normal(0.05),
        "normal, 10 %, of uneven shares": lambda: normal(0.1),
        "lognormal, 20 %, of uneven shares": lambda: rng.lognormal(0.0, 0.2, shape),
        "gamma, 30 %": lambda: rng.gamma(10.0, 0.1, shape),
        "heavy tail (Pareto, 2.5)": lambda: 0.9 + 0.1 * rng.pareto(2.5, shape),
        "bimodal 1 and 1.8 s": lambda: np.where(rng.random(shape) < 0.3, 1.8, 1.0) * normal(0.02),
        "autocorrelated 5 % (0.95)": correlated,
        "rare spikes, and pauses for saves, of uneven shares": lambda: (
            paused() + (rng.random(shape) < 0.002) * rng.exponential(5.0, shape)
        ),
    }


def rows(times: Floats, uneven: bool, slow: int = -1, since: int = 0, factor: float = 1.0) -> Iterator[Row]:
    """Yield the iterations as the controller compares them. slow: the rank that is so many times as slow, from `since`
    on."""
    seconds = np.array([USUAL[name] for name in COLUMNS])
    work = np.array([name in ("data", "forward", "backward") for name in COLUMNS])
    shares, known = (SHARES if uneven else (1,) * RANKS), PhaseTimes()
    for number, row in enumerate(times):
        phases = seconds * row[:, None]
        phases[:, work] *= np.array(shares)[:, None]
        if slow >= 0 and number >= since:
            phases[slow, work] *= factor
        if uneven:
            known.take_in([Times(number, [*range(RANKS)], phases.astype("<f8").tobytes(), [*shares], True, True)])
            yield known.comparable(1)
        else:
            yield {slot: dict(zip(COLUMNS, phases[slot].tolist(), strict=True)) for slot in range(RANKS)}


def measure(sizes: Sizes, report: Report) -> None:
    """Measure both sides for each distribution."""
    assert set(OWN_TIMES) < set(COLUMNS)
    names = list(distributions(np.random.default_rng(0), 1))
    elapsed = 0.0
    chosen = [(number, name) for number, name in enumerate(names) if sizes.only in name]
    for number, name in chosen:
        times = distributions(np.random.default_rng([1, number]), sizes.iterations)[name]()
        began = time.process_time()
        named = healthy_namings(times, "uneven" in name)
        elapsed += time.process_time() - began
        report.figure(f"healthy ranks named in {sizes.iterations:,} iterations, {name}", named, most=0)
        drawn = (
            distributions(np.random.default_rng([2, number, job]), BEFORE + AFTER)[name]() for job in range(sizes.jobs)
        )
        found = [iterations_until_named(each, "uneven" in name, job % RANKS) for job, each in enumerate(drawn)]
        most = 5 if number == 0 else None
        report.figure(f"half as fast, named after, median, {name}", statistics.median(found), "iterations", most=most)
        report.figure(f"half as fast, named after, worst of {sizes.jobs}, {name}", max(found), "iterations", most=most)
    report.figure("an iteration of four ranks is compared", 1e6 * elapsed / (sizes.iterations * len(chosen)), "us")


def healthy_namings(times: Floats, uneven: bool) -> int:
    """Return how often a rank of a healthy job is named."""
    watch, named, before = Stragglers(), 0, None
    for row in rows(times, uneven):
        found = watch.observe(row)
        named += found is not None and before is None
        before = found
    return named


def iterations_until_named(times: Floats, uneven: bool, slow: int) -> float:
    """Return after how many slow iterations the right rank is named; infinite if another one is, or none."""
    watch = Stragglers()
    for number, row in enumerate(rows(times, uneven, slow, BEFORE, 2.0)):
        found = watch.observe(row)
        if found is not None:
            after = number - BEFORE + 1
            return after if found.slot == slow and after > 0 else float("inf")
    return float("inf")
