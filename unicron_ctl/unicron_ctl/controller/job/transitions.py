"""The actions of a job's state machine: each records one decision; orders to the agents follow from the state.

All of them keep this invariant (`tests/unit/unicron_ctl/controller/job/test_generations.py` checks it):

FORMING    no plan and no offer; no process is a member, lost or joining
ENTERING   plan = generation > broken: the members' processes are those of the plan
RUNNING    generation >= plan > broken: a number that was offered, or only begun, is never used again
OFFERING   offer = generation > plan > broken: joining has the processes that only the offer names
BREAKING   generation = broken >= plan: every lost process is a member, and none joins

`plan`, `offer` and `broken` stand for their numbers. So a rank obeys the message with the highest number, a message of
an older generation does no harm, and any loss, in any step, is just another Break.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from unicron_ctl.controller.job import spares
from unicron_ctl.controller.job.candidates import remaining
from unicron_ctl.controller.job.deciding import decide
from unicron_ctl.controller.job.modes import Trigger, given_up
from unicron_ctl.controller.judge.remedies import start_rank
from unicron_ctl.controller.model.finding import Finding, Source, What
from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.state_machine import Action, Event
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.replication.fetching import fetch_orders, fetched_from, wanted_state
from unicron_ctl.controller.replication.forming import (
    FormableGeneration,
    formable,
    left_behind,
    soundly,
    taken_over,
    without_match,
)
from unicron_ctl.controller.replication.script_states import newest_saved
from unicron_ctl.shared.consensus import survivors_plan
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.protocol.structs import RankStatus
from unicron_ctl.shared.protocol.wire import Plan
from unicron_detector.words import plural
from unicron_transition.generations import layout

SAVE_SECONDS = 600.0  # for ranks that will end, to write a checkpoint
TRIES = 2  # starts from one state that may fail in the same way; then an older one is taken


def form_generation(view: View, job: JobView, trigger: Trigger) -> Outcome:
    """Plans the first generation, or one after a generation without survivors.

    The replica that has trained furthest gives its state to all others. Ranks that have no state in common start again
    if they have been in a generation, from the script's newest checkpoint if there is one.
    """
    reports = {slot: status for slot in trigger.joiners if (status := job.status(slot)) is not None}
    newest, unsound = job.state.newest_sound, job.state.unsound
    if newest is not None and unsound is not None:
        reports = soundly(reports, newest, unsound.verified)
    found, out = formable(reports, job.replica), Outcome()
    wanted = wanted_state(view, job, reports, found)
    if (fetching := fetch_orders(view, job, wanted)) is not None:
        return fetching
    failed = _failed_before(job, reports, found)
    if failed and failed[1] is not None:
        out.record(job.state, failed[1])
        return out
    if found is None and unsound is not None and not any(status.went_back is not None for status in reports.values()):
        reason = (
            f"the training state after iteration {unsound.sound} is unsound, and no rank, no node's memory and no "
            "checkpoint has an older one: submit the job again to begin anew"
        )
        out.record(job.state, records.JobEnded(code=1, reason=reason))
        return out
    if found is None:
        again = without_match(reports) or sorted(reports)  # all are new and as far, with states of different pasts
        reason = (
            f"slots {sorted(again)[:20]} have kept their training state, but the ranks for the other places of a "
            "replica have none of the same iteration: they start again, from the newest state that they find"
        )
        out.record(job.state, records.Reform(reason=reason))
        for slot in sorted(again):
            start_rank(job.state, slot, reports[slot].incarnation + 1, view.now, "its state cannot be completed", out)
        return out
    number = job.state.generation + 1
    start = "; ".join(filter(None, (failed[0] if failed else "", found.why))) or (
        f"from iteration {found.iteration}" if job.state.mode.keeps_state else ""
    )
    plan = Plan(
        generation=number,
        members=found.members,
        store=store_of(job, found.members),
        prefix=prefix(job.state, number),
        joiners=found.joiners,
        source=found.source,
        iteration=found.iteration if job.state.mode.keeps_state else job.state.iteration + 1,
        assignment=survivors_plan.deal(
            range(max(reports[slot].micro_batches for slot in found.members)),
            layout.heads(found.members, job.replica),
            reports[found.members[0]].lanes,
        ),
        reason=f"{'; '.join(filter(None, (_cause(job.state), trigger.reason, start)))}"
        f"{fetched_from(job, found.iteration)}{taken_over(reports, found)}{left_behind(reports, found)}",
        replica=job.replica,
        state=found.state,
    )
    out.record(job.state, records.PlanMade(plan=plan, crews=crews(job, plan.members), reason=plan.reason), number)
    spares.note_swaps(job.state, spares.swaps(view, job, found.members), out)
    return out


def _failed_before(
    job: JobView, reports: Mapping[int, RankStatus], found: FormableGeneration | None
) -> tuple[str, records.Reform | None] | None:
    """Return what follows if the job has failed TRIES times from the state that it would begin with again: the words,
    and a record that takes it to an older one, None if there is none. None if it has not failed so often."""
    state = job.state
    if found is None or found.iteration != state.restored or state.fruitless < TRIES:
        return None
    what = (
        f"{plural(state.fruitless, 'start')} in a row from the state of iteration {found.iteration} failed with "
        f"{state.fruitless_cause} before one sound iteration"
    )
    older = formable(soundly(reports, found.iteration - 1, from_script=False), job.replica)
    if older is None:
        return f"{what}, and there is no older state", None
    reason = f"{what}: the job goes on from an older state, iteration {older.iteration}"
    return what, records.Reform(unsound_until=found.iteration, sound=found.iteration - 1, reason=reason)


def _cause(job: JobState) -> str:
    """Why the last generation broke. If it lost nodes, the ends of other ranks were consequences."""
    broken = [failure.record for failure in job.failures if failure.generation == job.broken]
    nodes = sorted({record.node for record in broken if record.kind_of_failure == "node" and record.node})
    if nodes:
        return f"lost {', '.join(nodes[:8])}"
    return job.why if job.broken else ""


def break_generations(view: View, job: JobView, trigger: Trigger) -> Outcome:
    """Ends all generations so far, and names the lost processes."""
    out, state = Outcome(), job.state
    number = state.generation  # the highest ever used, so that an outstanding offer is over, too
    inside = {**state.members, **state.joining}
    lost = [
        records.LostProcess(slot, inside[slot].agent, inside[slot].incarnation)
        for slot in sorted(state.condemned)
        if slot in inside
    ]
    tries = state.tries + 1 if trigger.event is Event.TIMEOUT else 0
    planned = not state.mode.joins and trigger.event is Event.FAULT and not state.regroup
    reached = saved.iteration if (saved := newest_saved(job)) is not None else -1
    record = records.Break(number, lost, tries, planned, reached, _iterations_again(job), reason=trigger.reason)
    out.record(state, record, number)
    return out


def _iterations_again(job: JobView) -> int:
    """Iterations that a world of plain programs has made since its last checkpoint; 0 if none was seen."""
    if job.state.mode.reports:
        return 0
    saved = max((s.saved for slot in job.state.members if (s := job.status(slot)) is not None), default=-1)
    return max(0, job.state.iteration + 1 - saved) if saved >= 0 else 0


def resume_training(view: View, job: JobView, trigger: Trigger) -> Outcome:
    """Plans how the survivors, which have stopped, go on."""
    out, state, decision = Outcome(), job.state, trigger.decision or decide(job)
    unusable = decision.unusable if decision else dict.fromkeys(job.reports(), "its report cannot be worked with")
    if unusable:
        out.findings = [_unusable(view, job, slot, why) for slot, why in sorted(unusable.items())]
        return out
    assert decision is not None
    number = state.generation + 1
    plan = Plan(
        generation=number,
        members=decision.members,
        store=store_of(job, decision.members),
        prefix=prefix(state, number),
        step=decision.step,
        iteration=decision.iteration,
        assignment=decision.assignment,
        reason=decision.reason,
        replica=job.replica,
        state=decision.state,
    )
    record = records.PlanMade(
        plan=plan,
        crews=crews(job, decision.members),
        reused=decision.reused,
        recomputed=decision.recomputed,
        redistributed=decision.redistributed,
        reason=plan.reason,
    )
    out.record(state, record, number)
    return out


def reform_job(view: View, job: JobView, trigger: Trigger) -> Outcome:
    """Waits for new ranks, because no rank has the training state any more."""
    if back := given_up(job):
        return _go_back(view, job, trigger, max(back.values()))
    out = Outcome()
    reason = f"{trigger.reason}: formed anew from the newest state in memory, a checkpoint, or the script"
    out.record(job.state, records.Reform(reached=_furthest(job), reason=reason))
    return out


def _furthest(job: JobView) -> int:
    """The furthest iteration that members had come to, by their last words."""
    words = (job.last_word(slot, process) for slot, process in job.state.members.items())
    return max((word.iteration + (word.phase == "stepped") for word in words if word is not None), default=-1)


def _go_back(view: View, job: JobView, trigger: Trigger, verified: int) -> Outcome:
    """Has the job formed anew from a sound state. verified: the last iteration that ranks know to be verified, -1 for
    none. Ranks that could not begin from another state start again."""
    out, state = Outcome(), job.state
    reached = max([state.iteration + 1, *(status.iteration + 1 for _, _, status in job.all_ranks())])
    sound = verified if verified >= 0 else max(0, state.began)
    which = "the last verified one" if verified >= 0 else "no later one is verified"
    reason = f"{trigger.reason}: formed anew from the state of iteration {sound} or an older one ({which})"
    record = records.Reform(unsound_until=reached, sound=sound, verified=verified >= 0, reason=reason)
    stay = {slot for _, slot, status in job.all_ranks() if status.state == "waiting" and status.kept}
    again = [slot for slot in state.survivors() if slot not in stay and job.status(slot) is not None]
    out.record(state, record)
    for slot in sorted(again):
        status = job.status(slot)
        assert status is not None
        start_rank(state, slot, status.incarnation + 1, view.now, "its training state is unsound", out)
    return out


def change_layout(view: View, job: JobView, trigger: Trigger) -> Outcome:
    """Ends all ranks and starts them in the planned layout, from the newest checkpoint. Ranks that have the training
    state save it first."""
    out, state = Outcome(), job.state
    seconds = SAVE_SECONDS if any(status.state == "stopped" for _, _, status in job.all_ranks()) else 0.0
    out.record(state, records.LayoutChosen(layout=state.relayout, save_seconds=seconds, reason=trigger.reason))
    out.record(state, records.Reform(reason=f"formed anew as {state.relayout}, from the newest checkpoint"))
    for slot in sorted(slot for agent in state.agents.values() for slot in agent.slots):  # also of absent agents
        status, member = job.status(slot), state.members.get(slot)
        last = (state.slot(slot).wanted, status.incarnation if status else 0, member.incarnation if member else 0)
        start_rank(state, slot, max(last) + 1, view.now, f"the job goes on as {state.relayout}", out)
    return out


def offer_generation(view: View, job: JobView, trigger: Trigger) -> Outcome:
    """Plans the next iteration boundary, with newcomers or without leavers."""
    out, state = Outcome(), job.state
    assert state.plan is not None
    size, joiners = job.replica, list(trigger.joiners)
    staying = remaining(state.plan.members, trigger.leavers, size)
    number = state.generation + 1
    plan = Plan(
        generation=number,
        members=layout.arrange([*layout.replicas(staying, size), *layout.replicas(joiners, size)]),
        store=store_of(job, staying),
        prefix=prefix(state, number),
        boundary=True,
        joiners=sorted(joiners),
        source=staying[0],
        reason=trigger.reason,
        replica=size,
    )
    record = records.Offer(
        plan=plan,
        crews=crews(job, joiners),
        joiners=sorted(joiners),
        leavers=sorted(trigger.leavers),
        reason=trigger.reason,
    )
    out.record(state, record, number)
    spares.note_swaps(state, spares.swaps(view, job, joiners), out)
    return out


def withdraw_offer(view: View, job: JobView, trigger: Trigger) -> Outcome:
    """Withdraws the offer. Members that still have it can only take it together, which their statuses show, so one
    message to each is enough."""
    out, state = Outcome(), job.state
    assert state.offer is not None
    number = state.offer.generation
    gone = [(slot, state.joining[slot]) for slot in sorted(state.condemned) if slot in state.joining]
    lost = [records.LostProcess(slot, process.agent, process.incarnation) for slot, process in gone]
    out.record(state, records.OfferWithdrawn(number=number, lost=lost, reason=trigger.reason), number)
    for agent in job.alive():
        out.send(agent, wire.Withdraw(generation=number, reason=trigger.reason))
    return out


def enter_generation(view: View, job: JobView, trigger: Trigger) -> Outcome:
    """Records that all members are in: training goes on."""
    out, state = Outcome(hurry=True), job.state
    plan = state.offer or state.plan
    assert plan is not None
    left = sorted(set(state.members) - set(plan.members)) if state.offer else []
    unfenced = [one.element for one in job.alive() if one.element in state.world and not one.status.fenced]
    record = records.GenerationEntered(members=plan.members, left=left, unfenced=unfenced, reason=trigger.reason)
    out.record(state, record, plan.generation)
    return out


def end_job(view: View, job: JobView, trigger: Trigger) -> Outcome:
    """Ends the job; its agents get the exit code."""
    out = Outcome(hurry=True)
    reason = "; ".join(filter(None, (trigger.reason, _account(job.state))))
    out.record(job.state, records.JobEnded(code=trigger.code, reason=reason))
    return out


def _account(job: JobState) -> str:
    """The job's goodput, in words; empty before the first step."""
    if job.goodput is None:
        return ""
    return (
        f"{plural(job.iteration + 1, 'iteration')}, goodput {100.0 * job.goodput:.1f} %, "
        f"{job.all_lost_seconds:.1f} s lost in {plural(len(job.failures), 'failure')}"
    )


