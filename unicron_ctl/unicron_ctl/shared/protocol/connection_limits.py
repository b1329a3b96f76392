"""Decides which connections are closed if there are too many: never those of registered agents."""

from __future__ import annotations

from collections import OrderedDict

SHARE = 0.5  # of all connections, for strangers of one address
KNOWN_SECONDS = 600.0  # without a message of its agent; then a connection counts as a stranger's again


class ConnectionLimits:
    """Keeps the connections, by their descriptors. Pure: it only names the one to close.

    Strangers of one address may have `SHARE` of all connections. If there are too many, the oldest stranger of the
    address with the most is closed. A known connection, one for each registered agent's key, is never closed for
    others. Times are seconds on any clock that does not go backwards.
    """

    def __init__(self, most: int) -> None:
        self.most = most  # connections at once
        self.addresses: dict[int, str] = {}
        self.strangers: dict[str, OrderedDict[int, None]] = {}
        """address -> connections, the oldest first."""
        self.agents: OrderedDict[int, tuple[str, float]] = OrderedDict()
        """connection -> its agent's key, and the time of its last message. The latest is at the end."""
        self.by_key: dict[str, int] = {}

    def add(self, descriptor: int, address: str, now: float) -> int | None:
        """Add a connection; return the descriptor of one that has to be closed for it."""
        self.remove(descriptor)
        self.addresses[descriptor] = address
        full = len(self.addresses) > self.most
        while full and self.agents and now - (oldest := next(iter(self.agents.items())))[1][1] > KNOWN_SECONDS:
            self._is_stranger(oldest[0])
        self._is_stranger(descriptor)
        if len(self.strangers[address]) > self.most * SHARE:
            return next(iter(self.strangers[address]))
        if not full:
            return None
        most = max(self.strangers.values(), key=len)
        return next(iter(most))

    def mark_known(self, descriptor: int, key: str, now: float) -> None:
        """Note a message of the agent with this key. A key has one known connection."""
        if descriptor not in self.addresses:
            return
        before = self.by_key.get(key)
        if before is not None and before != descriptor:
            self._is_stranger(before)
        self._forget(descriptor)
        self.agents[descriptor] = key, now
        self.by_key[key] = descriptor

    def remove(self, descriptor: int) -> None:
        """Forget a closed connection."""
        if descriptor in self.addresses:
            self._forget(descriptor)
            del self.addresses[descriptor]

    def _is_stranger(self, descriptor: int) -> None:
        self._forget(descriptor)
        self.strangers.setdefault(self.addresses[descriptor], OrderedDict())[descriptor] = None

    def _forget(self, descriptor: int) -> None:
        if (agent := self.agents.pop(descriptor, None)) is not None:
            del self.by_key[agent[0]]
        address = self.addresses[descriptor]
        here = self.strangers.get(address)
        if here is not None:
            here.pop(descriptor, None)
            if not here:
                del self.strangers[address]
