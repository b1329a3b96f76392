"""The plan compared with Slurm's listing: the actions that bring Slurm to the plan.

Nothing here blocks: polls, actions and probes are requests that a thread carries out, and their results come back as
inputs. Without a fresh listing nothing is decided.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from unicron_ctl.controller.model import permission
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.job_state import AgentRecord, JobState, Phase
from unicron_ctl.controller.model.requests import OURS, Action
from unicron_ctl.controller.model.view import Listing, Outcome, View
from unicron_ctl.controller.nodes import isolation, readmission, unfinished
from unicron_ctl.controller.plan import job_layouts
from unicron_ctl.controller.plan.inputs import (
    came_to_nothing,
    dead_elements,
    ended_in_allocation,
    ending,
    inputs,
    key_of,
    plan_for,
    reaches,
    unit_of,
    why_fixed,
)
from unicron_ctl.controller.plan.job_comments import comment_on_jobs
from unicron_ctl.controller.plan.placement import PIN_SECONDS, Need, Placement, held_by_others, place
from unicron_ctl.controller.plan.planning import Aheads
from unicron_ctl.controller.plan.pools import pools
from unicron_ctl.controller.plan.slurm_actions import Desk, request_actions
from unicron_ctl.controller.sense import fencing
from unicron_ctl.controller.sense.slurm_states import describe
from unicron_ctl.shared.log import records
from unicron_ctl.shared.slurm import pending_reasons
from unicron_ctl.shared.slurm.admin_comment import HOLD_PREFIX, own_part
from unicron_ctl.shared.slurm.slurm_client import ElementInfo
from unicron_ctl.shared.slurm.squeue import names_of, nodes_of
from unicron_ctl.shared.slurm.states import ENDED_BADLY, OCCUPIES, OVER, WORKS
from unicron_detector.words import plural

# End states of the elements of a job that has not trained to its end, the most telling first
ENDS_BEFORE_FINISH = (*sorted(OVER - ENDED_BADLY - {"COMPLETED"}), *sorted(ENDED_BADLY))
STOP_EXIT_CODE = 128 + signal.SIGTERM  # exit code of a job that was stopped, as a shell shows it
# After the last message of an agent that has left, without news of its task's end: the task may still write files for
# a minute (agent.loop.agent.FILES_SECONDS)
ENDS_SECONDS = 75.0
SILENT_SECONDS = 600.0  # no new try on a node where an element did not start for no stated reason
REFUSED_BLOCK_SECONDS = 300.0  # a block gets none of the nodes that Slurm refused it: one may be at fault
QUIET_SECONDS = 120.0  # after its agent's last message, a node judged lost does not come back
REFUSED_SECONDS = 600.0  # then a job without a world ends that Slurm does not requeue for a passing reason
FOR_GOOD = ("disabled", "batch")  # in Slurm's refusal to requeue: --no-requeue; a job without a batch script
GONE_SECONDS = 10.0  # a job without an element in Slurm for so long is over


# ---------------------------------------------------------------- allocations with too few nodes left for a world
@dataclass(frozen=True)
class Shortage:
    """A lack of nodes in an allocation, which gets no others."""

    reason: str
    """The number of nodes that it needs, and that it has."""
    final: bool
    """Whether the lost nodes never come back."""


def shortage(view: View, job: JobState) -> Shortage | None:
    """Why the job cannot form a world; None while it has one, or can.

    A node that does not answer for a moment counts until Slurm has taken it out of the allocation or shows it down, or
    until it was judged lost and has been quiet for QUIET_SECONDS. Processes that may live on there have to end first.
    """
    if not job.settings.allocation or job.over or job.phase is not Phase.FORMING or view.slurm.seen is None:
        return None
    listed, ended = view.slurm.seen.of(job.job), ended_in_allocation(job)
    if not listed or any(e.state != "RUNNING" for e in listed.values()):
        return None
    needs = max(job.least, unit_of(view, job))
    has = len(listed.keys() - ended.keys())
    if has >= needs:
        return None
    lasting = sum(element not in ended or not _stays_away(view, job, element) for element in listed)
    final = lasting < needs and not fencing.holds(view, view.job(job))
    return Shortage(f"it needs {plural(needs, 'node')}, has {has}, and an allocation gets no other", final)


def _stays_away(view: View, job: JobState, element: int) -> bool:
    """Whether nothing trains again on the node of a gone agent."""
    node, agent = view.slurm.node(job.agents[element].node), view.live.agent(job.job, element)
    heard = agent.last_heard if agent is not None else view.started_at
    return (node is not None and "DOWN" in node.states) or view.now - heard > QUIET_SECONDS


def requeue(job: JobState, short: Shortage) -> Action:
    """Returns the action by which Slurm runs the batch script again, on as many nodes as it was submitted for."""
    return Action("requeue", job.job, 0, "", short.reason)


def must_end(view: View, job: JobState) -> str:
    """Why the job ends, as it can form no world again and Slurm does not requeue it; empty for any other job."""
    short = shortage(view, job)
    if short is None or not short.final or view.suspicions.doubt:
        return ""
    refused = permission.of_action(view, requeue(job, short)).refusal("requeue")
    why = job.unrequeueable
    if why and (any(word in why for word in FOR_GOOD) or view.now - job.since > REFUSED_SECONDS):
        refused = refused or f"Slurm does not requeue it: {why}"
    return f"{short.reason}; {refused}" if refused else ""


# ---------------------------------------------------------------- a fresh listing
def before_planning(view: View, desk: Desk, listing: Listing) -> Outcome:
    """Handles nodes that come back or must go down, jobs that Slurm no longer runs, and elements of jobs that are
    over."""
    out = Outcome()
    desk.prune(view)
    isolation.gone_down(view, out)
    actions = unfinished.settle_unfinished(view, listing, desk.under_way, out)
    _held_again(view, listing, out)
    actions += readmission.nodes_back(view, desk.gate, out) + isolation.down_again(view, desk.under_way, out)
    for job in list(view.state.jobs.values()):
        actions += _over(view, desk, listing, job, out)
    actions += _requeue_preempted(view, listing) + _requeue_stranded(view, out)
    request_actions(view, desk.retries, actions, out)
    comment_on_jobs(view, desk.comments, listing, out)
    return out.merge([isolation.proven_bad(view)])


def _requeue_preempted(view: View, listing: Listing) -> list[Action]:
    """Requeues elements that Slurm preempts and that have left their jobs, to free their nodes before the grace time is
    over. Slurm starts them again when it can. Their agents may have ended all ranks and wait for that."""
    found = {}
    for job in view.managed_jobs():
        for element, agent in view.job(job).agents.items() if not job.settings.allocation else ():
            trains = not job.inside.isdisjoint(job.mates(element))
            if not agent.status.noticed or agent.shown not in WORKS or trains or job.torn(element):
                continue
            block = job.block_of(element)
            e = listing.rows_of(job.job).get(block)
            if e is not None and e.state == "RUNNING" and e.restarts == agent.restarts:  # not requeued yet
                why = "Slurm preempts it, and its ranks have left"
                found[job.job, block] = Action("requeue", job.job, block, ",".join(nodes_of(e)), why)
    return list(found.values())


def _requeue_stranded(view: View, out: Outcome) -> list[Action]:
    """Requeues jobs that are one allocation and can form no world again, as they would keep their nodes in vain, and
    notes it in their logs. `job_events` ends those that cannot be requeued."""
    found = []
    for job in view.managed_jobs():
        short = shortage(view, job)
        if short is None or not short.final or must_end(view, job):
            continue
        found.append(requeue(job, short))
        out.note(view.job(job).agents, f"{short.reason}: Slurm is asked to requeue the job")
    return found


def _held_again(view: View, listing: Listing, out: Outcome) -> None:
    """Records this controller's holds that are not in the log: slurmctld was killed before it had saved the release, or
    the element had started before its hold came, which Slurm then applies at its next requeue. Both would be held for
    ever, as if by an admin. AdminComment distinguishes them: users cannot write it, and a release changes it."""
    busy = {(job, element) for _, job, element, _ in view.state.intents}
    for key, at in view.state.once_held.items():
        job, e = view.state.jobs.get(key[0]), listing.rows_of(key[0]).get(key[1])
        if job is None or e is None or not e.held or key in view.state.held or key in busy or listing.asked_at <= at:
            continue
        if own_part(e.admin_comment).startswith(HOLD_PREFIX) and e.reason != "JobHeldUser":
            reason = f"Slurm shows it held by what was written here ({e.admin_comment}), and it is not to be by the log"
            out.record(job, records.HeldAgain(element=e.element, reason=reason))


def _over(view: View, desk: Desk, listing: Listing, job: JobState, out: Outcome) -> list[Action]:
    """Ends Slurm's elements of a job that is over, and a job without elements in Slurm."""
    elements = listing.rows_of(job.job).values()
    if job.ended:
        return _after_end(view, desk, listing, job) if job.submitted else []
    pending = [e for e in elements if e.state == "PENDING"]
    held = [e for e in pending if e.held and not held_by_others(e, view.state.held)]
    if job.set_aside and held:  # nothing plans for it any more
        return [Action("release", e.job, e.element, "", f"job {job.job} is left alone") for e in held]
    here = bool(job.submitted and view.job(job).alive())
    if here or pending or any(_may_go_on(job, e) for e in elements):
        desk.missing_since.pop(job.job, None)
    elif view.now - desk.missing_since.setdefault(job.job, view.now) > GONE_SECONDS:
        code, reason = _how_it_ended(elements) if job.submitted else (0, "Slurm does not show this job")
        out.record(job, records.JobEnded(code=code, reason=reason, disowned=not job.submitted))
    return []


