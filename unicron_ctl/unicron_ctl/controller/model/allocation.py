"""Elements of several nodes: a job that is one allocation (`sbatch -N 8`), and the blocks of an array (`sbatch
--array=0-3 -N 4`). Slurm shows each as one row; here each of their nodes has a number of its own.

In an allocation that is the node's place in it, as Slurm first gave it. A node that Slurm takes out later (`--no-kill`)
leaves its number empty; when Slurm requeues the whole job, its nodes are numbered anew. In an array whose
elements have k nodes it is k times the element's number, and the node's place in the element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.shared.slurm.slurm_client import ElementInfo
from unicron_ctl.shared.slurm.squeue import nodes_of


def by_node(rows: Sequence[ElementInfo], jobs: Mapping[str, JobState]) -> Iterator[ElementInfo]:
    """Yield the rows, with one for each node of an element that has several."""
    blocks = _blocks(rows, jobs)
    for info in rows:
        names = nodes_of(info)
        if info.brief:
            yield info
        elif info.array:
            yield from _of_block(info, names, blocks[info.job])
        else:
            yield from _of_allocation(info, names, _order(info, names, jobs.get(info.job)))


def _blocks(rows: Iterable[ElementInfo], jobs: Mapping[str, JobState]) -> dict[str, int]:
    """Nodes of an element, by array: as in the job's settings, else the most of any of its elements."""
    found: dict[str, int] = {}
    for info in rows:
        if info.array and not info.brief:
            job = jobs.get(info.job)
            count = job.settings.block if job is not None and not job.id_reused(info) else len(nodes_of(info))
            found[info.job] = max(found.get(info.job, 1), count)
    return found


def _of_block(info: ElementInfo, names: Sequence[str], block: int) -> Iterator[ElementInfo]:
    if block == 1:
        yield info
        return
    for place in range(block):
        node = names[place] if place < len(names) else None
        yield replace(info, element=info.element * block + place, node=node, block=block)


def _of_allocation(info: ElementInfo, names: Sequence[str], order: Sequence[str]) -> Iterator[ElementInfo]:
    if len(order) < 2:
        yield info
        return
    here = set(names)
    for number, name in enumerate(order):
        if name in here or not names:  # while it waits, and once it has ended, Slurm may show no nodes
            yield replace(info, element=number, node=name if names else None, allocation=len(order))


def _order(info: ElementInfo, names: Sequence[str], job: JobState | None) -> Sequence[str]:
    """The nodes of the allocation, those that it has lost included."""
    if job is None:
        return names
    same = info.restarts == job.nodes_of_restart and set(names) <= set(job.nodes)
    return job.nodes if same or not names else names
