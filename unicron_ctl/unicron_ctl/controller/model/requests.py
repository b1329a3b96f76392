"""Slow work that deciders ask for; a thread carries it out and its result comes back as an input."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unicron_ctl.shared.slurm.squeue import names_of

OURS = "unicron"  # the beginning of comments that this tool wrote
RELEASE_COMMENT = f"{OURS}: released"
POWER_OFF = "power_off"  # by the site's program, not by Slurm
ON_NODES = ("down", "drain", "resume", POWER_OFF)  # actions that change a node
# actions that change an element
OF_ELEMENTS = tuple("requeue requeue_hold hold release pin start_now cancel shrink comment".split())


@dataclass(frozen=True)
class Action:
    """A call of the SlurmClient."""

    action: str
    """One of ON_NODES or OF_ELEMENTS."""
    job: str
    element: int
    """Slurm's own number of the element."""
    node: str
    """The names of the nodes, with commas; of a shrink, those that leave; empty for a pin that is taken back."""
    reason: str
    text: str = ""
    """The comment or node reason for Slurm; of a shrink, the nodes that stay; of `power_off`, the program."""
    not_after: float = math.inf
    """When it must have begun, on the controller's clock: the reason for it may be gone by then."""

    @property
    def label(self) -> str:
        """The action, for people."""
        what = self.node if self.action in ON_NODES else f"{self.job}_{self.element}"
        if self.action == "pin" and not self.node:
            return f"unpin {what}"
        if self.action == POWER_OFF:
            return f"power off {what}"
        word = {"pin": f" to {self.node}", "shrink": f" by {self.node}"}.get(self.action, "")
        return f"{self.action} {what}{word}"

    @property
    def target(self) -> tuple[str, int]:
        """The element or node that it changes; actions on the same target keep their order."""
        return (self.node, -1) if self.action in ON_NODES else (self.job, self.element)

    @property
    def nodes(self) -> Sequence[str]:
        return names_of(self.node)

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.action, self.job, self.element, self.node


@dataclass(frozen=True)
class Poll:
    """Lists the nodes, the elements of these jobs, and now and then the whole queue; with `all` always."""

    jobs: frozenset[str] = frozenset()
    all: bool = False


@dataclass(frozen=True)
class Run:
    """Carries out actions in order. After a failed action the others on the same element or node are skipped."""

    actions: tuple[Action, ...]
    urgent: bool = False
    """Whether it overtakes waiting requests, except those that change the same element or node."""


@dataclass(frozen=True)
class Knock:
    """Tries whether the node's slurmd answers."""

    node: str
    address: str
    """host:port."""


@dataclass(frozen=True)
class TestPairs:
    """Tests a node in pairs with idle ones."""

    __test__ = False  # pytest takes it for tests

    node: str
    partners: tuple[str, ...]
    partition: str
    limits: Mapping[str, float]
    """Partition and backend -> seconds for a gigabyte beyond which a pair is slow, where they are known."""


@dataclass(frozen=True)
class Probe:
    """Tries to reach a silent agent's door, its node's slurmd and, as a control, another node's slurmd from here."""

    job: str
    element: int
    node: str
    targets: tuple[str, ...]
    """host:port each, empty if unknown or not asked for."""
    number: int
    """The round of probes."""
