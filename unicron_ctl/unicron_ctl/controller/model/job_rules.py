"""Fold rules for one job: its agents and processes, its failures, its generations."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterable
from itertools import repeat

import msgspec

from unicron_ctl.controller.model.job_state import (
    AgentRecord,
    Ending,
    Failure,
    Identity,
    JobState,
    Phase,
    SlotState,
    Swap,
    Unsound,
)
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event
from unicron_detector.failures import escalation_table

SUPERSEDED_KEPT = 20_000  # of one job: several times as many as it can have elements


# ---------------------------------------------------------------- agents and processes
def _slot(job: JobState, slot: int) -> SlotState:
    known = job.slots.get(slot)
    if known is None:
        known = job.slots[slot] = SlotState()
    return known


def on_agent_registered(job: JobState, event: Event, record: records.AgentRegistered) -> None:
    old = job.agents.get(record.element)
    if old and old.agent != record.agent:
        job.superseded[old.agent] = old.node
        while len(job.superseded) > SUPERSEDED_KEPT:
            job.superseded.pop(next(iter(job.superseded)))
    slots = list(record.slots)
    agent = AgentRecord(record.agent, record.node, record.address, slots, door=record.door, key=record.key)
    agent.confirmed, agent.peer, agent.peer_key = record.confirmed, record.peer, record.peer_key
    agent.restarts = record.restarts
    job.agents[record.element] = agent
    job.requeues = max(job.requeues, record.requeues)
    if not any(mate in job.agents and job.agents[mate].gone for mate in job.mates(record.element)):
        job.requeued.pop(job.block_of(record.element), None)
    if old is None or old.agent != record.agent:
        job.parted.pop(record.element, None)  # it may be another node
        job.noticed.pop(record.element, None)
        if job.swap is not None and job.swap.element == record.element:
            job.swap = None
        for slot in record.slots:
            job.slots[slot] = SlotState()  # new processes: counting starts again


def on_job_confirmed(job: JobState, event: Event, record: records.JobConfirmed) -> None:
    most = max(1, min(job.settings.max_nodes, record.most))
    job.settings = msgspec.structs.replace(job.settings, user=record.user, max_nodes=most)
    job.uid, job.submitted = record.uid, record.submitted
    job.nodes, job.nodes_of_restart = record.nodes, record.restarts


def on_reallocated(job: JobState, event: Event, record: records.JobReallocated) -> None:
    most = max(1, min(job.settings.max_nodes, len(record.nodes)))
    job.settings = msgspec.structs.replace(job.settings, max_nodes=most)
    job.nodes, job.nodes_of_restart = record.nodes, record.restarts
    job.shrunk, job.unshrinkable, job.unrequeueable = 0, "", ""


def on_agent_confirmed(job: JobState, event: Event, record: records.AgentConfirmed) -> None:
    agent = job.agents.get(record.element)
    if agent and agent.agent == record.agent:
        agent.confirmed = True


def on_noticed(job: JobState, event: Event, record: records.EndNotice) -> None:
    job.noticed[record.element] = record.agent
    if (agent := job.agents.get(record.element)) is not None:
        agent.noticed = True


def on_agent_gone(job: JobState, event: Event, record: records.AgentGone) -> None:
    agent = job.agents.get(record.element)
    if agent and agent.agent == record.agent:
        agent.gone = record.reason
        job.noticed.pop(record.element, None)
        if job.swap is not None and job.swap.element == record.element:
            job.swap = None
        if record.reason != "finished":
            leave_with_block(job, record.element)


def on_agent_back(job: JobState, event: Event, record: records.AgentBack) -> None:
    agent = job.agents.get(record.element)
    if agent and agent.agent == record.agent:
        agent.gone = ""


def on_swap(job: JobState, event: Event, record: records.NodeSwap) -> None:
    if record.state == "planned":
        job.swap = Swap(record.element, record.agent, tuple(record.along), record.reason)
    elif record.state == "dropped":
        job.swap = None


def on_ranks_ready(job: JobState, event: Event, record: records.RanksReady) -> None:
    for number, incarnation in record.incarnations.items():
        _slot(job, number).ready = Identity(record.agent, incarnation)


def on_rank_start(job: JobState, event: Event, record: records.RankStart) -> None:
    for number in (record.slot, *record.others):
        slot = _slot(job, number)
        slot.wanted, slot.not_before, slot.why = record.incarnation, record.not_before, record.reason
    if failure := job.failure(record.failure) if record.failure else None:
        wait = f" in {record.not_before - event.time:.0f} s" if record.not_before > event.time else ""
        which = f"slots {[record.slot, *record.others]}" if record.others else f"slot {record.slot}"
        failure.actions.append(f"restart {which} in place{wait}")


def on_exit_noted(job: JobState, event: Event, record: records.ExitNoted) -> None:
    for number in (record.slot, *record.others):
        _slot(job, number).exit_seen = Identity(record.agent, record.incarnation)


# ---------------------------------------------------------------- failures
def on_failure_detected(job: JobState, event: Event, record: records.FailureDetected) -> None:
    ends = [seen for seen in record.exits if seen.pid]  # for lines of the kernel that come later
    kept = msgspec.structs.replace(record, leave_out={}, exits=ends, escalation=None)  # the rest is for the fold alone
    job.failures.append(Failure(event.id, event.job, event.time, kept))
    if record.noted is not None:
        _slot(job, record.slots[0] if record.noted_by is None else record.noted_by).noted = record.noted
    for seen in record.exits:
        _slot(job, seen.slot).exit_seen = Identity(seen.agent, seen.incarnation)
    _condemn(job, record.leave_out)
    job.regroup = job.regroup or record.regroup
    if record.action == escalation_table.END_JOB:
        code = record.exit_code or 0
        last = f"; last line: {record.last_line}" if record.last_line else ""
        job.fatal = code if 0 < code < 256 else 1, record.reason + last


def _condemn(job: JobState, slots: dict[int, str]) -> None:
    for slot, why in slots.items():
        if (slot in job.members or slot in job.joining) and slot not in job.lost:
            job.condemned.setdefault(slot, why)


def leave_with_block(job: JobState, element: int) -> None:
    """Leaves out the other nodes of the element's block: a world has a block as a whole or not at all."""
    for mate in job.mates(element) if job.settings.block > 1 else ():
        if mate != element and (agent := job.agents.get(mate)) is not None:
            _condemn(job, dict.fromkeys(agent.slots, f"is on {agent.node}, whose block is not whole"))