def _may_go_on(job: JobState, e: ElementInfo) -> bool:
    """Whether the element runs, or has ended in a way that is not final."""
    return e.state in OCCUPIES or came_to_nothing(job, e) or ending(job, e)


def _after_end(view: View, desk: Desk, listing: Listing, job: JobState) -> list[Action]:
    """Cancels waiting elements of an array that has ended. Any other job that waits again was requeued, and runs its
    batch script from the start."""
    why = f"job {job.job} has ended: {job.ended.reason if job.ended else ''}"[:200]
    if _without_script(job, listing):
        return [_script_again(desk, job, why)]
    over = [e for e in listing.rows_of(job.job).values() if e.state == "PENDING" and e.array and not job.id_reused(e)]
    text = f"{OURS}: cancelled, for {why}"
    ours = [e for e in over if not held_by_others(e, view.state.held)]
    return [Action("cancel", e.job, e.element, "", why, text) for e in ours]


def _how_it_ended(elements: Iterable[ElementInfo]) -> tuple[int, str]:
    """(exit code, reason) of a job of which no element runs any more."""
    reason = "Slurm no longer runs any of its elements"
    bad = min(
        (e for e in elements if e.state in ENDS_BEFORE_FINISH),
        key=lambda e: ENDS_BEFORE_FINISH.index(e.state),
        default=None,
    )
    if bad is None:
        return 0, reason
    return 1 if bad.state in ENDED_BADLY else STOP_EXIT_CODE, f"{reason}; {describe(bad)}"