PERFORM: dict[Action, Callable[[View, JobView, Trigger], Outcome]] = {
    Action.FORM: form_generation,
    Action.BREAK: break_generations,
    Action.RESUME: resume_training,
    Action.REFORM: reform_job,
    Action.RELAYOUT: change_layout,
    Action.OFFER: offer_generation,
    Action.WITHDRAW: withdraw_offer,
    Action.ENTER: enter_generation,
    Action.END: end_job,
}


# ---------------------------------------------------------------- helpers
def store_of(job: JobView, preferred: Iterable[int]) -> str:
    """The rendezvous store of the first living agent that has one, agents of `preferred` slots first."""
    for element in (*job.state.elements(preferred), *sorted(job.agents)):
        agent = job.agents.get(element)
        if agent is not None and agent.alive and agent.status.store:
            return agent.status.store
    raise LookupError(f"no living agent of job {job.state.job} keeps a store")  # without one no job forms or reports


def prefix(job: JobState, generation: int) -> str:
    """The key prefix of a generation in the store, so that keys of two generations never collide."""
    return f"{job.job}.g{generation}"


def crews(job: JobView, slots: Iterable[int]) -> list[records.Crew]:
    """The processes that are in these slots now, by agent."""
    wanted, found = set(slots), []
    for _, agent in sorted(job.agents.items()):
        ranks, common = agent.ranks, agent.common
        if common is not None and wanted.issuperset(agent.slots):
            found.append(records.Crew(agent.agent, agent.slots, [common.incarnation] * len(agent.slots)))
        elif inside := [slot for slot in agent.slots if slot in ranks and slot in wanted]:
            found.append(records.Crew(agent.agent, inside, [ranks[slot].incarnation for slot in inside]))
    return found


def _unusable(view: View, job: JobView, slot: int, why: str) -> Finding:
    status = job.status(slot)
    return Finding(
        What.UNUSABLE,
        job.state.job,
        (slot,),
        view.now,
        Source.RANK,
        why,
        element=job.state.element(slot),
        node=job.state.node(slot),
        by="report",
        identity=job.identity(slot),
        iteration=status.iteration if status else None,
    )
