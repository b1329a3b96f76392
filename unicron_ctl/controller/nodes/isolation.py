"""How many living nodes may be set down without an admin, and which ones need one.

A detector that is wrong about one node is wrong about many: a bad rule or a fault of the switch must not take the
cluster out of service. Nodes whose slurmd does not answer are not counted, for they are lost and nobody decided that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from unicron_ctl.config import ControllerConfig
from unicron_ctl.controller.log import records
from unicron_ctl.controller.model.cluster import Mark
from unicron_ctl.controller.model.job import JobState
from unicron_ctl.controller.model.live import AgentView
from unicron_ctl.controller.model.requests import OURS, Action, Run
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.nodes.admission import pair_test_command

REASON = f"{OURS}[node_problem]"
REASON_LENGTH = 200  # characters of a node's reason in Slurm


def allowed(config: ControllerConfig, cluster_nodes: int) -> int:
    """How many nodes may be set down within the window."""
    return max(config.max_isolated_nodes, int(config.max_isolated_share * cluster_nodes))


def withheld(
    node: str,
    isolated: Mapping[str, Mark],
    cluster_nodes: int,
    job: str,
    job_nodes: Collection[str],
    config: ControllerConfig,
    now: float,
) -> str:
    """Why the node must not be set down now, and what to do; empty when it may be. Pure.

    isolated: those that were set down and not given back since, when and for which job. job_nodes: where the job runs.
    """
    window = config.isolation_window_seconds
    recent = {name: item for name, item in isolated.items() if now - item.at < window and name != node}
    most = allowed(config, cluster_nodes)
    todo = f"look at it, then `scontrol update NodeName={node} State=DRAIN Reason=...`, or raise the limit"
    if len(recent) >= most:
        return (
            f"{_names(recent)} set down within {window:g} s, and no more than {most} of {cluster_nodes} nodes "
            f"may be (max_isolated_nodes, max_isolated_share): {todo}"
        )
    own = {name: item for name, item in recent.items() if item.job == job}
    size = len({*job_nodes, *own, node})
    most = max(1, int(config.max_isolated_job_share * size))
    if len(own) >= most:
        return (
            f"of job {job}, {_names(own)} set down within {window:g} s, and no more than {most} of its {size} nodes "
            f"may be (max_isolated_job_share): {todo}"
        )
    return ""


def _names(nodes: Collection[str]) -> str:
    names = sorted(nodes)
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"{shown} {'were' if len(names) > 1 else 'was'}" if names else "none was"


def put_out_of_service(
    view: View, job: JobState, agent: AgentView, failure: int, slots: list[int], reason: str, out: Outcome
) -> bool:
    """Sets a living node down whose own fault is known, within the limits. False when that cannot or must not be done:
    the process is to be started again in place then. failure: whose remedy it is."""
    info = view.shown_node(job, agent.element)
    if info is None:
        return False
    if "DRAIN" in info.states and "DOWN" not in info.states:
        text = f"{info.name} is drained ({info.reason or 'no reason given'}): that is an admin's matter"
        out.record(job, records.FailureAction(failure=failure, text=text))
        return False
    if "DOWN" not in info.states and not view.unfit(info.name):
        here = {record.node for record in job.agents.values() if not record.gone}
        count = len(view.slurm.seen.nodes) if view.slurm.seen else 0
        why = withheld(info.name, view.state.isolated, count, job.job, here, view.config, view.now)
        if why:
            text = f"{info.name} is not set down: {why}"
            out.record(job, records.FailureAction(failure=failure, text=text))
            said = f"{info.name} stays in service although {reason}: {why}"
            out.record(job, records.IsolationWithheld(node=info.name, slots=slots, reason=said))
            return False
        aside = f"{info.name} is put aside: {reason}"
        out.record(job, records.Isolated(node=info.name, reason=aside))
    text = f"{REASON}: {reason}"[:REASON_LENGTH]
    set_down(view, job, agent.element, info.name, failure, text, out)
    return True


def set_down(view: View, job: JobState, element: int, node: str, failure: int, text: str, out: Outcome) -> None:
    """Asks Slurm for it, unless the node is out of service already."""
    info = view.slurm.node(node)
    if info is None:
        return
    if "DOWN" in info.states or "DRAIN" in info.states:
        why = info.reason or "no reason given"
        already = f"{node} is out of service already ({why}): left as it is"
        out.record(job, records.FailureAction(failure=failure, text=already))
        return
    if view.unfit(node):
        out.record(job, records.FailureAction(failure=failure, text=f"{node} is being set down already"))
        return
    done = f"set {node} down in Slurm: {text}; once it is back, `{pair_test_command(node)}` tests it"
    out.record(job, records.FailureAction(failure=failure, text=done))
    action = Action("down", job.job, element, node, "a node that is out of order must get no work", text)
    out.requests.append(Run((action,), urgent=True))


def refused(view: View, action: Action, error: str) -> Outcome:
    """Slurm does not set the node down: it gets no work of ours all the same, and Slurm is asked again."""
    out = Outcome()
    if view.state.node(action.node).refused:
        return out
    reason = (
        f"Slurm does not set {action.node} down ({error}): it gets no work here, but other jobs may run on it. "
        f"Set it down by hand: `scontrol update NodeName={action.node} State=DOWN Reason=...`"
    )
    failed = records.ActionFailed(
        slot=-1, node=action.node, failed="isolate", action="isolate", severity=1, reason=reason
    )
    out.record(view.state.jobs.get(action.job), failed)
    return out


def gone_down(view: View, out: Outcome) -> None:
    """Nodes that were to be set down and that Slurm shows out of service, whoever did it: no more is asked for them."""
    for name in sorted(view.state.out_of_service):
        known, info = view.state.node(name), view.slurm.node(name)
        if info is not None and info.states & {"DOWN", "DRAIN"} and (known.going_down or known.refused):
            said = f"{name} is out of service ({info.reason or 'no reason given'})"
            out.record(None, records.SlurmDone(action="down", node=name, reason=said))


def down_again(view: View) -> list[Action]:
    """What was asked of Slurm and is not done: refused, or lost with a controller that died before the answer."""
    found = []
    for name in sorted(view.state.out_of_service):
        known, info = view.state.node(name), view.slurm.node(name)
        seen = view.slurm.seen
        late = seen is None or seen.asked_at <= known.suspected_at  # Slurm was asked before it was told
        if known.going_down and info is not None and info.healthy and not late:
            why = "Slurm refused it before" if known.refused else "it was not done before"
            found.append(Action("down", known.refused_for, -1, name, why, known.reason or REASON))
    return found


@dataclass(frozen=True)
class Attention:
    """A node for which an admin is needed. since: seconds since the epoch."""

    node: str
    since: float
    job: str
    reason: str


def attention(view: View) -> list[Attention]:
    """All such nodes."""
    window = view.config.isolation_window_seconds
    found = [
        Attention(node, mark.at, mark.job, mark.reason)
        for node, mark in sorted(view.state.withheld.items())
        if view.now - mark.at < window and (info := view.slurm.node(node)) is not None and info.healthy
    ]
    for name, known in sorted(view.state.nodes.items()):
        if known.refused:
            found.append(Attention(name, known.refused_at, known.refused_for, known.refused))
    return found
