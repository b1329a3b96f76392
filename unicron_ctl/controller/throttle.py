"""How much one peer may ask for: token buckets. Pure: every call takes `now`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

NAMES = 4096  # buckets kept; a peer that comes back after so many others begins with a full one
BYTES_OF_ONE = 16384  # a message costs one, and one more for each so many bytes


@dataclass
class Throttle:
    """At most `burst` at once and `rate` a second by each name."""

    rate: float
    burst: float
    names: int = NAMES
    buckets: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)
    """name -> (what is left, when that was). The one that was used last is at the end."""

    def allows(self, name: str, now: float, cost: float = 1.0) -> bool:
        """Whether there is so much left for this name, which is then taken."""
        left, at = self.buckets.pop(name, (self.burst, now))
        left = min(self.burst, left + (now - at) * self.rate)
        allowed = left >= cost
        self.buckets[name] = (left - cost if allowed else left), now
        if len(self.buckets) > self.names:
            self.buckets.popitem(last=False)
        return allowed


def cost(size: int) -> float:
    """Of a message of so many bytes."""
    return 1.0 + size // BYTES_OF_ONE
