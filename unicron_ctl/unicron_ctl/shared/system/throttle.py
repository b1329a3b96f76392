"""A token bucket for each of many names. Pure: every call takes `now`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

NAMES = 4096  # buckets kept; a name that returns after so many others gets a full one


@dataclass
class Throttle:
    """Allows each name `burst` at once and `rate` a second."""

    rate: float
    burst: float
    names: int = NAMES
    buckets: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)
    """Name -> (what is left, when that was). The one used last is at the end."""

    def rest(self, name: str, now: float) -> float:
        """Return how much is left for this name."""
        left, at = self.buckets.get(name, (self.burst, now))
        return min(self.burst, left + (now - at) * self.rate)

    def allows(self, name: str, now: float, cost: float = 1.0) -> bool:
        """Say whether so much is left for this name; if so, take it."""
        left = self.rest(name, now)
        allowed = left >= cost
        self._set_left(name, left - cost if allowed else left, now)
        return allowed

    def allowed_at(self, name: str, now: float, cost: float = 1.0) -> float:
        """Return the time at which so much is left for this name."""
        return now + max(0.0, cost - self.rest(name, now)) / self.rate

    def charge(self, name: str, now: float, cost: float) -> None:
        """Take so much even if it is not left: the work for this name cost more than its question."""
        self._set_left(name, self.rest(name, now) - cost, now)

    def _set_left(self, name: str, left: float, now: float) -> None:
        self.buckets[name] = left, now
        self.buckets.move_to_end(name)
        if len(self.buckets) > self.names:
            self.buckets.popitem(last=False)
