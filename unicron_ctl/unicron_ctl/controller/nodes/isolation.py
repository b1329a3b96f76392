"""Consequences for a node that is not fit for work, depending on whose word it is (docs/design/trust.md).

- The word of a user's process, file or agent moves that job off the node (`leave_node`), and makes the node a suspect
  if it may be at fault. The node stays in service for other jobs.
- A node that was shown dead is set down (`take_out`). If Slurm shows other jobs on it, which would be ended, it is only
  drained: it may be cut off for just seconds.
- A living node is drained on the word of its health checks, which root runs (`proven_bad`); its jobs go on.

All of it is bounded (:mod:`unicron_ctl.controller.nodes.bounds`), and undone by
:mod:`unicron_ctl.controller.nodes.readmission`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from unicron_ctl.controller.model import permission
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.cluster_state import Mark
from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.controller.model.node_state import NodeState
from unicron_ctl.controller.model.requests import POWER_OFF, Action, Run
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.nodes import bounds, readmission
from unicron_ctl.shared.log import records
from unicron_ctl.shared.slurm import drains
from unicron_ctl.shared.slurm.admin_comment import HOLD_PREFIX
from unicron_ctl.shared.slurm.slurm_client import NodeInfo
from unicron_ctl.shared.slurm.states import OCCUPIES, TAKEN_OUT
from unicron_ctl.shared.system.errors import one_line
from unicron_detector.words import plural

AWAY_SECONDS = 60.0  # without an answer from Slurm, after which an admin is called
SWITCH_SECONDS = 10.0  # for the site's program to begin; later the node may be back, with another job
DRAIN_SECONDS = 5.0  # for a proven bad node to drain itself; then it is drained from here


# ---------------------------------------------------------------- one job leaves the node
def leave_node(
    view: View,
    job: JobState,
    agent: AgentView,
    failure: int | None,
    slots: Collection[int],
    reason: str,
    suspect: bool,
    out: Outcome,
) -> bool:
    """Take the job's element off the agent's node: it is requeued and held until another node is found for it. A job
    that is one allocation goes on without the node.

    Return False if that cannot or must not be done; then the process should be restarted in place. failure: the one
    that this remedies; None if the element trains no more. suspect: the node may be at fault; otherwise the job moves
    only if another node is free.
    """
    here, mark = job.label(agent.element), job.avoid.get(agent.node)
    if view.slurm.seen is None or view.shown_node(job, agent.element) is None:
        return False
    info = view.slurm.seen.of(job.job).get(agent.element)
    if info is None:
        return False
    asked = mark is not None and mark.agent == agent.agent and view.now - mark.at < view.config.isolate_seconds
    if asked or (info.node and info.node != agent.node):
        _record_action(job, failure, f"{here} leaves {agent.node} already", out)
        return True
    allocated = job.settings.allocation
    if why := why_kept(view, job, agent, reason, suspect, out):
        stays = f"{agent.node} of job {job.job} is not left" if allocated else f"{here} stays on {agent.node}"
        _record_action(job, failure, f"{stays}: {why}", out)
        words = f"job {job.job} stays on {agent.node} although {reason}: {why}"
        out.record(job, records.IsolationWithheld(node=agent.node, slots=list(slots), reason=words))
        return False
    words = one_line(f"job {job.job} {'goes on without' if allocated else 'leaves'} {agent.node}: {reason}")[:400]
    text = f"move {here} off {agent.node}" + (
        f"; the node is a suspect, `{readmission.pair_test_command(agent.node)}` tests it" if suspect else ""
    )
    text = f"the job goes on without {agent.node}" if allocated else text
    _record_action(job, failure, text, out)
    avoided = records.NodeAvoided(
        element=agent.element, node=agent.node, agent=agent.agent, suspect=suspect, reason=words
    )
    out.record(job, avoided)
    if not allocated:
        out.requests.append(Run((_requeue(job, agent, reason),), urgent=True))
    return True


def _record_action(job: JobState, failure: int | None, text: str, out: Outcome) -> None:
    if failure is not None:
        out.record(job, records.FailureAction(failure=failure, text=text))


def _requeue(job: JobState, agent: AgentView, reason: str) -> Action:
    return Action(
        "requeue_hold",
        job.job,
        job.block_of(agent.element),
        agent.node,
        f"its job leaves {agent.node}: {reason}"[:400],
        f"{HOLD_PREFIX} until there is another node than {agent.node}",
    )


def why_kept(view: View, job: JobState, agent: AgentView, reason: str, suspect: bool, out: Outcome) -> str:
    """Return why the job cannot or must not leave the agent's node; empty if it may. What a partition does not allow is
    recorded as observed."""
    if job.settings.allocation:
        return _why_needed(view, job, agent, suspect)
    if not view.slurm.used:  # nothing is requeued
        return _must_stay(view, job, agent.node, suspect)
    action = _requeue(job, agent, reason)
    return (
        permission.withheld(view, action, out)
        or _must_stay(view, job, agent.node, suspect)
        or bounds.Bounds(view).refuse(action)
    )


def _why_needed(view: View, job: JobState, agent: AgentView, suspect: bool) -> str:
    """Return why a job must not go on without one of its allocation's nodes, which Slurm will not replace; empty if it
    may."""
    spare = any(other != agent.element and other not in job.inside for other in view.live.jobs[job.job].ready)
    why = _must_stay(view, job, agent.node, suspect or spare)
    if not why and not spare and agent.element in job.inside and len(job.inside) <= max(1, job.settings.min_nodes):
        why = f"the job has {plural(len(job.inside), 'node')}, and needs {job.settings.min_nodes}"
    return why


def _must_stay(view: View, job: JobState, node: str, suspect: bool) -> str:
    """Return why the job must not leave the node; empty if it may."""
    now, window = view.now, view.config.isolation_window_seconds
    left = [name for name, mark in job.avoid.items() if now - mark.at < window]
    here = {record.node for record in job.agents.values() if not record.gone}
    why = bounds.left_too_many(job.job, left, here, node, view.config)
    if why or suspect or view.unfit(node):
        return why
    return "" if _other_node(view, job, node) else "no other node is free, and nothing is held against this one"


def _other_node(view: View, job: JobState, node: str) -> bool:
    seen = view.slurm.seen
    if seen is None:
        return False
    taken = {name for e in seen.elements if e.state in OCCUPIES for name in seen.nodes_of(e)}
    taken |= {node, *view.avoided_nodes(job), *view.state.out_of_service}
    return any(info.healthy and info.name not in taken for info in seen.nodes)


# ---------------------------------------------------------------- dead nodes
def take_out(view: View, job: JobState, element: int, node: str, failure: int, text: str, out: Outcome) -> None:
    """Request that Slurm set down a node that was shown dead, or drain it if other jobs run there, unless it is out of
    service already or a limit forbids it. A drained node is set down once those jobs are gone."""
    if doubt := view.suspicions.doubt or view.suspicions.unsure:
        info = view.shown_node(job, element)
        if info is not None and not info.asleep:
            reason = f"{node} is not taken out of service now: {doubt}"
            out.record(job, records.TakeDeferred(node=node, element=element, failure=failure, text=text, reason=reason))
            return
    others = _others(view, node, (job.job, element))
    shared = f"other jobs run there ({', '.join(others[:8])}{', ...' if len(others) > 8 else ''})" if others else ""
    if job.settings.allocation and not others:  # without --no-kill Slurm would end the whole job
        shared = f"job {job.job} has other nodes"
    if settled := _needs_no_taking(view, job, element, node, shared):
        out.record(job, records.FailureAction(failure=failure, text=settled))
        return
    why = "a dead node must get no work"
    if shared:
        why = f"{why}; {shared}: drained, Slurm itself sets it down"
        text = f"{text}; {shared.partition(' (')[0]}: drained, Slurm itself sets it down"[: drains.REASON_LENGTH]
    action = Action("drain" if shared else "down", job.job, job.block_of(element), node, why, text)
    state, not_done = ("DRAIN", "drained") if shared else ("DOWN", "set down")
    if barred := permission.withheld(view, action, out):
        out.record(job, records.FailureAction(failure=failure, text=f"{node} is not {not_done}: {barred}"))
        return
    if many := _too_many(view, node, state, out):
        out.record(job, records.FailureAction(failure=failure, text=f"{node} is not {not_done}: {many}"))
        reason = f"{node} stays in service although it is dead: {many}"
        out.record(job, records.IsolationWithheld(node=node, slots=[], reason=reason))
        out.record(
            job, records.NodeAvoided(element=element, node=node, suspect=True, reason=f"{node} was lost: {text}")
        )
        return
    verb = f"drain {node}" if shared else f"set {node} down"
    done = f"{verb} in Slurm: {text}; once it is back, `{readmission.pair_test_command(node)}` tests it"
    out.record(job, records.FailureAction(failure=failure, text=done))
    out.record(job, records.NodeIsolated(node=node, reason=f"{node} is taken out of service: {text}"))
    out.requests.append(Run((action,), urgent=True))


def power_off(view: View, job: JobState, element: int, node: str, failure: int, out: Outcome) -> None:
    """Request that the site's program switch a silent node off, if there is one, so that no new world has to wait for
    its processes. Not if other jobs run there, which would end with it."""
    info, program = view.shown_node(job, element), view.config.power_off
    if not program or info is None or info.asleep or view.suspicions.doubt or view.suspicions.unsure:
        return
    block, until = job.block_of(element), view.now + SWITCH_SECONDS
    action = Action(POWER_OFF, job.job, block, node, "its processes may live on", program, until)
    others = _others(view, node, (job.job, element))
    why = f"other jobs run there ({', '.join(others[:8])})" if others else ""
    why = why or permission.withheld(view, action, out) or _too_many(view, node, "DOWN", out)
    text = f"{node} is not powered off: {why}" if why else f"power off {node}"
    out.record(job, records.FailureAction(failure=failure, text=text))
    if not why:
        out.requests.append(Run((action,), urgent=True))


def _needs_no_taking(view: View, job: JobState, element: int, node: str, shared: str) -> str:
    """Return why a dead node is left as it is; empty if Slurm has to take it out of service.

    shared: why it would only be drained. A node that was drained before is set down once that reason is gone.
    """
    info, known = view.shown_node(job, element), view.state.node(node)
    if info is None:
        what = "Slurm has not shown this element there" if view.slurm.used else "runs without Slurm"
        return f"{node} is not set down: {what}"
    if info.asleep:
        return f"{node} is left as it is: Slurm's power saving has it ({'+'.join(sorted(info.states))})"
    if known.downed and known.drained and not known.proven_bad and "DOWN" not in info.states and not shared:
        return ""
    if info.states & TAKEN_OUT:
        return f"{node} is out of service already ({info.reason or 'no reason given'}): left as it is"
    return f"{node} is being taken out of service already" if view.unfit(node) else ""


def take_deferred(view: View) -> Outcome:
    """Take lost nodes that were not taken while silence did not count as evidence, and that are still silent now that
    it does. After a start that is not known until all agents had the time to come back."""
    out, settled = Outcome(), view.config.restart_grace + view.config.lease
    if view.suspicions.doubt or view.suspicions.unsure or view.alone or view.now - view.started_at <= settled:
        return out
    taken = set()
    for (node, name, element), owed in sorted(view.state.deferred.items()):
        job = view.state.jobs.get(name)
        agent = job.agents.get(element) if job is not None and not job.over else None
        lost = agent is not None and agent.node == node and agent.lost
        reason = f"{node} is {'still silent' if lost else 'not lost any more'}, and silence is to be believed again"
        record = records.TakeDeferred(node=node, element=element, over=True, reason=reason)
        out.records.append((name, job.generation if job is not None else 0, record))
        if lost and job is not None and node not in taken:
            taken.add(node)
            take_out(view, job, element, node, owed.failure, owed.text, out)
    return out


def _others(view: View, node: str, but: tuple[str, int] | None = None) -> list[str]:
    """Return elements that Slurm shows on the node and that are not lost there: DOWN would end them, and the node may
    be cut off for just seconds. but: the element that is being judged."""
    found = []
    for e in view.slurm.seen.by_node.get(node, ()) if view.slurm.seen else ():
        state = view.state.jobs.get(e.job)
        agent = state.agents.get(e.element) if state is not None else None
        lost = agent is not None and agent.node == node and agent.lost
        if e.state in OCCUPIES and (e.job, e.element) != but and not lost:
            found.append(e.label)
    return sorted(found)


def _too_many(view: View, node: str, state: str, out: Outcome) -> str:
    count = len(view.slurm.seen.nodes) if view.slurm.seen else 0
    taken = {**view.state.isolated}
    taken |= {r.node: Mark(view.now, job) for job, _, r in out.records if isinstance(r, records.NodeIsolated)}
    return bounds.too_many(node, taken, count, view.config, view.now, state)


# ---------------------------------------------------------------- living nodes
def _drain(view: View, node: str, text: str, out: Outcome) -> None:
    """Request that Slurm drain a living node, unless a limit forbids it; its jobs go on.

    Only on the word of root, of Slurm or of an admin, never on that of a user's process.
    """
    action = Action("drain", "", -1, node, "a node that is proven bad must get no more work", text)
    if permission.withheld(view, action, out):
        return
    if why := _too_many(view, node, "DRAIN", out):
        known = view.state.withheld.get(node)
        if known is None or view.now - known.at >= view.config.isolation_window_seconds:
            reason = f"{node} is not drained although {text}: {why}"
            out.record(None, records.IsolationWithheld(node=node, slots=[], reason=reason))
        return
    out.record(None, records.NodeIsolated(node=node, reason=f"{node} is taken out of service: {text}"))
    out.requests.append(Run((action,), urgent=True))


def proven_bad(view: View) -> Outcome:
    """Drain nodes that their health checks or a pair test have proven bad, unless they did so themselves. Record the
    latter, so that they are given back once the checks pass."""
    out, seen = Outcome(), view.slurm.seen
    for name, known in sorted(view.state.nodes.items()) if seen else ():
        info = view.slurm.node(name)
        reports = [one for one in (known.health, known.paired) if one and one.verdict == "bad" and one.drain]
        if info is None or not reports or known.downed:
            continue
        report = max(reports, key=lambda one: one.at)
        news = report.at > known.resumed_at and seen is not None and seen.asked_at > report.at
        if not news:
            continue
        text = info.reason
        if info.states & TAKEN_OUT and drains.is_from_checks(text):
            out.record(None, records.NodeIsolated(node=name, reason=f"{name} has drained itself: {text}"))
            intent = records.SlurmAction(
                action="drain", element=-1, node=name, slurm_reason=text, reason=f"{name} has drained itself"
            )
            out.record(None, intent)
            out.record(None, records.SlurmDone(action="drain", node=name, reason=text))
        elif not drains.why_out_of_service(info) and view.now - report.at >= DRAIN_SECONDS:
            lead = drains.PAIR_TEST if report is known.paired else ""
            _drain(view, name, drains.drain_reason(drains.HEALTH, f"{lead}{report.reason}"), out)
    return out


# ---------------------------------------------------------------- Slurm's answers
def note_refusal(view: View, action: Action, error: str) -> Outcome:
    """Record that Slurm refuses to take the node out of service: it gets no work of ours all the same, and Slurm is
    asked again."""
    out = Outcome()
    if view.state.node(action.node).refused:
        return out
    state = "DRAIN" if action.action == "drain" else "DOWN"
    reason = (
        f"Slurm does not set {action.node} {state} ({error}): it gets no work here, but other jobs may run on it. "
        f"Do it by hand: `scontrol update NodeName={action.node} State={state} Reason=...`"
    )
    failed = records.ActionFailed(
        slot=-1, node=action.node, failed="isolate", action="isolate", severity=1, reason=reason
    )
    out.record(view.state.jobs.get(action.job), failed)
    return out


def gone_down(view: View, out: Outcome) -> None:
    """Record nodes that should be out of service and that Slurm shows so, no matter who did it."""
    for name in sorted(view.state.out_of_service):
        known, info = view.state.node(name), view.slurm.node(name)
        out_of_it = info is not None and info.states & TAKEN_OUT and not _only_drained(known, info)
        if info is not None and out_of_it and (known.going_down or known.refused):
            reason = f"{name} is out of service ({info.reason or 'no reason given'})"
            out.record(None, records.SlurmDone(action=_action(known.drained), node=name, reason=reason))


def down_again(view: View, under_way: Collection[tuple[str, str, int, str]], out: Outcome) -> list[Action]:
    """Return requests to Slurm that are not done: refused, or lost with a controller that died before the answer. A
    node that the admin no longer allows to be taken is in service again."""
    found, waited_for = [], {key[3] for key in under_way}
    for name in sorted(view.state.out_of_service):
        known, info = view.state.node(name), view.slurm.node(name)
        seen = view.slurm.seen
        late = seen is None or seen.asked_at <= known.suspected_at  # the listing is older than the request
        owed = info is not None and (info.healthy or _only_drained(known, info))
        if known.going_down and owed and not late and name not in waited_for:
            why = "Slurm refused it before" if known.refused else "it was not done before"
            drain = known.drained or bool(_others(view, name))  # since it was asked for they may have begun there
            action = Action(_action(drain), known.refused_for, -1, name, why, known.reason or drains.LOST_NODE)
            if barred := permission.withheld(view, action, out):
                reason = f"{action.label}: not allowed: {barred}"
                out.record(None, records.SlurmFailed(action=action.action, element=-1, node=name, reason=reason))
                out.record(None, records.NodeResumed(node=name, verified=False, reason=f"{name} was not taken"))
            else:
                found.append(action)
    return found


def _only_drained(known: NodeState, info: NodeInfo) -> bool:
    """Whether the node was drained by this controller before, and should be set down now that it is empty."""
    return drains.ours(info) and not known.drained and "DOWN" not in info.states


def _action(drained: bool) -> str:
    return "drain" if drained else "down"


# ---------------------------------------------------------------- news for admins
@dataclass(frozen=True)
class Attention:
    """Something that needs an admin."""

    key: str
    """Identifies it as long as it lasts."""
    node: str
    """"" for a limit that was reached."""
    since: float
    """Seconds since the epoch."""
    job: str
    reason: str


def attention(view: View) -> list[Attention]:
    """Return everything that needs an admin now."""
    window = view.config.isolation_window_seconds
    found = [
        Attention(f"withheld {node}", node, mark.at, mark.job, mark.reason)
        for node, mark in sorted(view.state.withheld.items())
        if view.now - mark.at < window and (info := view.slurm.node(node)) is not None and info.healthy
    ]
    slurm = view.slurm
    silence = view.now - slurm.error_since
    if slurm.error and silence >= AWAY_SECONDS:
        reason = f"Slurm has not answered for {silence:.0f} s, and nothing is planned: {slurm.error}"
        found.append(Attention("slurm", "", slurm.error_since, "", reason))
    for take, mark in sorted(view.state.withheld_takes.items()):
        if view.now - mark.at < window:
            found.append(Attention(f"take {take}", "", mark.at, mark.job, mark.reason))
    for name, known in sorted(view.state.nodes.items()):
        if known.refused:
            found.append(Attention(f"refused {name}", name, known.refused_at, known.refused_for, known.refused))
        elif not known.downed and (suspicion := readmission.suspect(view, name)):
            test = readmission.pair_test_command(name)
            reason = f"{name} is a suspect ({suspicion}): `{test}` proves or clears it"
            found.append(Attention(f"suspect {name}", name, known.suspected_at or view.now, "", reason))
    return found


def admin_news(view: View) -> Outcome:
    """Record what newly needs an admin, and what no longer does. Before Slurm has shown its nodes nothing is over,
    since much of it depends on nodes that Slurm shows as healthy."""
    out, known = Outcome(), view.state.attention
    there = {item.key: item for item in attention(view)}
    for key, item in there.items():
        if key not in known:
            out.record(None, records.NeedsAdmin(key=key, node=item.node, reason=item.reason))
    if not view.slurm.used or view.slurm.seen is not None:
        for key in [key for key in known if key not in there]:
            out.record(None, records.NeedsAdmin(key=key, over=True, reason="no admin is needed any more for it"))
    return out
