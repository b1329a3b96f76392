"""Times as commands print and read them: local, with the offset where a line may be kept."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta
from typing import Any

import click

from unicron_ctl.shared.commands.options import DURATION

RECENT_SECONDS = 180 * 86400.0  # a short date has no year before that


def moment(at: float) -> str:
    """Seconds since the epoch in ISO 8601, with the offset: 2026-11-27T17:39:15.123+01:00."""
    return datetime.fromtimestamp(at).astimezone().isoformat(timespec="milliseconds")


def short(at: float, now: float | None = None) -> str:
    """For columns: 11-27T17:39:15, or 2026-01-27T17:39 of what is half a year away."""
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
            said = re.match(r"(\d+) *([smhdw])", value)
            near = (
                f"; did you mean {said[1]}{said[2]}?" if said else ": write 2h, 14:30, 2026-11-27 or 2026-11-27T14:30"
            )
            self.fail(f"{value!r} is no date, time or duration{near}", param, ctx)
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
    """Today, or yesterday where that is still to come."""
    found = re.fullmatch(r"(\d\d?):(\d\d)(?::(\d\d))?", text)
    try:
        at = (
            now.replace(hour=int(found[1]), minute=int(found[2]), second=int(found[3] or 0), microsecond=0)
            if found
            else None
        )
    except ValueError:
        return None
    return at - timedelta(days=1) if at is not None and at > now else at


def _date(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text).astimezone() if re.match(r"\d{4}-", text) else None
    except (ValueError, OverflowError):
        return None
