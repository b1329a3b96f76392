"""The pace of looks whose cost grows with the size of the job."""

from __future__ import annotations

SECONDS_EACH = 5e-5  # for each rank or agent looked at: 16,384 of them are looked at every 0.8 s


def look_again(now: float, count: int, least: float = 0.0) -> float:
    """When to look next at `count` ranks or agents, after a look at `now`; not before `least` seconds."""
    return now + least + SECONDS_EACH * count
