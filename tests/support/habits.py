"""A healthy plain program, step by step: how long its slowest rank keeps the others waiting, and what that rank's
process looks like meanwhile. For the proof that none of it is taken for a hang."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

STEP = 0.2  # seconds


@dataclass(frozen=True)
class Gap:
    """The slowest rank is in its own code for `seconds`, which is all that the others see of it. idle: its process does
    nothing at all; waits: for an answer; saves: its script is in a function that saves."""

    seconds: float
    idle: bool = True
    waits: bool = False
    saves: bool = False


def gaps(steps: int, seed: int) -> Iterator[Gap]:
    """Steps of variable length, on a device that does the work while the process sleeps, and now and then: a stutter of
    the machine, another length's compilation, an epoch's first batch from workers, a checkpoint to a slow file system,
    an evaluation by one rank alone, an upload. None of these has been seen before it comes first."""
    chance = random.Random(seed)
    length = 1.0
    for step in range(1, steps + 1):
        length = length if chance.random() < 0.99 else chance.choice((0.5, 1.0, 1.0, 2.0))
        usual = STEP * length * chance.lognormvariate(0.0, 0.15)
        if step % 5000 == 0:
            yield Gap(chance.uniform(60.0, 400.0), idle=False)  # an evaluation
        elif step % 1000 == 0:
            yield Gap(chance.uniform(5.0, 90.0), idle=chance.random() < 0.5, saves=True)
        elif step % 3000 == 1700:
            yield Gap(chance.uniform(3.0, 30.0), waits=True)  # the first batch
        elif step % 20_000 == 23:
            yield Gap(chance.uniform(10.0, 50.0), waits=True)  # an upload
        elif chance.random() < 0.0005:
            yield Gap(chance.uniform(5.0, 120.0), idle=False)  # it compiles, or its children do
        elif chance.random() < 0.002:
            yield Gap(usual + chance.uniform(0.5, 2.5))  # a stutter
        else:
            yield Gap(usual)