def on_healed(job: JobState, event: Event, record: records.JobHealed) -> None:
    job.lost_before = job.lost_seconds
    for failure in job.failures:
        failure.healed = failure.healed or failure.id in record.failures


def on_leave_out(job: JobState, event: Event, record: records.LeaveOut) -> None:
    _condemn(job, record.slots)


def on_failure_verdict(job: JobState, event: Event, record: records.FailureVerdict) -> None:
    failure = job.failure(record.failure)
    if failure is None:
        return
    if record.slots and set(record.slots) < set(failure.record.slots):
        failure = _split(job, failure, record.slots, event.id)
    failure.slurm = failure.slurm if record.slurm is None else record.slurm
    verdict = {
        "severity": record.severity,
        "cause": record.cause,
        "action": record.action,
        "reason": record.reason or None,
    }
    news = {name: value for name, value in verdict.items() if value is not None}
    failure.record = msgspec.structs.replace(failure.record, **news)


def _split(job: JobState, failure: Failure, slots: list[int], number: int) -> Failure:
    """Makes a part of the failure one of its own, with this number."""
    record, replace = failure.record, msgspec.structs.replace
    part = copy.copy(failure)
    part.id, part.actions = number, list(failure.actions)
    mine = [seen for seen in record.exits if seen.slot in slots]
    others = [seen for seen in record.exits if seen.slot not in slots]
    rest = [slot for slot in record.slots if slot not in slots]
    part.record = replace(record, slots=slots, exits=mine, pid=mine[0].pid if mine else record.pid)
    failure.record = replace(record, slots=rest, exits=others, pid=others[0].pid if others else record.pid)
    job.failures.append(part)
    return part


