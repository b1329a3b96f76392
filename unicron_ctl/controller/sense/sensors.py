"""The table of sensors that look at one job whenever something of it changed, and at every tick.

A new detector is one pure function (view, job) -> findings, and one line here. Sensors with a memory of their own are
asked by the core: iterations, peers, overdue actions, leases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from unicron_ctl.controller.model.finding import Finding
from unicron_ctl.controller.model.live import JobView
from unicron_ctl.controller.model.view import View
from unicron_ctl.controller.sense import progress

Sensor = Callable[[View, JobView], Iterable[Finding]]

SENSORS: tuple[Sensor, ...] = (
    progress.stopped,  # members that stopped by themselves although nobody is gone
    progress.late_to_stop,  # survivors that did not stop after a Break
    progress.never_entered,  # members that were not in a generation after several tries
)
