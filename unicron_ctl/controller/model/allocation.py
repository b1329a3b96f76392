"""A job that is one allocation of several nodes (`sbatch -N 8`). Slurm shows it as one; here each node is an element.

An element's number is the place of its node in the allocation as Slurm first gave it. A node that Slurm takes out of it
later (`--no-kill`) leaves its number empty; when Slurm requeues the whole job, its nodes are counted anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from unicron.ctl.controller.model.job_state import JobState
from unicron.ctl.slurm.slurm_client import ElementInfo
from unicron.ctl.slurm.squeue import hosts


def by_node(elements: Iterable[ElementInfo], jobs: Mapping[str, JobState]) -> Iterator[ElementInfo]:
    """What Slurm shows, with an element for each node of an allocation of several."""
    for info in elements:
        names = [] if info.array or info.brief else hosts(info.node or "")
        order = _order(info, names, jobs.get(info.job))
        if len(order) < 2:
            yield info
            continue
        here = set(names)
        for number, name in enumerate(order):
            if name in here or not names:  # while it waits, and once it has ended, Slurm may show no nodes
                yield replace(info, element=number, node=name if names else None, allocation=len(order))


def _order(info: ElementInfo, names: list[str], job: JobState | None) -> list[str]:
    """The nodes of the allocation, those that it has lost included."""
    if info.array or info.brief or job is None:
        return names
    known = job.nodes
    same = info.restarts == job.nodes_of_restart and set(names) <= set(known)
    return known if same or not names else names
