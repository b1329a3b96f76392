"""Events and log lines about bad messages and refused registrations: neither a broken peer nor one that invents peers
may fill the log."""

from __future__ import annotations

from msgspec.structs import replace

from unicron_ctl.controller.core.core import Core
from unicron_ctl.shared.log import records
from unicron_ctl.shared.system.throttle import Throttle

COMPLAINTS = 1 / 60, 100.0  # a second and at once, of all peers together
NAMES_KEPT = 1000


class Complaints:
    """One event and one line for each peer and kind, and few of all."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._made: set[str] = set()
        self._limit = Throttle(*COMPLAINTS)

    def add(self, record: records.BadMessage | records.RegistrationRefused, now: float) -> None:
        """Records it, which logs it, unless there were too many."""
        name = f"{record.kind} {record.peer}"
        if name in self._made or not self._limit.allows("", now):
            return
        if len(self._made) > NAMES_KEPT:
            self._made.clear()
        self._made.add(name)
        self._core.now = now
        self._core.append("", 0, replace(record, peer=record.peer[:100], reason=record.reason[:400]))
