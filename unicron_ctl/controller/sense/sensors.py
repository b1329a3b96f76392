"""The table of sensors that look at one job whenever something of it changed, and at every tick.

A new detector is one pure function (view, job) -> findings, and one line here. Sensors with a memory of their own are
asked by the core or the turn: iterations, peers, overdue actions, leases, and who is late by the job's own times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from unicron.ctl.controller.model.finding import Finding
from unicron.ctl.controller.model.job_view import JobView
from unicron.ctl.controller.model.view import View
from unicron.ctl.controller.sense import progress

Sensor = Callable[[View, JobView], Iterable[Finding]]

SENSORS: tuple[Sensor, ...] = (
    progress.stopped,  # members that stopped by themselves although nobody is gone
)