def on_failure_action(job: JobState, event: Event, record: records.FailureAction) -> None:
    if failure := job.failure(record.failure):
        failure.actions.append(record.text)


# ---------------------------------------------------------------- generations
def on_break(job: JobState, event: Event, record: records.Break) -> None:
    job.why, job.regroup, job.condemned = record.reason, "", {}
    if job.joining:
        _note_former_group(job)
        if job.offer is not None:
            job.order = [*job.order, *(slot for slot in job.offer.members if slot in job.joining)]
        job.members = {**job.members, **job.joining}
    job.joining, job.offer = {}, None
    job.broken = job.generation = max(job.generation, record.number)
    job.reached = max(job.reached, record.saved)
    for one in record.lost:
        identity = Identity(one.agent, one.incarnation)
        if job.members.get(one.slot) == identity:
            job.lost[one.slot] = job.banished[one.slot] = identity
    for failure in job.failures:
        if failure.record.member and failure.broken_at is None:
            failure.broken_at, failure.generation = event.time, event.generation
    if job.phase is not Phase.BREAKING:
        again = min(job.stepping_seconds, record.repeated * (job.seconds or 0.0))
        job.trained, job.lost_seconds = job.trained - again, job.lost_seconds + again
        job.restarts += bool(record.lost)
        job.tries = record.tries


def _note_former_group(job: JobState) -> None:
    """Notes the present group, as the next generation is not entered by all yet: agents may go on in the old one."""
    group = job.agents_of(job.members)
    if group and job.mode.agents_agree and group not in job.former:
        job.former = [*job.former, group]


def _identities(crews: Iterable[records.Crew]) -> dict[int, Identity]:
    found: dict[int, Identity] = {}
    for crew in crews:
        if len(set(crew.incarnations)) == 1 and len(crew.slots) == len(crew.incarnations):  # all are alike, as usual
            found.update(dict.fromkeys(crew.slots, Identity(crew.agent, crew.incarnations[0])))
        else:
            found.update(zip(crew.slots, map(Identity, repeat(crew.agent), crew.incarnations), strict=True))
    return found


def on_plan(job: JobState, event: Event, record: records.PlanMade) -> None:
    _note_former_group(job)
    if record.plan.iteration is not None and job.phase is Phase.FORMING and job.mode.keeps_state:
        _note_restored(job, record.plan.iteration)
    job.plan = record.plan
    job.generation = max(job.generation, record.plan.generation)
    job.members, job.order = _identities(record.crews), list(record.plan.members)
    job.joining, job.lost, job.condemned, job.offer, job.regroup = {}, {}, {}, None, ""
    if job.mode.fenced:
        job.world = dict(job.agents_of(job.members))
        job.unfenced = list(job.world)
    for failure in job.failures:
        if failure.broken_at is not None and failure.resumed_at is None:
            failure.planned_at = event.time
            failure.iteration = record.plan.iteration if record.plan.step is None else record.plan.step
            failure.reused_micro_batches, failure.recomputed_micro_batches = record.reused, record.recomputed
            failure.redistributed_micro_batches = record.redistributed


def on_adopted(job: JobState, event: Event, record: records.GenerationAdopted) -> None:
    _note_former_group(job)
    job.plan, job.generation = record.plan, max(job.generation, record.plan.generation)
    job.broken = max(job.broken, record.plan.generation - 1)
    job.members, job.order = _identities(record.crews), list(record.plan.members)
    job.joining, job.lost, job.condemned, job.offer = {}, {}, {}, None
    job.banished = {slot: who for slot, who in job.banished.items() if job.members.get(slot) != who}
    job.regroup = "" if record.whole else record.reason


def on_number_used(job: JobState, event: Event, record: records.NumberUsed) -> None:
    job.generation = max(job.generation, event.generation)
    if job.phase is Phase.BREAKING:
        job.broken = job.generation
    elif job.members:
        job.regroup = record.reason


def on_parted(job: JobState, event: Event, record: records.ElementCutOff) -> None:
    agent = job.agents.get(record.element)
    job.parted[record.element] = agent.agent if agent else ""
    leave_with_block(job, record.element)


def on_rejoined(job: JobState, event: Event, record: records.ElementReconnected) -> None:
    job.parted.pop(record.element, None)


