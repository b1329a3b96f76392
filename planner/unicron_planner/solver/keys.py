"""Gains as integers, so that sums are exact and a tie is a tie.

One int64 *key* per (job, size) holds, most significant first: the gain G, minus the job's disturbance (0 or 1), minus
its move |x' - x_t|. Keys add up without rounding, so the best sum of keys is the best plan by gain, then by fewest jobs
disturbed, then by smallest total move, whatever the order in which jobs are summed.

The gain part is exact where the numbers of the scenario are short decimals (all sizes of all jobs are then multiples of
one unit, and sums that are equal on paper are equal here). Otherwise it is rounded to 2^-40 or less of the sum of the
jobs' largest gains: plans closer than that count as equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from unicron_planner.problem.objective import Job, PlanError, Scenario

BITS = 60  # the sum of all keys stays below 2^60 in size, which leaves room for bounds in int64


@dataclass(frozen=True)
class Row:
    """The sizes that one job can be given, ascending from 0, with their keys (int64 each)."""

    sizes: np.ndarray
    keys: np.ndarray


def sizes_of(job: Job, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """(sizes, FLOP/s with the savings of spares) that the job can be given on up to `nodes` nodes; ascending from 0."""
    table = job.rates
    sizes = table.sizes
    low, high = np.searchsorted(sizes, [max(job.min_nodes, 1), min(nodes, job.max_nodes or nodes) + 1])
    zero = np.zeros(1, dtype=np.int64)
    found = np.concatenate([zero, sizes[low:high]])
    return found, np.concatenate([zero, table.rates[low:high]]) + _spare_savings(job, found)


def _spare_savings(job: Job, sizes: np.ndarray) -> np.ndarray:
    """The FLOP/s that the spares save, by size."""
    if not job.spares:
        return np.zeros(len(sizes))
    return np.fromiter((job.spares.get(size, 0.0) for size in sizes.tolist()), dtype=np.float64, count=len(sizes))


def _by_relation(job: Job, sizes: np.ndarray, values: Sequence[float]) -> np.ndarray:
    """Spreads values (at 0, below x_t, at x_t, above x_t) over `sizes`."""
    zero, below, same, above = values
    works, now = np.minimum(sizes, job.working), min(job.nodes, job.working)
    out: np.ndarray = np.where(works < now, below, np.where(works == now, same, above))
    out[0] = same if job.nodes == 0 else zero
    return out


def _relations(job: Job) -> tuple[int, int, int, int]:
    """One size for each of the relations of `_by_relation`; D_transition depends on nothing else."""
    now = min(job.nodes, job.working)
    return 0, max(now - 1, 1), now, now + 1


def transition_seconds(scenario: Scenario, job: Job, sizes: np.ndarray, layout: str | None = None) -> np.ndarray:
    """D_transition times the indicator of G, for each size."""
    seconds = [scenario.d_transition(job, k, layout) if job.disturbed(k, layout) else 0.0 for k in _relations(job)]
    return _by_relation(job, sizes, tuple(seconds))


def gains(scenario: Scenario, job: Job) -> tuple[np.ndarray, np.ndarray]:
    """(sizes, G in weighted FLOP) of one job, vectorised `Scenario.g`."""
    sizes, rates = sizes_of(job, scenario.nodes)
    if not job.layouts:
        return sizes, job.weight * rates * scenario.d_running - job.now * transition_seconds(scenario, job, sizes)
    ways = [_gains_in(scenario, job, sizes, name) for name in job.layouts]
    return sizes, np.max(ways, axis=0)


def _gains_in(scenario: Scenario, job: Job, sizes: np.ndarray, layout: str) -> np.ndarray:
    """G in one layout."""
    table = job.layouts[layout]
    rates = np.fromiter((table.get(size, 0.0) for size in sizes.tolist()), dtype=np.float64, count=len(sizes))
    cost = job.now * transition_seconds(scenario, job, sizes, layout)
    gain: np.ndarray = job.weight * (rates + _spare_savings(job, sizes)) * scenario.d_running - cost
    return gain


def _changes_layout(scenario: Scenario, job: Job, sizes: np.ndarray) -> np.ndarray:
    """Whether the job goes to another layout, by size."""
    if job.layout is None:
        return np.zeros(len(sizes), dtype=bool)
    stays, best = _gains_in(scenario, job, sizes, job.layout), gains(scenario, job)[1]
    changed: np.ndarray = (best > stays) & (sizes > 0)
    return changed


def _decimal(value: float) -> Fraction:
    """The decimal number as written, e.g. exactly 1/10 for 0.1."""
    return Fraction(repr(float(value)))


def _integers(arrays: list[np.ndarray]) -> list[np.ndarray] | None:
    """The rates as integers in one common unit, or None if no unit fits."""
    joined = np.concatenate(arrays)
    for digits in (0, 3, 6, 9):
        some = joined[:64] * 10.0**digits  # a cheap test: measured rates fail it
        if np.any(np.abs(np.rint(some) - some) > 4e-16 * some):
            continue
        scaled = joined * 10.0**digits
        rounded = np.rint(scaled)
        if scaled.max(initial=0.0) >= 2.0**62:
            return None
        if np.all(np.abs(rounded - scaled) <= 4e-16 * scaled):
            whole = rounded.astype(np.int64)
            unit = max(int(np.gcd.reduce(whole)), 1)
            return np.split(whole // unit, np.cumsum([len(a) for a in arrays])[:-1])
    return None


def _exact(scenario: Scenario, jobs: Sequence[Job], limit: int) -> list[np.ndarray] | None:
    """G / (unit x D_running) of all jobs as exact integers whose largest sizes add up to less than `limit`, or None."""
    if any(job.layouts or job.must_run for job in jobs):
        return None
    tables = [sizes_of(job, scenario.nodes) for job in jobs]
    current = [np.array([job.flops[job.nodes] if job.nodes and job.runs(job.nodes) else 0.0]) for job in jobs]
    integers = _integers([rate for _, rate in tables] + current)
    if integers is None:
        return None
    rates, now = integers[: len(jobs)], [int(each[0]) for each in integers[len(jobs) :]]
    weights = [_decimal(job.weight) for job in jobs]
    costs = [_exact_costs(scenario, job, weight * rate) for job, weight, rate in zip(jobs, weights, now, strict=True)]
    return _scale_gains(jobs, [sizes for sizes, _ in tables], weights, rates, costs, limit)


def _scale_gains(
    jobs: Sequence[Job],
    sizes: list[np.ndarray],
    weights: list[Fraction],
    rates: list[np.ndarray],
    costs: list[list[Fraction]],
    limit: int,
) -> list[np.ndarray] | None:
    """weight x rate - cost of each job in one unit, or None if the numbers are too large."""
    common = math.lcm(*(part.denominator for parts in ([weights], costs) for some in parts for part in some))
    largest = [
        weight * max(int(rate.max()), 1) + max(some) for weight, rate, some in zip(weights, rates, costs, strict=True)
    ]
    if common * sum(largest) >= 2**62:
        return None
    out = []
    for job, own, weight, rate, some in zip(jobs, sizes, weights, rates, costs, strict=True):
        cost = _by_relation(job, own, tuple(int(common * part) for part in some))
        out.append(int(common * weight) * rate - cost)
    unit = max(int(np.gcd.reduce(np.abs(np.concatenate(out)))), 1)
    out = [values // unit for values in out]
    return out if sum(int(np.abs(values).max()) for values in out) < limit else None


def _exact_costs(scenario: Scenario, job: Job, weighted: Fraction) -> list[Fraction]:
    """A transition's cost in each of the relations, over D_running. weighted: the job's weighted rate now."""
    d_running = _decimal(scenario.mtbf_node_hours) * 3600 / max(scenario.nodes, 1)
    return [
        weighted * _decimal(scenario.d_transition(job, k)) / d_running if job.disturbed(k) else Fraction(0)
        for k in _relations(job)
    ]


def rows(scenario: Scenario, jobs: Sequence[Job] | None = None) -> list[Row]:
    """One Row per job, all in the same scale. jobs: by default those of the scenario; there may be several variants of
    one job among them."""
    jobs = scenario.jobs if jobs is None else jobs
    # Room for the tie-breaks: one disturbance per job, and every node of the cluster and of the jobs moving.
    move_bits = (scenario.nodes + sum(job.nodes for job in jobs) + 1).bit_length()
    shift = move_bits + (len(jobs) + 1).bit_length()
    value_bits = BITS - shift - 1
    if value_bits < 24:
        raise PlanError(f"{len(jobs)} jobs on {scenario.nodes} nodes are too many to plan at once")
    values = _exact(scenario, jobs, 2**value_bits)
    tables = [gains(scenario, job) for job in jobs]
    if values is None:
        total = sum(float(np.abs(gain).max()) for _, gain in tables)
        for job, (_, gain) in zip(jobs, tables, strict=True):
            if job.must_run:
                gain[0] -= 2 * total  # more than all other choices together bring
        total = sum(float(np.abs(gain).max()) for _, gain in tables)
        scale = 2.0 ** (value_bits - 1) / total if total > 0 else 0.0
        values = [np.rint(gain * scale).astype(np.int64) for _, gain in tables]
    out = []
    for job, (sizes, _), value in zip(jobs, tables, values, strict=True):
        moved = np.abs(sizes - job.nodes)
        works = np.minimum(sizes, job.working) != min(job.nodes, job.working)
        changed = works | _changes_layout(scenario, job, sizes)
        disturbed = np.zeros_like(sizes) if job.lost_worker else changed.astype(np.int64)
        out.append(Row(sizes, (value << shift) - (disturbed << move_bits) - moved))
    return out
