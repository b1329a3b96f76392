"""The controller's state is a fold over its event log; a restart replays it.

`fold(state, event)`, and :func:`set_job_aside` where it fails, are the only code that changes a
:class:`ClusterState`: live and replayed events go through it
alike. Each kind of record has one rule per part of the state that it changes; kinds without a rule are for people only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from unicron_ctl.controller.model import cluster_rules, job_rules, slurm_rules
from unicron_ctl.controller.model import node_state as node_rules
from unicron_ctl.controller.model.cluster_state import ClusterState
from unicron_ctl.controller.model.job_state import Decided
from unicron_ctl.controller.model.node_state import NodeState
from unicron_ctl.controller.model.requests import OF_ELEMENTS
from unicron_ctl.controller.model.state_machine import PHASES
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event


class Unfoldable(Exception):
    """A record does not fit the state that it is folded into."""


def replay(events: Iterable[Event], state: ClusterState | None = None) -> ClusterState:
    """The state after all events. A record that cannot be folded sets its job aside; the start never fails on it."""
    state = state or ClusterState()
    for event in events:
        try:
            fold(state, event)
        except Exception as error:  # whatever is in a log, the controller starts
            set_job_aside(state, event, f"its log cannot be read at event {event.id} ({event.kind}): {error!r}")
    return state


def set_job_aside(state: ClusterState, event: Event, reason: str) -> None:
    """Sets the job of this event aside, where its record cannot be folded."""
    state.last_event = event.id
    job = state.jobs.get(event.job)
    if job is not None and not job.set_aside:
        job.set_aside = reason


def fold(state: ClusterState, event: Event) -> None:
    """Takes one event into the state. Raises :class:`Unfoldable` for a record that stands for an unreadable one."""
    state.last_event = event.id
    kind = type(event.record)
    if kind is records.Unreadable:
        raise Unfoldable(event.record.reason)
    if rule := _CLUSTER.get(kind):
        rule(state, event, event.record)
    if node_rule := _NODE.get(kind):
        _fold_node(state, event, node_rule)
    job = state.jobs.get(event.job)
    if job is None:
        return
    if job_rule := _JOB.get(kind):
        job_rule(job, event, event.record)
    if phase := PHASES.get(kind):
        job.begin_phase(phase, event.time)
    if kind in _DECISIONS:
        job.decisions.append(Decided(event.time, event.kind, event.generation, event.record.reason))


def _fold_node(state: ClusterState, event: Event, rule: Callable[[NodeState, Event, Any], None]) -> None:
    name = getattr(event.record, "node", "")
    if not name or getattr(event.record, "action", "") in OF_ELEMENTS:
        return
    node = state.nodes.setdefault(name, NodeState())
    rule(node, event, event.record)
    if node.downed or node.going_down:
        state.out_of_service.add(name)
    else:
        state.out_of_service.discard(name)


_Rule = Callable[[Any, Event, Any], None]
_CLUSTER: dict[type[records.Record], _Rule] = {
    records.JobRegistered: cluster_rules.job_registered,
    records.SlurmAction: slurm_rules.action,
    records.SlurmDone: slurm_rules.done,
    records.SlurmFailed: slurm_rules.failed,
    records.TakeWithheld: slurm_rules.withheld,
    records.HeldAgain: slurm_rules.held_again,
    records.ElementUnpinned: slurm_rules.unpinned,
    records.AgentRegistered: cluster_rules.started,
    records.NodeResumed: cluster_rules.node_resumed,
    records.NodeIsolated: cluster_rules.isolated,
    records.TakeDeferred: cluster_rules.take_deferred,
    records.IsolationWithheld: cluster_rules.isolation_withheld,
    records.ActionFailed: cluster_rules.action_failed,
    records.ClusterReplanned: cluster_rules.replanned,
    records.ActionsPaused: cluster_rules.paused,
    records.LogRestored: cluster_rules.restored,
    records.ActionsResumed: cluster_rules.unpaused,
    records.NeedsAdmin: cluster_rules.needs_admin,
    records.NoticesSent: cluster_rules.told,
    records.ActionObserved: cluster_rules.observed,
    records.ObservedWeek: cluster_rules.observed_week,
    records.FailureDetected: cluster_rules.remember_fault,
    records.Step: cluster_rules.remember_progress,
    records.WorldProved: cluster_rules.remember_progress,
    records.JobEnded: cluster_rules.forget,
}
_NODE: dict[type[records.Record], _Rule] = {
    records.SlurmAction: node_rules.slurm_action,
    records.SlurmDone: node_rules.slurm_done,
    records.ActionFailed: node_rules.refused,
    records.NodeLost: node_rules.lost,
    records.SlurmdReached: node_rules.slurmd_reached,
    records.NodeResumed: node_rules.resumed,
    records.NodeHealth: node_rules.health,
    records.NodeEvent: node_rules.said,
    records.NodeVerdict: node_rules.judged,
    records.NodeAvoided: node_rules.avoided,
}
_JOB: dict[type[records.Record], _Rule] = {
    records.AgentRegistered: job_rules.agent_registered,
    records.JobConfirmed: job_rules.job_confirmed,
    records.JobReallocated: job_rules.reallocated,
    records.AgentConfirmed: job_rules.agent_confirmed,
    records.EndNotice: job_rules.noticed,
    records.AgentGone: job_rules.agent_gone,
    records.AgentBack: job_rules.agent_back,
    records.NodeAvoided: slurm_rules.avoided,
    records.ElementUnpinned: slurm_rules.refused,
    records.SlurmAction: slurm_rules.of_element,
    records.SlurmDone: slurm_rules.of_element_done,
    records.SlurmFailed: slurm_rules.of_element_failed,
    records.RanksReady: job_rules.ranks_ready,
    records.RankStart: job_rules.rank_start,
    records.ExitNoted: job_rules.exit_noted,
    records.FailureDetected: job_rules.failure_detected,
    records.FailureVerdict: job_rules.failure_verdict,
    records.FailureAction: job_rules.failure_action,
    records.LeaveOut: job_rules.leave_out,
    records.JobHealed: job_rules.healed,
    records.Break: job_rules.break_,
    records.PlanMade: job_rules.plan,
    records.GenerationAdopted: job_rules.adopted,
    records.NumberUsed: job_rules.number_used,
    records.MembersReinstated: job_rules.reinstated,
    records.ElementCutOff: job_rules.parted,
    records.ElementReconnected: job_rules.rejoined,
    records.Offer: job_rules.offer,
    records.OfferWithdrawn: job_rules.offer_withdrawn,
    records.LastCopy: job_rules.last_copy,
    records.StateAwaited: job_rules.last_copy,
    records.GenerationEntered: job_rules.entered,
    records.Reform: job_rules.reform,
    records.LayoutWanted: job_rules.layout_wanted,
    records.LayoutChosen: job_rules.layout_chosen,
    records.Step: job_rules.step,
    records.WorldProved: job_rules.steady,
    records.ElementsAllotted: job_rules.allotted,
    records.JobEnded: job_rules.job_ended,
    records.JobSetAside: job_rules.set_aside,
    records.LedgerViolation: job_rules.ledger_violation,
}
_DECISIONS = frozenset(
    {
        records.FailureDetected,
        records.FailureVerdict,
        records.Break,
        records.PlanMade,
        records.Offer,
        records.OfferWithdrawn,
        records.LastCopy,
        records.Reform,
        records.LayoutWanted,
        records.LayoutChosen,
        records.ElementsAllotted,
        records.SlurmAction,
        records.SlurmFailed,
        records.ActionFailed,
        records.NodeIsolated,
        records.IsolationWithheld,
        records.TakeDeferred,
        records.NodeAvoided,
        records.TakeWithheld,
        records.RankStart,
        records.StartedCold,
        records.JobEnded,
        records.JobSetAside,
        records.LedgerViolation,
        records.ActionObserved,
        records.NewcomersWait,
        records.NoCopies,
        records.CopiesRefused,
        records.Spares,
    }
)
