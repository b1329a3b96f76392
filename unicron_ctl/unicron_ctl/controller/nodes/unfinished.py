"""Actions that a controller requested of Slurm before it ended without hearing the outcome.

Each is compared with what Slurm shows now: it was done, is requested again, or is given up and its traces undone, so
that its initiator decides anew. Nodes that should be out of service are requested until they are
(`isolation.down_again`). Actions that the admin no longer allows are given up.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection

from unicron_ctl.controller.model import permission
from unicron_ctl.controller.model.cluster_state import Intent
from unicron_ctl.controller.model.node_state import OUT
from unicron_ctl.controller.model.requests import ON_NODES, POWER_OFF, Action
from unicron_ctl.controller.model.view import Listing, Outcome, View
from unicron_ctl.shared.log import records
from unicron_ctl.shared.slurm.admin_comment import is_shown
from unicron_ctl.shared.slurm.slurm_client import ElementInfo
from unicron_ctl.shared.slurm.squeue import names_of, nodes_of
from unicron_ctl.shared.slurm.states import OCCUPIES

Key = tuple[str, str, int, str]


class Then(enum.Enum):
    """The fate of an action whose outcome is not known."""

    DONE = "done"
    AGAIN = "again"
    UNDONE = "undone"  # its initiator decides anew


def _requeue_outcome(e: ElementInfo, intent: Intent) -> Then:
    if e.state in OCCUPIES and e.restarts == intent.restarts:
        return Then.AGAIN
    return Then.DONE


def _requeue_hold_outcome(e: ElementInfo, intent: Intent) -> Then:
    if e.state == "PENDING" and not e.held and e.restarts == intent.restarts:
        return Then.AGAIN
    return _requeue_outcome(e, intent)


def _shrunk(e: ElementInfo, intent: Intent) -> Then:
    if e.state != "RUNNING":
        return Then.UNDONE
    return Then.DONE if set(nodes_of(e)) <= set(names_of(intent.reason)) else Then.AGAIN


_ELEMENTS: dict[str, Callable[[ElementInfo, Intent], Then]] = {
    "requeue": _requeue_outcome,
    "requeue_hold": _requeue_hold_outcome,
    "shrink": _shrunk,
    "hold": lambda e, intent: Then.DONE if e.held else Then.UNDONE,
    "release": lambda e, intent: Then.UNDONE if e.held else Then.DONE,
    "pin": lambda e, intent: Then.UNDONE if e.state == "PENDING" else Then.DONE,
    "start_now": lambda e, intent: Then.UNDONE if e.state == "PENDING" else Then.DONE,
    "comment": lambda e, intent: Then.DONE if is_shown(e.admin_comment, intent.reason) else Then.UNDONE,
    "cancel": lambda e, intent: Then.UNDONE if e.state in OCCUPIES | {"PENDING"} else Then.DONE,
}


def settle_unfinished(view: View, listing: Listing, under_way: Collection[Key], out: Outcome) -> list[Action]:
    """Settle actions that are not under way in this process; return those to request again."""
    found = []
    for key, intent in list(view.state.intents.items()):
        action, job, element, node = key
        if key in under_way or listing.asked_at <= intent.at or action in OUT:
            continue
        then = _node(view, action, node) if action in ON_NODES else _element(listing, key, intent)
        if then is Then.AGAIN:
            why = "it was not done when the controller was started again"
            again = Action(action, job, element, node, why, intent.reason)
            if barred := permission.withheld(view, again, out):
                _record(view, key, Then.UNDONE, f"{again.label}: not allowed: {barred}", out)
            else:
                found.append(again)
            continue
        label = Action(action, job, element, node, "").label
        _record(view, key, then, f"{label}: {then.value} when the controller was started again", out)
    return found


def _node(view: View, action: str, name: str) -> Then:
    """The other actions on a node give it back, or switch it off; nobody knows whether the latter was done."""
    if action == POWER_OFF:
        return Then.UNDONE
    node = view.slurm.node(name)
    return Then.DONE if node is not None and node.healthy else Then.UNDONE


def _element(listing: Listing, key: Key, intent: Intent) -> Then:
    action, job, element, node = key
    known = listing.rows_of(job).get(element)
    if known is None:
        return Then.DONE if action == "cancel" else Then.UNDONE
    if action == "pin" and known.required_nodes == frozenset(names_of(node)):
        return Then.DONE
    return _ELEMENTS[action](known, intent)


def _record(view: View, key: Key, then: Then, reason: str, out: Outcome) -> None:
    action, name, element, node = key
    job = view.state.jobs.get(name)
    generation = job.generation if job is not None else 0
    if then is Then.DONE and action == "resume":
        out.record(None, records.NodeResumed(node=node, verified=False, reason=reason))
        return
    if then is Then.DONE:
        done = records.SlurmDone(action=action, node=node, element=element, reason=reason)
        out.records.append((name, generation, done))
        return
    failed = records.SlurmFailed(action=action, element=element, node=node, reason=reason)
    out.records.append((name, generation, failed))
    if action == "pin":
        out.records.append((name, generation, records.ElementUnpinned(element=element)))
