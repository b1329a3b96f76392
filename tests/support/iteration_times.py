"""Distributions of iteration times that detectors meet."""

from __future__ import annotations

import math


def _mix(rng, fast, slow, share):
    return lambda _: (slow if rng.random() < share else fast) * rng.gauss(1.0, 0.02)


def _walk(rng, rho, sigma):
    value = 0.0

    def draw(_):
        nonlocal value
        value = rho * value + rng.gauss(0.0, sigma * math.sqrt(1.0 - rho * rho))
        return max(0.3, 1.0 + value)

    return draw


DISTRIBUTIONS = {
    "normal 2 %": lambda rng: lambda i: rng.gauss(1.0, 0.02),
    "normal 10 %": lambda rng: lambda i: max(0.2, rng.gauss(1.0, 0.1)),
    "lognormal 20 %": lambda rng: lambda i: rng.lognormvariate(0.0, 0.2),
    "bimodal 1.8x": lambda rng: _mix(rng, 1.0, 1.8, 0.3),
    "bimodal 2.5x, rare": lambda rng: _mix(rng, 1.0, 2.5, 0.05),
    "every fifth doubles": lambda rng: lambda i: (2.0 if i % 5 == 0 else 1.0) * rng.gauss(1.0, 0.02),
    "drift +50 %": lambda rng: lambda i: (1.0 + 0.5 * i / 25_000) * rng.gauss(1.0, 0.03),
    "drift -40 %": lambda rng: lambda i: (1.0 - 0.4 * i / 25_000) * rng.gauss(1.0, 0.03),
    "correlated noise": lambda rng: _walk(rng, 0.95, 0.03),
    "spikes": lambda rng: lambda i: rng.gauss(1.0, 0.02) + (rng.expovariate(4.0) if rng.random() < 0.002 else 0.0),
    "slow wave": lambda rng: lambda i: (1.0 + 0.05 * math.sin(i / 500.0)) * rng.gauss(1.0, 0.02),
}