def _without_script(job: JobState, listing: Listing) -> bool:
    """Whether the rest of an allocation runs on after Slurm took out its first node, with the batch script: Slurm ends
    such a job only at its time limit (seen with 22.05)."""
    elements = listing.of(job.job)
    running = [e for e in elements.values() if e.state == "RUNNING" and not job.id_reused(e)]
    return bool(job.nodes) and 0 not in elements and bool(running)


def _script_again(desk: Desk, job: JobState, why: str) -> Action:
    """Requeues or ends a job whose batch script was lost with its host: Slurm runs the script again, and the training
    finds its last checkpoint. A job that has failed, or that Slurm does not requeue, is ended."""
    why = f"{why}; its batch host {job.nodes[0]} is gone, and its script with it"
    again = Action("requeue", job.job, 0, "", why)
    if job.ended is None or job.ended.code or desk.retries.is_refused(again):
        return Action("cancel", job.job, 0, "", f"{why}, and nothing else would end it")
    return again


def placing(view: View, desk: Desk, listing: Listing, jobs: Sequence[JobState]) -> Outcome:
    """Gives every job its nodes by the plan."""
    out, state = Outcome(), view.state
    reasons = state.plan_report.reasons if state.plan_report else {}
    refused = _refused_pins(view, listing, jobs, out)
    found = _place(view, listing, jobs, state.assignment, reasons, refused)
    _allot(view, jobs, found, out)
    out.merge([job_layouts.wishes(view, jobs)])
    for name, element in found.unpinned:
        out.record(state.jobs[name], records.ElementUnpinned(element=element))
    request_actions(view, desk.retries, found.actions, out)
    return out


