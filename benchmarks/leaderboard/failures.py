"""Failures, and when they strike. Nodes are numbered from 0; one rank runs on each."""

from __future__ import annotations

import functools
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from benchmarks.leaderboard.systems.base import System

NODE = 2  # the node that a single failure hits
NODE_BACK = 10.0  # seconds until a node without power is back, for each system
COORDINATOR_BACK = 5.0  # seconds until a supervisor starts the coordinator again
EVERY = 30.0  # seconds between two failures of the stream
FIRST = 5.0  # seconds before its first one
ROUND = 300.0  # seconds of the stream between two minutes without failures
STREAM = (  # the failures of a round, in random order
    "rank-kill",
    "exception",
    "node",
    "hang",
    "two",
    "rank-kill",
    "exception",
    "rank0-node",
    "rank-kill",
    "coordinator",
)


class Missed(Exception):
    """The failure found no process that it could strike."""


class Repair(NamedTuple):
    """An action some seconds after the failure, whatever the system does."""

    after: float
    action: Callable[[], None]


def _signal(system: System, node: int, number: signal.Signals) -> None:
    system.signal_rank(system.place(node), number)


def _node(system: System, node: int) -> Repair:
    system.power_off(node)
    return Repair(NODE_BACK, lambda: system.power_on(node))


def _two(system: System, node: int) -> None:
    missed = []
    for each in (node, node ^ 2):
        try:
            system.signal_rank(system.place(each), signal.SIGKILL)
        except Missed as error:
            missed.append(error)
    if len(missed) == 2:
        raise missed[0]


def _coordinator(system: System, node: int) -> Repair:
    system.kill_coordinator()
    return Repair(COORDINATOR_BACK, system.start_coordinator)


FAILURES: dict[str, Callable[[System, int], Repair | None]] = {
    "rank-kill": functools.partial(_signal, number=signal.SIGKILL),
    "exception": functools.partial(_signal, number=signal.SIGUSR2),
    "hang": functools.partial(_signal, number=signal.SIGSTOP),
    "node": lambda system, node: _node(system, system.place(node)),
    "two": _two,
    "rank0-node": lambda system, node: _node(system, system.node_of_rank(0)),
    "coordinator": _coordinator,
}
"""What strikes a system's node, by name. It raises Missed; docs/leaderboard.md describes each."""


def schedule(seconds: float, seed: int, nodes: int) -> list[tuple[float, str, int]]:
    """Return (seconds from the beginning, failure, node) of a stream, the same for every system."""
    draw, turn = random.Random(seed), list[str]()
    found = list[tuple[float, str, int]]()
    at = FIRST
    while at < seconds:
        if not turn:
            turn = draw.sample(STREAM, len(STREAM))
        found.append((at, turn.pop(), draw.randrange(1, nodes)))
        at += EVERY
    return found


def rounds(
    seconds: float, planned: Sequence[tuple[float, str, int]]
) -> Iterator[tuple[float, float, list[tuple[float, str, int]]]]:
    """Yield (begin, length, failures) of each round of such a stream."""
    begin = 0.0
    while begin < seconds:
        length = min(ROUND, seconds - begin)
        yield begin, length, [each for each in planned if begin <= each[0] < begin + length]
        begin += length
