"""Finds what Unicron has left in Slurm, and takes it back when Unicron is removed, judging only by what Slurm shows:
the event log may be gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unicron_ctl.shared.slurm.admin_comment import HOLD_PREFIX, own_part
from unicron_ctl.shared.slurm.drains import OURS
from unicron_ctl.shared.slurm.slurm_client import ElementInfo, NodeInfo, SlurmClient, SlurmError
from unicron_ctl.shared.slurm.states import OVER


@dataclass(frozen=True)
class Leftover:
    """Something that Unicron has left in Slurm."""

    what: str  # node, hold or comment
    text: str  # shown by Slurm
    node: str = ""
    job: str = ""
    element: int = -1

    def line(self) -> str:
        """Return what is done about it, for people."""
        if self.what == "node":
            return f"{self.node} returns to service; check it, if its reason still holds: {self.text}"
        name = f"{self.job}_{self.element}"
        if self.what == "hold":
            return f"{name} is released; it said: {self.text}"
        return f"{name} loses its comment: {self.text}"


def leftovers(nodes: Sequence[NodeInfo], elements: Sequence[ElementInfo]) -> list[Leftover]:
    """Return nodes that Unicron took out of service, elements that it holds, and comments on others not yet ended."""
    found = [Leftover("node", node.reason, node=node.name) for node in nodes if node.reason.startswith(OURS)]
    for e in elements:
        text = own_part(e.admin_comment)
        if text and e.state not in OVER:
            # A user's hold stays whatever the comment says, and so does an admin's on an element that was healed.
            ours = e.held and e.reason != "JobHeldUser" and text.startswith(HOLD_PREFIX)
            found.append(Leftover("hold" if ours else "comment", text, job=e.job, element=e.element))
    return found


def take_back(client: SlurmClient, what: Leftover) -> None:
    """Undo one of them. An element also loses the node for which it waited. Raises SlurmError."""
    if what.what == "node":
        client.resume(what.node)
        return
    if what.what == "hold":
        client.pin(what.job, what.element, None)
        client.release(what.job, what.element)
    client.comment(what.job, what.element, "")


def take_all_back(client: SlurmClient, found: Sequence[Leftover]) -> list[str]:
    """Undo all of them, and return a line for each that Slurm refused."""
    refused = []
    for what in found:
        try:
            take_back(client, what)
        except SlurmError as error:
            refused.append(f"{what.node or f'{what.job}_{what.element}'}: {error}")
    return refused
