"""A job's state from outside, and whether it may be struck again. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.torture.schedule import NOTHING, Kind

RUNNING = "running"
LEAST = 2  # members with the state: one may be lost


@dataclass(frozen=True)
class Stepped:
    """The last step that a rank has noted."""

    generation: int
    iteration: int
    time: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class JobNow:
    """A job's state by the controller; nodes and pids are those of its living ranks by slot."""

    name: str
    state: str
    generation: int
    members: tuple[int, ...]
    planned: int | None
    ended: bool = False
    violations: int = 0
    nodes: Mapping[int, str] = field(default_factory=dict)
    pids: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Mapping[str, Any]) -> JobNow:
        """Read an entry of `unicronctl jobs --json`."""
        here = [(e, rank) for e in job["elements"] if not e["gone"] for rank in e["ranks"]]
        return cls(
            job["name"],
            job["state"],
            job["generation"],
            tuple(job["members"]),
            job["planned_nodes"],
            bool(job["ended"]),
            job["ledger_violations"],
            {rank["slot"]: element["node"] for element, rank in here},
            {rank["slot"]: rank["pid"] for element, rank in here if rank["pid"]},
        )


@dataclass(frozen=True)
class Wound:
    """The last fault of a job."""

    time: float
    generation: int
    """The job's generation at that time."""
    breaks: bool
    """Whether the fault ends the generation."""


def sound(job: JobNow, stepped: Mapping[int, Stepped], wound: Wound | None) -> bool:
    """Return whether every member has stepped since the wound in one generation, a later one if the wound breaks it.

    Before that a second fault could take the last copy of the state.
    """
    if job.state != RUNNING or job.ended or not job.members:
        return False
    if wound is not None and wound.breaks and job.generation <= wound.generation:
        return False
    since = wound.time if wound is not None else 0.0
    last = [stepped.get(slot) for slot in job.members]
    return all(step is not None and step.generation == job.generation and step.time > since for step in last)


def strikable(job: JobNow, stepped: Mapping[int, Stepped], wound: Wound | None, kind: Kind) -> list[int]:
    """Return the slots that this kind of fault may strike now: none if it could take the last copy."""
    stay = min(len(job.members), len(job.members) if job.planned is None else job.planned)  # the plan may take some
    if not sound(job, stepped, wound) or (kind.takes != NOTHING and stay < LEAST):
        return []
    return [slot for slot in job.members if slot in job.pids and slot in job.nodes]


def whole(
    jobs: Mapping[str, JobNow],
    elements: Mapping[str, int],
    nodes: Collection[str],
    avoided: Mapping[str, Collection[str]],
) -> str:
    """Return an empty text if all nodes that jobs can use are in use; else what is missing.

    `elements` has the number of each job; `nodes` are in service; `avoided` has the nodes that each job has left.
    """
    for name in elements:
        job = jobs.get(name)
        if job is None or job.state != RUNNING:
            return f"{name} is {job.state if job else 'unknown'}"
    usable = [node for node in nodes if not all(node in avoided.get(name, ()) for name in elements)]
    used, wanted = sum(len(job.members) for job in jobs.values()), min(len(usable), sum(elements.values()))
    shares = ", ".join(f"{name} {len(jobs[name].members)} (planned {jobs[name].planned})" for name in elements)
    return "" if used == wanted else f"{used} nodes train, of {wanted}: {shares}"
