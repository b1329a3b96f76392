"""Naive splits of a cluster among jobs, for comparison: equally, by weight, by model size."""

from __future__ import annotations

import re

from unicron_planner.problem.objective import Job, PlanError, Scenario


def model_size(job: Job) -> float:
    """Billions of parameters if the job's name contains them ("gpt-13b"), else its minimum size."""
    match = re.search(r"(\d+(?:\.\d+)?)\s*b(?![a-z0-9])", job.name.lower())
    return float(match[1]) if match and float(match[1]) > 0 else float(max(job.min_nodes, 1))


SHARES = {"equally": lambda job: 1.0, "by_weight": lambda job: job.weight, "by_size": model_size}


def split(scenario: Scenario, how: str) -> dict[str, int]:
    """Nodes by job in proportion to its share, each rounded down to a size that it can run. The rest raises the jobs to
    their next size, those furthest below their share first. Throughput and present nodes do not matter."""
    if how not in SHARES:
        raise PlanError(f"unknown split {how!r}: use {', '.join(SHARES)}")
    shares = {job.name: SHARES[how](job) for job in scenario.jobs}
    total = sum(shares.values())
    wanted = {name: scenario.nodes * share / total if total else 0.0 for name, share in shares.items()}
    out = {job.name: job.options(int(wanted[job.name] + 1e-9))[-1] for job in scenario.jobs}
    left = scenario.nodes - sum(out.values())
    for job in sorted(scenario.jobs, key=lambda job: (out[job.name] - wanted[job.name], job.name)):
        higher = [size for size in job.options(out[job.name] + left) if size > out[job.name]]
        if higher and (wanted[job.name] > out[job.name]):
            left -= higher[0] - out[job.name]
            out[job.name] = higher[0]
    return out
