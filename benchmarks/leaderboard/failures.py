"""Failures, and when they strike. Nodes are numbered from 0; one rank runs on each."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

NODE_BACK = 10.0  # seconds after which a node that lost its power is there again, for each system
COORDINATOR_BACK = 5.0  # the same for a coordinator, which a supervisor starts again
EVERY = 30.0  # seconds between two failures of the stream
FIRST = 5.0  # and before its first one
ROUND = 300.0  # seconds of the stream between two spells without failures
STREAM = (  # what comes in the stream, in turn; the order is drawn
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


class Target(Protocol):
    """A system that trains."""

    def signal_rank(self, node: int, number: signal.Signals) -> None:
        """Raises Missed."""

    def power_off(self, node: int) -> None: ...

    def power_on(self, node: int) -> None: ...

    def kill_coordinator(self) -> None: ...

    def start_coordinator(self) -> None: ...

    def node_of_rank_0(self) -> int: ...


class Repair(NamedTuple):
    """An action so many seconds after the failure, whatever the system does."""

    after: float
    action: Callable[[], None]


def _kill(target: Target, node: int) -> None:
    target.signal_rank(node, signal.SIGKILL)


def _exception(target: Target, node: int) -> None:
    target.signal_rank(node, signal.SIGUSR2)


def _hang(target: Target, node: int) -> None:
    target.signal_rank(node, signal.SIGSTOP)


def _node(target: Target, node: int) -> Repair:
    target.power_off(node)
    return Repair(NODE_BACK, lambda: target.power_on(node))


def _two(target: Target, node: int) -> None:
    missed = []
    for each in (node, node ^ 2):
        try:
            target.signal_rank(each, signal.SIGKILL)
        except Missed as error:
            missed.append(error)
    if len(missed) == 2:
        raise missed[0]


def _rank0(target: Target, node: int) -> Repair:
    return _node(target, target.node_of_rank_0())


def _coordinator(target: Target, node: int) -> Repair:
    target.kill_coordinator()
    return Repair(COORDINATOR_BACK, target.start_coordinator)


class Failure(NamedTuple):
    """`strike(target, node)` does it at once, or raises Missed; `help` is what it is."""

    help: str
    strike: Callable[[Target, int], Repair | None]


FAILURES: dict[str, Failure] = {
    "rank-kill": Failure("SIGKILL to a rank that is not rank 0", _kill),
    "exception": Failure("a RuntimeError in the training step of a rank", _exception),
    "hang": Failure("SIGSTOP to a rank", _hang),
    "node": Failure(f"SIGKILL to all of a node, which is there again after {NODE_BACK:g} s", _node),
    "two": Failure("SIGKILL to the ranks of two nodes", _two),
    "rank0-node": Failure("as `node`, the node of rank 0", _rank0),
    "coordinator": Failure(f"SIGKILL to the coordinator, started again after {COORDINATOR_BACK:g} s", _coordinator),
}
NODE = 2  # whom a single failure hits


def schedule(seconds: float, seed: int, nodes: int) -> list[tuple[float, str, int]]:
    """(seconds from the beginning, failure, node) of a stream that lasts so long: the same for every system."""
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
    """(begin, length, failures) of each piece of such a stream."""
    begin = 0.0
    while begin < seconds:
        length = min(ROUND, seconds - begin)
        yield begin, length, [each for each in planned if begin <= each[0] < begin + length]
        begin += length
