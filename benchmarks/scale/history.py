"""A month of a job's life in the controller's log, to measure how long a start takes after it.

What happens is drawn here and knows nothing of the log's records; :func:`fill_month` alone writes them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DAYS = 30
DAY = 86400.0
MTBF_NODE_HOURS = 1000.0  # the configuration's default
NODE_SHARE = 0.1  # of the failures take the whole node, the others one rank
ITERATION_SECONDS = 1.0


@dataclass(frozen=True)
class Failure:
    """`at` seconds after the month's start, a rank dies, or its whole node."""

    at: float
    element: int
    slot: int
    node: bool


def failures(agents: int, ranks: int, days: float = DAYS, seed: int = 0) -> Iterator[Failure]:
    """What fails in the month, in order: exponential times between failures, as many as the nodes' MTBF gives."""
    draw = random.Random(seed)
    rate = agents / (MTBF_NODE_HOURS * 3600.0)
    at = draw.expovariate(rate)
    while at < days * DAY:
        element = draw.randrange(agents)
        yield Failure(at, element, element * ranks + draw.randrange(ranks), draw.random() < NODE_SHARE)
        at += draw.expovariate(rate)


def fill_month(state_dir: Path, agents: int, ranks: int) -> int | None:
    """Write a month's events into the log of the stopped controller in `state_dir`, after what it holds: all
    iterations, and for each of :func:`failures` what the controller records from its detection to the entry of the
    next generation. Returns how many events were written; None while this is not done, so that the start is measured
    with the run's own events only.
    """
    return None
