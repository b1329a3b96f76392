"""Slow work that deciders ask for; a thread carries it out and its result comes back as an input."""

from __future__ import annotations

from dataclasses import dataclass

OURS = "unicron"  # how comments and reasons that this tool wrote begin


@dataclass(frozen=True)
class Action:
    """One call of the SlurmClient: down, resume, requeue, requeue_hold, hold, release, pin, start_now or cancel."""

    action: str
    job: str
    element: int
    node: str
    reason: str
    text: str = ""  # comment or node reason that Slurm is given

    @property
    def label(self) -> str:
        """What is done, for people."""
        what = self.node if self.action in ("down", "resume") else f"{self.job}_{self.element}"
        return f"{self.action} {what}" + (f" to {self.node}" if self.action == "pin" else "")

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What makes two of them the same."""
        return self.action, self.job, self.element, self.node


@dataclass(frozen=True)
class Poll:
    """List nodes and elements."""


@dataclass(frozen=True)
class Run:
    """Carry out actions in order; the first that fails for an element or node skips the rest of its own."""

    actions: tuple[Action, ...]
    urgent: bool = False


@dataclass(frozen=True)
class Probe:
    """Try to reach the silent agent's door and its node's slurmd ("host:port", empty when unknown) from here. number:
    of the round of questions."""

    job: str
    element: int
    node: str
    targets: tuple[str, str]
    number: int
