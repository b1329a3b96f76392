"""The one way to drain a node, whoever decides on it (docs/drains.md lists who does, and why).

Slurm keeps one reason for a node. Ours begin with OURS, and only such a node is given back. Somebody else's reason is
never overwritten, so the node is looked at right before it is drained.
"""

from __future__ import annotations

from collections.abc import Mapping

from unicron_ctl.shared.slurm.slurm_client import NodeInfo, SlurmClient, SlurmError, slurms_own
from unicron_ctl.shared.slurm.states import DRAINED, TAKEN_OUT
from unicron_ctl.shared.system.errors import UserError, one_line
from unicron_ctl.shared.system.printable import printable
from unicron_detector.words import plural

OURS = "unicron["  # the beginning of the reason of a node that Unicron or its checks took out of service
HEALTH = f"{OURS}health]"  # its checks, or a pair test, prove it bad
PAIR_TEST = "pair test "  # follows HEALTH if an admin asked for the drain, which the admin also ends
LOST_NODE = f"{OURS}node_problem]"  # it was lost
REASON_LENGTH = 200  # characters of a reason
MOST_DRAINED = 10  # nodes that their checks may drain at a time, or a tenth of the cluster


class TooMany(UserError):
    """So many nodes are drained already that an admin must decide about one more."""


def drain_reason(leader: str, why: str) -> str:
    """Return the node's reason, printable since Slurm prints it as it is. leader: HEALTH or LOST_NODE."""
    return f"{leader}: {printable(one_line(why))}"[:REASON_LENGTH]


def is_from_pair_test(said: str) -> bool:
    """Say whether this reason is of a pair test."""
    return said.startswith(drain_reason(HEALTH, PAIR_TEST))


def is_from_checks(said: str) -> bool:
    """Say whether this reason is of the node's own checks, and not of a pair test."""
    return said.startswith(HEALTH) and not is_from_pair_test(said)


def ours(node: NodeInfo) -> bool:
    """Say whether the node is out of service by Unicron's doing alone."""
    return bool(node.states & TAKEN_OUT) and node.reason.startswith(OURS)


def why_out_of_service(node: NodeInfo) -> str:
    """Return why a node that is out of service is left as it is; empty if only Slurm itself has set it down."""
    if node.states & DRAINED:
        return f"it is drained already ({node.reason or 'no reason given'})"
    if "DOWN" in node.states and not slurms_own(node.reason):
        return f"it is down already ({node.reason})"
    return ""


def drain_node(client: SlurmClient, name: str, said: str, most: int | None = None) -> str:
    """Drain the node in Slurm; `said` is from :func:`drain_reason`. Return what was done, or why nothing was.

    Raises SlurmError, and TooMany if `most` others, or a tenth of the cluster, are drained by their checks: a wrong
    line of unicron.toml is wrong everywhere. The nodes of a large job check themselves at the same moment and see none
    drained yet. So each looks again after its own drain and undoes that if there are too many; all of them may. Their
    reports reach the controller, which drains one after the other.
    """
    nodes = {node.name: node for node in client.nodes()}
    if (node := nodes.get(name)) is None:
        raise SlurmError(f"Slurm does not know node {name}")
    if why := why_out_of_service(node):
        return f"{name} is left as it is: {why}"
    if most is not None and (why := _too_many(nodes, name, most)):
        raise TooMany(why)
    if not slurms_own(node.reason) and not node.reason.startswith(OURS):
        said = f"{node.reason}; {said}"
    client.drain(name, said)
    if most is not None:
        nodes = {node.name: node for node in client.nodes()}
        if why := _too_many(nodes, name, most):
            mine = nodes.get(name)
            if mine is not None and "DOWN" not in mine.states and mine.reason == said:  # not an admin's by now
                client.resume(name)
            raise TooMany(why)
    return f"{name} is drained: {said}"


def _too_many(nodes: Mapping[str, NodeInfo], name: str, most: int) -> str:
    """Return why no other node may be drained by its check; empty if it may."""
    others = sum(bool(node.states & DRAINED) and HEALTH in node.reason for node in nodes.values() if node.name != name)
    most = max(most, len(nodes) // 10)
    drained = f"{plural(others, 'node')} {'is' if others == 1 else 'are'} drained by checks"
    return f"{drained}, and no more than {most} may be" if others >= most else ""