def on_reinstated(job: JobState, event: Event, record: records.MembersReinstated) -> None:
    for slot in record.slots:
        job.lost.pop(slot, None)
        job.banished.pop(slot, None)


def on_offer(job: JobState, event: Event, record: records.Offer) -> None:
    job.offer = record.plan
    job.generation = max(job.generation, record.plan.generation)
    job.joining = _identities(record.crews)


def on_offer_withdrawn(job: JobState, event: Event, record: records.OfferWithdrawn) -> None:
    for one in record.lost:
        if job.joining.get(one.slot) == Identity(one.agent, one.incarnation):
            job.banished[one.slot] = job.joining[one.slot]
    for failure in job.failures:
        found = failure.record
        if found.member and failure.broken_at is None and not any(slot in job.members for slot in found.slots):
            failure.record = msgspec.structs.replace(found, member=False)  # no rank stopped for it
    job.condemned = {slot: why for slot, why in job.condemned.items() if slot in job.members}
    job.offer, job.joining = None, {}


def on_last_copy(job: JobState, event: Event, record: records.LastCopy | records.StateAwaited) -> None:
    job.waits = record.reason


def on_entered(job: JobState, event: Event, record: records.GenerationEntered) -> None:
    if job.offer is not None:
        inside = set(job.offer.members)
        job.members = {slot: who for slot, who in {**job.members, **job.joining}.items() if slot in inside}
        joined, job.joining, job.plan, job.offer = set(job.joining), {}, job.offer, None
        job.order = list(job.plan.members)
        _date_restored(job, event, joined)
    elif job.plan is not None and job.plan.source is not None:  # formed again, with all that work
        _date_restored(job, event, set(job.members))
    _date_whole(job, event)
    job.condemned = {slot: why for slot, why in job.condemned.items() if slot in job.members}
    job.tries, job.former, job.saving_until, job.unfenced = 0, [], 0.0, list(record.unfenced)
    for failure in job.failures:
        if failure.planned_at is not None and failure.resumed_at is None:
            failure.resumed_at = event.time


def _date_whole(job: JobState, event: Event) -> None:
    """Dates failures after which as many ranks as wanted train again, or exactly the lost ones."""
    all_here = len(job.members) >= job.elements_wanted(job.replica) * job.per_node
    for failure in job.failures:
        if failure.broken_at is not None and failure.whole_at is None:
            if all_here or all(slot in job.members for slot in failure.record.slots):
                failure.whole_at = event.time


def _date_restored(job: JobState, event: Event, came: set[int]) -> None:
    """Dates failures whose slots are all members again, some of them just now."""
    for failure in job.failures:
        slots = failure.record.slots
        if failure.restored_at is None and slots and came & set(slots) and all(slot in job.members for slot in slots):
            failure.restored_at = event.time


def _note_restored(job: JobState, iteration: int) -> None:
    """Notes the state from which the job is formed."""
    job.began, job.advanced = iteration if job.began < 0 else job.began, False
    if iteration != job.restored:
        job.restored, job.fruitless, job.fruitless_cause = iteration, 0, ""


def _note_fruitless(job: JobState) -> None:
    """Counts the ends of generations from one state that made no sound iteration and had the same cause. A lost node or
    a plan is no cause of this kind."""
    causes = [
        failure.record.cause
        for failure in job.failures
        if failure.record.member and failure.resumed_at is None and failure.record.kind_of_failure != "node"
    ]
    if job.advanced:
        job.fruitless, job.fruitless_cause = 0, ""
    elif causes:
        job.fruitless = job.fruitless + 1 if causes[0] == job.fruitless_cause else 1
        job.fruitless_cause = causes[0]


def _note_unsound(job: JobState, record: records.Reform) -> None:
    """Notes that the job has to do its iterations since the last sound state again; their time was lost."""
    job.unsound = Unsound(record.unsound_until, record.sound, record.verified)
    made = max(0, job.iteration + 1 - record.sound)
    again = min(job.trained_seconds, made * (job.seconds or 0.0))
    job.trained, job.lost_seconds = job.trained - again, job.lost_seconds + again
    job.iteration, job.nan_since = min(job.iteration, record.sound - 1), -1