def _refused_pins(view: View, listing: Listing, jobs: Sequence[JobState], out: Outcome) -> dict[str, set[str]]:
    """Nodes by job on which Slurm does not start an element that is pinned there, which would wait for ever. Each is
    recorded."""
    found: dict[str, set[str]] = {}
    names = {job.job for job in jobs}
    for (name, number), pin in view.state.pins.items():
        e = listing.rows_of(name).get(number) if name in names and pin.at < listing.asked_at else None
        nodes, job = names_of(pin.node), view.state.jobs.get(name)
        if e is None or job is None or e.state != "PENDING":
            continue
        if not pending_reasons.is_told(e, nodes):
            continue  # Slurm's reason is still about the node before
        seconds, refusal = pending_reasons.refusal_seconds(e.reason), e.reason
        # Of several partitions Slurm gives no reason, and where memory for a CPU is not enough it calls the node busy.
        idle = all(node.states == {"IDLE"} for node in map(listing.by_name.get, nodes) if node)
        silent = (refusal == "Resources" and idle) or ("," in e.partition and not refusal)
        if silent and view.now - pin.at > PIN_SECONDS:
            seconds, refusal = SILENT_SECONDS, refusal or "no reason"
        if not seconds:
            continue
        refused = found.setdefault(name, set(view.refused_nodes(job)))
        if refused.issuperset(nodes):
            continue
        refused.update(nodes)
        seconds = seconds if len(nodes) == 1 else min(seconds, REFUSED_BLOCK_SECONDS)
        why = f"Slurm does not start {e.label} on {pin.node}, where it was told to: {refusal}"
        record = records.ElementUnpinned(
            element=number, node=pin.node, said=refusal, until=view.now + seconds, reason=why
        )
        out.record(job, record)
    return found


