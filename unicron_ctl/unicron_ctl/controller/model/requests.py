"""Slow work that deciders ask for; a thread carries it out and its result comes back as an input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unicron_ctl.shared.slurm.squeue import names_of

OURS = "unicron"  # how comments that this tool wrote begin
RELEASE_COMMENT = f"{OURS}: released"
ON_NODES = ("down", "drain", "resume")  # actions that change a node
OF_ELEMENTS = (
    "requeue",
    "requeue_hold",
    "hold",
    "release",
    "pin",
    "start_now",
    "cancel",
    "shrink",
    "comment",
)  # of an element


@dataclass(frozen=True)
class Action:
    """A call of the SlurmClient: down, drain, resume, requeue, requeue_hold, hold, release, pin, start_now, cancel,
    shrink, comment.

    element: Slurm's own number of it. node: of several nodes, their names with commas; of a shrink, those that leave;
    empty for a pin that is taken back.
    text: the comment or node reason that Slurm is given; of a shrink, the nodes that stay."""

    action: str
    job: str
    element: int
    node: str
    reason: str
    text: str = ""

    @property
    def label(self) -> str:
        """The action, for people."""
        what = self.node if self.action in ON_NODES else f"{self.job}_{self.element}"
        if self.action == "pin" and not self.node:
            return f"unpin {what}"
        word = {"pin": f" to {self.node}", "shrink": f" by {self.node}"}.get(self.action, "")
        return f"{self.action} {what}{word}"

    @property
    def target(self) -> tuple[str, int]:
        """The element or node that it changes: actions on the same keep their order."""
        return (self.node, -1) if self.action in ON_NODES else (self.job, self.element)

    @property
    def nodes(self) -> Sequence[str]:
        """The names of its nodes."""
        return names_of(self.node)

    @property
    def key(self) -> tuple[str, str, int, str]:
        """Two actions with the same key are the same."""
        return self.action, self.job, self.element, self.node


@dataclass(frozen=True)
class Poll:
    """List the nodes, the elements of these jobs, and now and then the whole queue; rather now with `all`."""

    jobs: frozenset[str] = frozenset()
    all: bool = False


@dataclass(frozen=True)
class Run:
    """Carry out actions in order; the first that fails for an element or node skips the rest of its own. urgent: it
    overtakes what waits, but for what changes the same element or node."""

    actions: tuple[Action, ...]
    urgent: bool = False


@dataclass(frozen=True)
class Knock:
    """Try whether the node's slurmd answers. address: host:port."""

    node: str
    address: str


@dataclass(frozen=True)
class Probe:
    """Try to reach a silent agent's door, its node's slurmd and, as a control, another node's slurmd from here.

    targets: host:port each, empty when unknown or not asked for. number: the round of probes.
    """

    job: str
    element: int
    node: str
    targets: tuple[str, ...]
    number: int