def on_reform(job: JobState, event: Event, record: records.Reform) -> None:
    _note_former_group(job)
    if job.plan is not None:
        job.advanced = job.advanced or record.reached > job.restored
        _note_fruitless(job)
    if record.unsound_until >= 0:
        _note_unsound(job, record)
    job.plan = job.offer = None
    job.members, job.joining, job.lost, job.condemned, job.worked = {}, {}, {}, {}, {}
    job.regroup, job.order = "", []
    if job.mode.keeps_state:  # its node's memory may hold the newest state
        job.swap = None


def on_layout_wanted(job: JobState, event: Event, record: records.LayoutWanted) -> None:
    job.relayout = record.layout if record.layout != job.layout else ""
    job.relayout_why = record.reason if job.relayout else ""


def on_layout_chosen(job: JobState, event: Event, record: records.LayoutChosen) -> None:
    job.measured_before, job.measured = job.by_layout, job.by_layout.get(record.layout, {})
    job.measured_before.pop(record.layout, None)
    job.measured_before.pop("", None)
    job.recent.clear()
    job.layout, job.relayout, job.relayout_why = record.layout, "", ""
    job.laid_out = job.generation
    job.saving_until = event.time + record.save_seconds


def on_step(job: JobState, event: Event, record: records.Step) -> None:
    _note_time(job, event, record)
    job.iteration, job.loss, job.nan_since = record.iteration, record.loss, record.nan_since
    job.unsound_seconds = max(job.unsound_seconds, record.unsound_seconds)
    if job.unsound is not None and record.iteration >= job.unsound.until:
        job.unsound = None
    job.iterations_wanted = record.train_iterations or job.iterations_wanted
    job.recent.append((record.nodes, record.seconds, record.flops))
    rates = [f / s for count, s, f in job.recent if count == record.nodes and s > 0 and f > 0]
    if rates and record.nodes:  # 0: the step was reported after all members were lost
        job.measured[record.nodes] = statistics.median(rates)
    if job.mode.keeps_state:  # a plain program may do the same few iterations again and again
        job.worked = job.members
    for failure in job.failures:
        if failure.resumed_at is not None and failure.stepped_at is None:
            failure.stepped_at = event.time


def _note_time(job: JobState, event: Event, record: records.Step) -> None:
    """Counts the time between two steps of a generation as trained; between steps of two generations, only that of the
    iterations made. Time before a job's first step counts from its first failure on. Nothing is added up step by step:
    a log without most steps gives the same."""
    at = max(job.stepped, event.time - record.ago)
    if job.stepped_in != event.generation:
        made = 1 if job.mode.reports else max(1, record.iteration - job.iteration)  # a session begins anywhere
        before = job.stepped or min((failure.detected_at for failure in job.failures), default=at)
        since = at - before if before < at else made * record.seconds
        own = min(since, made * record.seconds, made * (job.seconds or math.inf))
        job.trained, job.lost_seconds = job.stepping_seconds, job.lost_seconds + max(0.0, since - own)
        job.stepping_since, job.stepped_in = at - own, event.generation
    job.stepped = at


def on_steady(job: JobState, event: Event, record: records.WorldProved) -> None:
    """Notes that a plain program got further than before."""
    job.steady, job.restarts, job.worked = event.generation, 0, job.members


def on_allotted(job: JobState, event: Event, record: records.ElementsAllotted) -> None:
    job.allotted, job.leaving = list(record.elements), list(record.leaving)


def on_job_ended(job: JobState, event: Event, record: records.JobEnded) -> None:
    job.ended = Ending(record.code, record.reason, event.time, record.disowned)
    job.offer, job.joining, job.condemned, job.fatal, job.regroup = None, {}, {}, None, ""
    job.slots, job.banished, job.worked = {}, {}, {}


def on_ledger_violation(job: JobState, event: Event, record: records.LedgerViolation) -> None:
    job.ledger_violations += 1


def on_set_aside(job: JobState, event: Event, record: records.JobSetAside) -> None:
    job.set_aside, job.sweep = record.reason, record.sweep