def _place(
    view: View,
    listing: Listing,
    jobs: Sequence[JobState],
    assignment: Mapping[str, int],
    reasons: Mapping[str, str],
    refused: Mapping[str, Collection[str]] = {},
) -> Placement:
    state, within = view.state, reaches(view, jobs)
    needs = []
    for job in jobs:
        if job.settings.allocation:
            needs.append(_need_of_allocation(view, listing, job, assignment, reasons, within[job.job].nodes))
            continue
        block, rows = job.settings.block, listing.rows_of(job.job).values()
        need = Need(
            job=job.job,
            desired=assignment.get(job.job, 0) // block,
            members=frozenset(map(job.block_of, job.elements({**job.members, **job.joining}))),
            dead=frozenset(map(job.block_of, dead_elements(job, view.now))),
            ended=frozenset(e.element for e in rows if came_to_nothing(job, e)),
            ending=frozenset(e.element for e in rows if ending(job, e)),
            leaving=tuple(map(job.block_of, job.leaving)),
            home=_by_block(job, job.agents.items()),
            lives=_by_block(job, ((e, agent) for e, agent in view.job(job).agents.items() if agent.alive)),
            requeued=job.requeued,
            avoid=view.avoided_nodes(job),
            refused=frozenset(view.refused_nodes(job)).union(refused.get(job.job, ())),
            why=reasons.get(job.job, ""),
            reach=within[job.job].nodes,
            unit=unit_of(view, job) // block,
            least=-(-job.settings.min_nodes // block),
            block=block,
        )
        needs.append(need)
    waiting = state.out_of_service | view.suspicions.nodes().keys()
    domains = view.slurm.domains
    return place(needs, _rows(listing, jobs), listing.nodes, state.pins, waiting, view.now, state.held, domains)


def _rows(listing: Listing, jobs: Sequence[JobState]) -> Sequence[ElementInfo]:
    """Slurm's elements, with an entry for each node of the jobs that are one allocation."""
    split = {job.job: listing.of(job.job).values() for job in jobs if job.settings.allocation}
    whole = [e for e in listing.rows if e.job not in split] if split else listing.rows
    return [*whole, *(e for nodes in split.values() for e in nodes)]


def _need_of_allocation(
    view: View,
    listing: Listing,
    job: JobState,
    assignment: Mapping[str, int],
    reasons: Mapping[str, str],
    reach: frozenset[str],
) -> Need:
    """The need of a job that is one allocation: it gets no nodes, and gives back any but that of its batch script."""
    listed = listing.of(job.job)
    idle = 0 in ended_in_allocation(job)  # its node stays all the same, without counting
    return Need(
        job=job.job,
        desired=assignment.get(job.job, 0),
        members=frozenset(job.elements({**job.members, **job.joining})),
        ending=frozenset({0} if idle else ()),
        leaving=tuple(job.leaving),
        why=reasons.get(job.job, ""),
        reach=reach,
        unit=unit_of(view, job),
        least=job.settings.min_nodes,
        allocation=tuple(name for _, e in sorted(listed.items()) for name in nodes_of(e)),
        stays=frozenset({0} | (listed.keys() - job.agents.keys())),
        empty=frozenset(number for number in listed if _has_ended(view, job, number)),
    )


def _has_ended(view: View, job: JobState, element: int) -> bool:
    """Whether an allocation's element has ended: its agent is gone, and its task with it. A task that Slurm kills would
    make srun fail."""
    record, agent = ended_in_allocation(job).get(element), view.live.agent(job.job, element)
    if record is None:
        return False
    if agent is not None and agent.agent == record.agent and agent.task_status is not None:
        return True
    heard = agent.last_heard if agent is not None else view.started_at
    return view.now - heard > ENDS_SECONDS


def _by_block(job: JobState, agents: Iterable[tuple[int, AgentRecord | AgentView]]) -> dict[int, frozenset[str]]:
    """The agents' nodes by Slurm's element."""
    found: dict[int, frozenset[str]] = {}
    for element, agent in agents:
        block = job.block_of(element)
        found[block] = found.get(block, frozenset()) | {agent.node}
    return found


def keeping(view: View, listing: Listing, jobs: Sequence[JobState], why: str = "") -> Outcome:
    """Leaves all their nodes to jobs that the plan does not change. why: in place of each job's own reason."""
    out = Outcome()
    for job in jobs:
        elements = listing.of(job.job)
        view.slurm.expected[job.job] = sorted(n for n, e in elements.items() if e.state in WORKS)
        if job.allotted is not None and set(job.allotted) != set(elements):  # planned before
            reason = f"{why or why_fixed(view, job)}: all elements may work"
            out.record(job, records.ElementsAllotted(elements=sorted(elements), leaving=[], reason=reason))
    return out


def watching(view: View, desk: Desk, listing: Listing, jobs: Sequence[JobState]) -> Outcome:
    """Leaves all their nodes to jobs whose partition the plan may not touch, and records what the plan would do with
    them, whenever that changes."""
    out = keeping(view, listing, jobs, "the plan is not carried out in its partition")
    found = pools(inputs(view, jobs))
    if (key := key_of(found) if jobs else "") == desk.watched:
        return out
    desk.watched = key
    plan, _ = plan_for(view, found, Aheads())
    for job in jobs:
        nodes, name = plan.assignment[job.job], job.job
        would = f"give {plural(nodes, 'node')} to job {name}"
        why = permission.of_job(view, name).refusal("requeue_hold")
        reason = f"would {would}: {plan.reasons[name]}; not done, for {why}"
        out.record(job, records.ActionObserved(would=would, action="plan", nodes=nodes, reason=reason))
    request_actions(view, desk.retries, _place(view, listing, jobs, plan.assignment, plan.reasons).actions, out)
    return out


def _allot(view: View, jobs: Sequence[JobState], found: Placement, out: Outcome) -> None:
    for job in jobs:
        parts = (found.allotted[job.job], found.leaving[job.job])
        allotted, leaving = ([e for block in part for e in job.nodes_of_block(block)] for part in parts)
        view.slurm.expected[job.job] = allotted
        if job.allotted != allotted or job.leaving != leaving:
            words = f"elements {parts[0]}" + (f", {parts[1]} leave at the next boundary" if leaving else "")
            out.record(job, records.ElementsAllotted(elements=allotted, leaving=leaving, reason=words))
