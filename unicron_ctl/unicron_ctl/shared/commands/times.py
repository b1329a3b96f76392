"""Times as commands print and read them: local, and with the offset in lines that people keep."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta
from typing import Any

import click

from unicron_ctl.shared.commands.options import DURATION

RECENT_SECONDS = 180 * 86400.0  # the short date of anything older has the year


def moment(at: float) -> str:
    """Write seconds since the epoch in ISO 8601, with the offset: 2026-11-27T17:39:15.123+01:00."""
    return datetime.fromtimestamp(at).astimezone().isoformat(timespec="milliseconds")


def short(at: float, now: float | None = None) -> str:
    """Write a time for a column: 11-27T17:39:15, or 2026-01-27T17:39 if it is half a year away."""
    near = abs((time.time() if now is None else now) - at) < RECENT_SECONDS
    return f"{datetime.fromtimestamp(at):{'%m-%dT%H:%M:%S' if near else '%Y-%m-%dT%H:%M'}}"


def duration(seconds: float) -> str:
    """A duration as people write it: 90 -> 1m30s."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


class Since(click.ParamType[float]):
    """Seconds since the epoch, written as a date, a time of the last 24 hours, both, or how long ago: 2h."""

    name = "when"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        now = datetime.now().astimezone()
        found = _ago(value, now) or _time_of_day(value, now) or _date(value)
        if found is None:
            near = re.match(r"(\d+) *([smhdw])", value)
            forms = ": write 2h, 14:30, 2026-11-27 or 2026-11-27T14:30"
            hint = f"; did you mean {near[1]}{near[2]}?" if near else forms
            self.fail(f"{value!r} is no date, time or duration{hint}", param, ctx)
        if found > now:
            self.fail(f"{found.isoformat(timespec='seconds')} is still to come: give a time that is past", param, ctx)
        return found.timestamp()


SINCE = Since()


def _ago(text: str, now: datetime) -> datetime | None:
    try:
        return now - timedelta(seconds=DURATION.convert(text, None, None)) if not text.isdecimal() else None
    except (click.BadParameter, OverflowError):
        return None


def _time_of_day(text: str, now: datetime) -> datetime | None:
    """Read a time of today, or of yesterday if it is still to come today."""
    found = re.fullmatch(r"(\d\d?):(\d\d)(?::(\d\d))?", text)
    if found is None:
        return None
    try:
        at = now.replace(hour=int(found[1]), minute=int(found[2]), second=int(found[3] or 0), microsecond=0)
    except ValueError:
        return None
    return at - timedelta(days=1) if at > now else at


def _date(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text).astimezone() if re.match(r"\d{4}-", text) else None
    except (ValueError, OverflowError):
        return None
