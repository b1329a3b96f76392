"""Replicas whose rounds take times of some distribution, and the shares that they come to."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from unicron_transition.iteration.shares import UNKNOWN, Measurement, Shares, equal

Draw = Callable[[int], float]


def _walk(rng: random.Random) -> Draw:
    value = rng.gauss(0.0, 0.03)

    def draw(_: int) -> float:
        nonlocal value
        value = 0.95 * value + rng.gauss(0.0, 0.03 * math.sqrt(1.0 - 0.95**2))
        return max(0.3, 1.0 + value)

    return draw


def _pauses(rng: random.Random) -> Draw:
    first = rng.randrange(50)
    return lambda i: (2.0 if (i + first) % 50 < 2 else 1.0) * rng.gauss(1.0, 0.02)


# seconds of a round in an iteration, over the usual ones; each replica draws its own
PACES: dict[str, Callable[[random.Random], Draw]] = {
    "normal 10 %": lambda rng: lambda i: max(0.2, rng.gauss(1.0, 0.1)),
    "lognormal 20 %": lambda rng: lambda i: rng.lognormvariate(0.0, 0.2),
    "gamma 35 %": lambda rng: lambda i: rng.gammavariate(8.0, 1.0 / 8.0),
    "heavy tail": lambda rng: lambda i: 1.0 + 0.1 * (rng.paretovariate(1.5) - 1.0),
    "bimodal 1.8x": lambda rng: lambda i: (1.8 if rng.random() < 0.3 else 1.0) * rng.gauss(1.0, 0.02),
    "correlated 3 %": _walk,
    "rare spikes": lambda rng: lambda i: rng.gauss(1.0, 0.02) + (rng.expovariate(0.2) if rng.random() < 0.002 else 0.0),
    "periodic pauses": _pauses,
}


def noise(name: str) -> Callable[[random.Random], Draw]:
    """One of the distributions, or "normal 2 %"."""
    return PACES.get(name) or (lambda rng: lambda i: rng.gauss(1.0, 0.02))


class Job:
    """Replicas that train, whose ranks all decide alike: one decider stands for them."""

    def __init__(
        self,
        replicas: int,
        total: int,
        kind: Callable[[random.Random], Draw],
        rng: random.Random,
        factors: list[float] | None = None,
        tokens: Callable[[random.Random], float] | None = None,
        filled_up: bool = False,
        usual: float = 0.05,
    ):
        self.replicas, self.total, self.rng, self.usual = replicas, total, rng, usual
        self.factors = factors or [1.0] * replicas
        self.draws = [kind(rng) for _ in range(replicas)]
        self.tokens, self.filled_up = tokens, filled_up
        self.decider, self.generation, self.iteration = Shares(), 1, 0

    @property
    def shares(self) -> list[int]:
        """The shares of the coming iteration."""
        self.decider.begin_iteration(self.generation, self.replicas)
        return list(self.decider.dealt(self.total)) or equal(self.total, self.replicas)

    @property
    def changes(self) -> int:
        """Changes of the shares so far."""
        return self.decider.changes

    def run(self, iterations: int) -> None:
        """Train so many iterations."""
        for _ in range(iterations):
            self.decider.begin_iteration(self.generation, self.replicas)
            told = [self.decider.statement(replica, self._measured(replica)) for replica in range(self.replicas)]
            self.decider.take_statements([max(column) for column in zip(*told, strict=True)], self.total)
            self.iteration += 1

    def _measured(self, replica: int) -> Measurement:
        seconds = self.usual * self.factors[replica] * self.draws[replica](self.iteration)
        if self.tokens is None:
            return Measurement(seconds, UNKNOWN)
        count = self.tokens(self.rng)
        return Measurement(seconds if self.filled_up else seconds * count, count)
