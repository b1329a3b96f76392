"""The controller's state is a fold over its event log; a restart replays it.

`fold(state, event)`, and :func:`set_job_aside` if it fails, are the only code that changes a :class:`ClusterState`, by
live and replayed events alike. Each kind of record has one rule per part of the state that it changes; kinds without a
rule are for people only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from unicron_ctl.controller.model import cluster_rules, job_rules, slurm_rules
from unicron_ctl.controller.model import node_state as node_rules
from unicron_ctl.controller.model.cluster_state import ClusterState
from unicron_ctl.controller.model.job_state import Decision, Phase
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
    """Sets aside the job of an event whose record cannot be folded."""
    state.last_event = event.id
    job = state.jobs.get(event.job)
    if job is not None and not job.set_aside:
        job.set_aside = reason


def fold(state: ClusterState, event: Event) -> None:
    """Takes one event into the state. Raises :class:`Unfoldable` for an unreadable record."""
    state.last_event = event.id
    kind = type(event.record)
    if kind is records.Unreadable:
        raise Unfoldable(event.record.reason)
    rules = _RULES.get(kind)
    if rules is None:
        return
    if rules.cluster is not None:
        rules.cluster(state, event, event.record)
    if rules.node is not None:
        _fold_node(state, event, rules.node)
    job = state.jobs.get(event.job)
    if job is None:
        return
    if rules.job is not None:
        rules.job(job, event, event.record)
    if rules.phase is not None:
        job.begin_phase(rules.phase, event.time)
    if rules.decision:
        job.decisions.append(Decision(event.time, event.kind, event.generation, event.record.reason))


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


class _Rules(NamedTuple):
    """All rules for one kind of record."""

    cluster: _Rule | None
    node: _Rule | None
    job: _Rule | None
    phase: Phase | None
    decision: bool
    """`unicronctl explain` shows it."""


_CLUSTER: dict[type[records.Record], _Rule] = {
    records.JobRegistered: cluster_rules.on_job_registered,
    records.SlurmAction: slurm_rules.on_action,
    records.SlurmDone: slurm_rules.on_done,
    records.SlurmFailed: slurm_rules.on_failed,
    records.TakeWithheld: slurm_rules.on_withheld,
    records.HeldAgain: slurm_rules.on_held_again,
    records.ElementUnpinned: slurm_rules.on_unpinned,
    records.AgentRegistered: cluster_rules.on_started,
    records.NodeResumed: cluster_rules.on_node_resumed,
    records.NodeIsolated: cluster_rules.on_isolated,
    records.TakeDeferred: cluster_rules.on_take_deferred,
    records.IsolationWithheld: cluster_rules.on_isolation_withheld,
    records.ActionFailed: cluster_rules.on_action_failed,
    records.ClusterReplanned: cluster_rules.on_replanned,
    records.ActionsPaused: cluster_rules.on_paused,
    records.LogRestored: cluster_rules.on_restored,
    records.ActionsResumed: cluster_rules.on_unpaused,
    records.NeedsAdmin: cluster_rules.on_needs_admin,
    records.NoticesSent: cluster_rules.on_told,
    records.ActionObserved: cluster_rules.on_observed,
    records.ObservedWeek: cluster_rules.on_observed_week,
    records.FailureDetected: cluster_rules.on_remember_fault,
    records.PairTest: cluster_rules.on_pair_test,
    records.Step: cluster_rules.on_remember_progress,
    records.WorldProved: cluster_rules.on_remember_progress,
    records.JobEnded: cluster_rules.on_forget,
}
_NODE: dict[type[records.Record], _Rule] = {
    records.SlurmAction: node_rules.on_slurm_action,
    records.SlurmDone: node_rules.on_slurm_done,
    records.ActionFailed: node_rules.on_refused,
    records.NodeLost: node_rules.on_lost,
    records.SlurmdReached: node_rules.on_slurmd_reached,
    records.NodeResumed: node_rules.on_resumed,
    records.NodeHealth: node_rules.on_health,
    records.NodeEvent: node_rules.on_said,
    records.NodeVerdict: node_rules.on_judged,
    records.NodeAvoided: node_rules.on_avoided,
    records.Anomaly: node_rules.on_anomaly,
}
_JOB: dict[type[records.Record], _Rule] = {
    records.AgentRegistered: job_rules.on_agent_registered,
    records.JobConfirmed: job_rules.on_job_confirmed,
    records.JobReallocated: job_rules.on_reallocated,
    records.AgentConfirmed: job_rules.on_agent_confirmed,
    records.EndNotice: job_rules.on_noticed,
    records.AgentGone: job_rules.on_agent_gone,
    records.AgentBack: job_rules.on_agent_back,
    records.NodeAvoided: slurm_rules.on_avoided,
    records.NodeSwap: job_rules.on_swap,
    records.ElementUnpinned: slurm_rules.on_refused,
    records.SlurmAction: slurm_rules.on_of_element,
    records.SlurmDone: slurm_rules.on_of_element_done,
    records.SlurmFailed: slurm_rules.on_of_element_failed,
    records.RanksReady: job_rules.on_ranks_ready,
    records.RankStart: job_rules.on_rank_start,
    records.ExitNoted: job_rules.on_exit_noted,
    records.FailureDetected: job_rules.on_failure_detected,
    records.FailureVerdict: job_rules.on_failure_verdict,
    records.FailureAction: job_rules.on_failure_action,
    records.LeaveOut: job_rules.on_leave_out,
    records.JobHealed: job_rules.on_healed,
    records.Break: job_rules.on_break,
    records.PlanMade: job_rules.on_plan,
    records.GenerationAdopted: job_rules.on_adopted,
    records.NumberUsed: job_rules.on_number_used,
    records.MembersReinstated: job_rules.on_reinstated,
    records.ElementCutOff: job_rules.on_parted,
    records.ElementReconnected: job_rules.on_rejoined,
    records.Offer: job_rules.on_offer,
    records.OfferWithdrawn: job_rules.on_offer_withdrawn,
    records.LastCopy: job_rules.on_last_copy,
    records.StateAwaited: job_rules.on_last_copy,
    records.GenerationEntered: job_rules.on_entered,
    records.Reform: job_rules.on_reform,
    records.LayoutWanted: job_rules.on_layout_wanted,
    records.LayoutChosen: job_rules.on_layout_chosen,
    records.Step: job_rules.on_step,
    records.WorldProved: job_rules.on_steady,
    records.ElementsAllotted: job_rules.on_allotted,
    records.JobEnded: job_rules.on_job_ended,
    records.JobSetAside: job_rules.on_set_aside,
    records.LedgerViolation: job_rules.on_ledger_violation,
}
_DECISIONS: frozenset[type[records.Record]] = frozenset(
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
        records.NodeSwap,
        records.Anomaly,
        records.PairTest,
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
_KINDS: set[type[records.Record]] = {*_CLUSTER, *_NODE, *_JOB, *PHASES, *_DECISIONS}
_RULES = {
    kind: _Rules(_CLUSTER.get(kind), _NODE.get(kind), _JOB.get(kind), PHASES.get(kind), kind in _DECISIONS)
    for kind in _KINDS
}
