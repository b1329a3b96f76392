"""The table of sensors of one job: each returns what it has found, and sends and records nothing itself.

A sensor is a function of the view, the job and its memory; it changes nothing but the parts of the memory that its row
names, and is pure where the row names none. `tests/unit/unicron_ctl/controller/sense/test_sensors.py` proves it for
every row. The job's turn (`core/turn.py`) runs the table and judges the findings.

What is no sensor of one job stands elsewhere: silence is watched for the whole cluster (`failure_detector/leases.py`),
and what a message or a listing says of its agent is found where it arrives (`members.check_leaving`,
`adoption.find_replaced`, `slurm_states.ended_agents`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from unicron_ctl.controller.failure_detector import network_partitions, quorum
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.live import ProgressWatch
from unicron_ctl.controller.model.survey import Survey
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.sense import iterations, members, outliers, overdue, progress, slurm_states
from unicron_ctl.controller.sense.timing import JobTimes


@dataclass
class SensorMemory:
    """What the sensors of one job remember, each part by its name. Lost with the process."""

    times: JobTimes
    progress: ProgressWatch
    survey: Survey
    iterations: iterations.IterationWatch = field(default_factory=iterations.IterationWatch)
    peers: outliers.JobPeers = field(default_factory=outliers.JobPeers)
    actions: overdue.ActionClocks = field(default_factory=overdue.ActionClocks)
    odd: list[int] = field(default_factory=list)
    """Slots that changed in a way that needs a closer look."""


class When(enum.Enum):
    """What a sensor is run at."""

    CHANGE = "change"  # slots changed in a way that needs a closer look
    TURN = "turn"  # every turn of the job
    TICK = "tick"  # every tick, before the job's turn
    LISTING = "listing"  # every listing of Slurm


class Sensor(NamedTuple):
    """One row. changes: the parts of the memory that the sensor may change."""

    name: str
    when: When
    sense: Callable[[View, JobView, SensorMemory], Outcome]
    changes: tuple[str, ...] = ()


SENSORS: tuple[Sensor, ...] = (
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
    Sensor("Slurm's states", When.LISTING, lambda view, job, m: slurm_states.check_slurm_states(view, job)),
)
