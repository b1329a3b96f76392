"""The tables of sensors: each returns its findings, and sends and records nothing itself.

A sensor of one job is a function of the view, the job and its memory. It changes only the parts of the memory that its
row names, and is pure if the row names none (`test_sensors.py` proves it). The job's turn (`core/turn.py`) runs them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from unicron_ctl.controller.failure_detector import ending_nodes, leases, network_partitions, quorum
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.job_state import AgentRecord
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.live import ProgressWatch, Survey
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.sense import iterations, members, outliers, overdue, progress, slurm_states
from unicron_ctl.controller.sense.timing import JobTimes


@dataclass
class SensorMemory:
    """The memory of one job's sensors; lost with the process."""

    times: JobTimes
    progress: ProgressWatch
    survey: Survey
    iterations: iterations.IterationWatch = field(default_factory=iterations.IterationWatch)
    peers: outliers.JobPeers = field(default_factory=outliers.JobPeers)
    actions: overdue.ActionClocks = field(default_factory=overdue.ActionClocks)
    odd: list[int] = field(default_factory=list)
    """Slots that changed in a way that needs a closer look."""
    speaker: AgentView | None = None
    """The agent that announces its end."""
    before: AgentRecord | None = None
    """The agent that another one has just replaced."""


class When(enum.Enum):
    """The occasion at which a sensor is run."""

    LEAVING = "leaving"  # an agent announces its end
    REGISTERED = "registered"  # an agent has replaced another one
    CHANGE = "change"  # slots changed in a way that needs a closer look
    TURN = "turn"  # every turn of the job
    TICK = "tick"  # every tick, before the job's turn
    LISTING = "listing"  # every listing of Slurm


class Sensor(NamedTuple):
    """A sensor of one job."""

    name: str
    when: When
    sense: Callable[[View, JobView, SensorMemory], Outcome]
    changes: tuple[str, ...] = ()
    """The parts of the memory that it may change."""


SENSORS: tuple[Sensor, ...] = (
    Sensor("leaving agents", When.LEAVING, lambda view, job, m: members.check_leaving(view, job, m.speaker)),
    Sensor("missed members", When.REGISTERED, lambda view, job, m: members.check_missed(view, job, m.before)),
    Sensor("members", When.CHANGE, lambda view, job, m: members.check_members(view, job, m.odd)),
    Sensor("stopped", When.TURN, lambda view, job, m: progress.check_stopped(view, job)),
    Sensor("blocked", When.TURN, lambda view, job, m: progress.check_blocked(view, job, m.progress), ("progress",)),
    Sensor(
        "late to enter",
        When.TURN,
        lambda view, job, m: progress.check_late_to_enter(view, job, m.times, m.progress),
        ("progress",),
    ),
    Sensor(
        "late to stop",
        When.TURN,
        lambda view, job, m: progress.check_late_to_stop(view, job, m.times, m.progress),
        ("progress",),
    ),
    Sensor("unheard agents", When.TURN, lambda view, job, m: progress.ping_unheard(view, job)),
    Sensor("free votes", When.TURN, lambda view, job, m: quorum.check_free_votes(view, job, m.progress), ("progress",)),
    Sensor("actions", When.TICK, lambda view, job, m: overdue.check_actions(view, job, m.actions), ("actions",)),
    Sensor(
        "iterations",
        When.TICK,
        lambda view, job, m: iterations.check_iteration(view, job, m.times, m.iterations),
        ("times", "iterations"),
    ),
    Sensor(
        "network partitions",
        When.TICK,
        lambda view, job, m: network_partitions.check_partitions(view, job, m.survey),
        ("survey",),
    ),
    Sensor(
        "peers",
        When.TICK,
        lambda view, job, m: outliers.check_peers(view, job, m.times, m.peers),
        ("times", "peers"),
    ),
    Sensor("ended elements", When.LISTING, lambda view, job, m: slurm_states.check_ended(view, job)),
    Sensor("Slurm's states", When.LISTING, lambda view, job, m: slurm_states.check_slurm_states(view, job)),
)


class ClusterSensor(NamedTuple):
    """A sensor of the whole cluster, run at every tick. It changes `view.suspicions`."""

    name: str
    sense: Callable[[View], Outcome]


CLUSTER_SENSORS: tuple[ClusterSensor, ...] = (
    ClusterSensor("slurmds that may be asked", ending_nodes.greet_slurmds),
    ClusterSensor("silent agents", leases.check_leases),
)
