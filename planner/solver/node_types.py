"""Several types of node: a job runs on nodes of one type at a time, with a throughput of its own on each.

The same dynamic program with one table axis per type. A change of type disturbs the job and moves all its nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from unicron.planner.problem.model import Job, PlanError, Scenario
from unicron.planner.solver.plan import Plan, flops_text, nodes_text

LARGEST = 2_000_000  # table entries; two types of 1,400 nodes, or three of 125


class _Option(NamedTuple):
    """One thing that a job can be given. kind: type of node, None with no nodes. gain: G, weighted FLOP. disturbed: 0
    or 1. moved: nodes that change."""

    kind: str | None
    size: int
    gain: float
    disturbed: int
    moved: int


def _options(scenario: Scenario, job: Job) -> list[_Option]:
    """Everything that the job can be given; nothing at all first."""
    now_type = job.node_type
    by_type = job.flops_by_type or {kind: job.flops for kind in scenario.types}
    if now_type is None and len(by_type) == 1:
        now_type = next(iter(by_type))
    now = _rate(job, {} if now_type is None else by_type.get(now_type, {}), job.nodes)
    out = [_option(scenario, job, None, 0, 0.0, now, job.nodes == 0)]
    for kind in sorted(by_type):
        for size in by_type[kind]:
            rate = _rate(job, by_type[kind], size)
            if size <= scenario.types[kind] and _fits(job, size):
                out.append(_option(scenario, job, kind, size, rate, now, kind == now_type or now_type is None))
    return out


def _fits(job: Job, size: int) -> bool:
    return size >= max(job.min_nodes, 1) and (job.max_nodes is None or size <= job.max_nodes)


def _rate(job: Job, flops: Mapping[int, float], size: int) -> float:
    return job.weight * flops.get(size, 0.0) if size and _fits(job, size) else 0.0


def _option(
    scenario: Scenario, job: Job, kind: str | None, size: int, rate: float, now: float, same_type: bool
) -> _Option:
    """rate, now: F with this option and at present, weighted FLOP/s."""
    moved = abs(size - job.nodes) if same_type or not size else job.nodes + size
    disturbed = job.lost_worker or moved > 0
    seconds = scenario.d_transition(job, size)
    if moved and size == job.nodes:  # the same count on another type: its state moves
        seconds = job.transition.get("move", seconds)
    gain = rate * scenario.d_running - (now * seconds if disturbed else 0.0)
    return _Option(kind, size, gain, int(disturbed), moved)


def solve_typed(scenario: Scenario) -> Plan:
    """The best Plan where the cluster has several types of node; PlanError where the table would be too large."""
    kinds = sorted(scenario.types)
    axes: dict[str | None, int] = {kind: axis for axis, kind in enumerate(kinds)}
    shape = tuple(scenario.types[kind] + 1 for kind in kinds)
    if math.prod(shape) > LARGEST:
        raise PlanError(
            f"{len(kinds)} node types of these sizes need a table of {math.prod(shape):,} entries (at most "
            f"{LARGEST:,}): merge types or plan the types apart"
        )
    jobs = sorted(scenario.jobs, key=lambda job: job.name)
    options = [_options(scenario, job) for job in jobs]
    keys = _keys(scenario, options)
    tables = [np.zeros(shape, dtype=np.int64)]
    for listed, values in zip(reversed(options), reversed(keys), strict=True):
        best = tables[-1] + values[0]
        for (kind, size, *_), key in zip(listed[1:], values[1:], strict=True):
            axis = axes[kind]
            into = tuple(slice(size, None) if a == axis else slice(None) for a in range(len(kinds)))
            since = tuple(slice(None, n - size) if a == axis else slice(None) for a, n in enumerate(shape))
            np.maximum(best[into], tables[-1][since] + key, out=best[into])
        tables.append(best)
    tables.reverse()
    left = [n - 1 for n in shape]
    picked: dict[str, _Option] = {}
    for job, listed, values, rest in zip(jobs, options, keys, tables[1:], strict=True):
        choices = [
            (key + int(rest[_without(left, axes.get(o.kind), o.size)]), o.size, -i, o)
            for i, (o, key) in enumerate(zip(listed, values, strict=True))
            if o.kind is None or o.size <= left[axes[o.kind]]
        ]
        _, size, _, option = max(choices)
        picked[job.name] = option
        if option.kind is not None:
            left[axes[option.kind]] -= size
    reasons, waf = {}, 0.0
    for job in scenario.jobs:
        kind, size, _, disturbed, _ = picked[job.name]
        rate = _rate(job, (job.flops_by_type or {}).get(kind, job.flops), size) if kind else 0.0
        waf += rate
        verb = "moves to" if disturbed else "stays on"
        reasons[job.name] = (
            f"{verb} {nodes_text(size)} of type {kind} ({flops_text(rate)})"
            if kind
            else "gets no nodes: they bring more weighted FLOP/s in other jobs"
        )
    return Plan(
        assignment={job.name: picked[job.name].size for job in scenario.jobs},
        objective=math.fsum(option.gain for option in picked.values()),
        waf=waf,
        reasons=reasons,
        spares=sum(left),
        types={job.name: kind for job in scenario.jobs if (kind := picked[job.name].kind)},
    )


def _without(left: list[int], axis: int | None, size: int) -> tuple[int, ...]:
    return tuple(n - size if a == axis else n for a, n in enumerate(left))


def _keys(scenario: Scenario, options: list[list[_Option]]) -> list[list[int]]:
    """Integer keys as in `solver.keys`, with gains rounded to a part in 2^40 or finer of the largest possible sum."""
    total = sum(max(abs(Fraction(option.gain)) for option in listed) for listed in options)
    moves = 2 * (scenario.nodes + sum(job.nodes for job in scenario.jobs)) + 1
    move_bits = moves.bit_length()
    shift = move_bits + (len(options) + 1).bit_length()
    scale = Fraction(2 ** (60 - shift - 2)) / total if total else Fraction(0)
    return [
        [
            (round(Fraction(gain) * scale) << shift) - (disturbed << move_bits) - moved
            for _, _, gain, disturbed, moved in listed
        ]
        for listed in options
    ]
