"""Processes and agents of one job that ended, were replaced, name their own fault, or have corrected something.

Only slots whose status changed (`JobView.changed`) are checked, and closely only the few that do not simply go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from unicron_ctl.controller.model.agent_view import AgentView, Common
from unicron_ctl.controller.model.finding import Finding, Source, What
from unicron_ctl.controller.model.job_state import NO_SLOT, AgentRecord, Identity, JobState, Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.sense.findings import slot_finding
from unicron_ctl.controller.sense.iterations import Standing
from unicron_ctl.shared.protocol.structs import Fault, RankStatus
from unicron_detector.processes.rank_messages import UNSOUND_MICRO_BATCH, UNSOUND_RANK


def take_in_changes(job: JobView, standing: Standing) -> list[int]:
    """Take in common changes, and return the slots that need a closer look. Common are a member's progress, its stop
    after a Break and its way into a plan, and a process that gets ready while the job forms.

    It is one loop, because it runs for every rank in every iteration.
    """
    state = job.state
    if state.phase is Phase.FORMING:
        return [slot for slot in job.changed if not _gets_ready(job, slot)]
    members, lost, agents, awaited = state.members, state.lost, job.agents, job.awaited
    per_node = max(1, state.settings.ranks_per_node)
    breaking, (generation, offered) = state.phase is Phase.BREAKING, _generations(state)
    odd, running, entering = [], [], []
    for slot in job.changed:
        agent, member = agents.get(slot // per_node), members.get(slot)
        status = agent.ranks.get(slot) if agent is not None else None
        if status is None or member is None or slot in lost or not _goes_on(agents[slot // per_node], status, member):
            odd.append(slot)
        elif status.state == "running" and not breaking and status.generation in (generation, offered):
            if status.generation == generation:
                awaited.discard(slot)
            job.stopped.pop(slot, None)
            running.append((slot, status))
        elif status.state == "stopped" and breaking and status.broken >= state.broken:
            awaited.discard(slot)
        elif status.state == "entering" and slot in awaited and _enters(job, status.entering):
            job.stopped.pop(slot, None)
            entering.append(slot)
        else:
            odd.append(slot)
    standing.update_running(running)
    standing.stop_judging(entering)
    return odd


def take_in_nodes(job: JobView, standing: Standing) -> None:
    """Take in common changes of nodes whose ranks stand alike. The others count as changed, slot by slot."""
    usual = _stays_forming if job.state.phase is Phase.FORMING else _take_in_node
    for element in job.together:
        agent = job.agents.get(element)
        if agent is not None and not (agent.common is not None and usual(job, agent, agent.common, standing)):
            job.changed.update(agent.slots)
    job.together.clear()


def _take_in_node(job: JobView, agent: AgentView, common: Common, standing: Standing) -> bool:
    """Take in what :func:`take_in_changes` does for each slot. Return False if one needs a closer look."""
    state, slots, awaited = job.state, agent.slots, job.awaited
    if job.crews.get(agent.element) != (agent.agent, common.incarnation) or not agent.alive:
        return False
    if state.lost and not state.lost.keys().isdisjoint(slots):
        return False
    breaking, generations = state.phase is Phase.BREAKING, _generations(state)
    if common.state == "stopped" and breaking and common.broken >= state.broken:
        awaited.difference_update(slots)
    elif common.state == "running" and not breaking and common.generation in generations:
        if common.generation == generations[0]:
            awaited.difference_update(slots)
        standing.update_running(agent.ranks.items())
    elif common.state == "entering" and awaited.issuperset(slots) and _enters(job, common.entering):
        standing.stop_judging(slots)
    else:
        return False
    for slot in slots if job.stopped and not breaking else ():
        job.stopped.pop(slot, None)
    return True


def _stays_forming(job: JobView, agent: AgentView, common: Common, standing: Standing) -> bool:
    """Whether :func:`_gets_ready` holds for all ranks of the agent."""
    state = job.state
    if common.state not in ("starting", "waiting") or state.members or state.joining or state.banished:
        return False
    wanted = max([state.slots.get(slot, NO_SLOT).wanted for slot in agent.slots])
    return common.incarnation >= wanted and agent.alive and not agent.status.begins


def _generations(job: JobState) -> tuple[int, int]:
    """The generation that the job waits for, and the one in which members run on while it is only offered."""
    plan = job.offer or job.plan
    generation = plan.generation if plan is not None else -1
    return generation, job.plan.generation if job.offer is not None and job.plan is not None else generation


def _enters(job: JobView, generation: int) -> bool:
    """Whether this is the generation of the plan that the job waits for its members to enter."""
    state = job.state
    return state.phase is Phase.ENTERING and state.plan is not None and generation == state.plan.generation


def _gets_ready(job: JobView, slot: int) -> bool:
    """Whether the rank of a forming job is a new process that comes, starts or waits, which calls for nothing yet."""
    state, agent = job.state, job.agents.get(slot // job.per_node)
    if agent is None or slot in state.members or slot in state.joining:
        return False
    status = agent.ranks.get(slot)
    if status is None:
        return True  # its agent has just registered
    if status.state not in ("starting", "waiting") or _reports(status):
        return False
    if status.incarnation < state.slots.get(slot, NO_SLOT).wanted:
        return False
    if state.banished.get(slot) == (agent.agent, status.incarnation):
        return False
    return not agent.expired and not agent.status.leaving and not agent.status.begins  # a world that may be over


def take_in_progress(job: JobView, standing: Standing) -> None:
    """Take in that the ranks of `JobView.going` train on. Nodes of which more is not known count as changed."""
    for element in job.going:
        agent = job.agents.get(element)
        if agent is None:
            continue
        if agent.in_step != job.phases and not _in_step(job, agent):
            job.changed.update(agent.slots)
            continue
        agent.in_step = job.phases
        standing.update_running(agent.ranks.items())
    job.going.clear()


def _in_step(job: JobView, agent: AgentView) -> bool:
    """Whether all ranks of the agent train in the job's generation, and nothing else is to be said of them."""
    state = job.state
    if state.phase is not Phase.RUNNING or state.plan is None or agent.expired or agent.status.leaving:
        return False
    for slot, status in agent.ranks.items():
        member = state.members.get(slot)
        if member is None or slot in state.lost or slot in job.awaited or slot in job.stopped:
            return False
        if status.state != "running" or status.generation != state.plan.generation:
            return False
        if not _goes_on(agent, status, member):
            return False
    return True


def _goes_on(agent: AgentView, status: RankStatus, member: Identity) -> bool:
    """Whether the member is the same process, of a living agent, and has nothing to report."""
    same = status.incarnation == member.incarnation and agent.agent == member.agent
    return same and not _reports(status) and not agent.expired and not agent.status.leaving


def _reports(status: RankStatus) -> bool:
    return status.exit is not None or status.fault is not None or status.note is not None


def check_members(view: View, job: JobView, slots: Iterable[int]) -> Outcome:
    """Report ends of processes, replaced members, and notes of ranks in these slots. Ends of one node's processes that
    are alike are one finding."""
    out, alike = Outcome(), dict[_End, list[int]]()
    there = [(slot, agent, agent.ranks.get(slot)) for slot in sorted(slots) if (agent := job.agent(slot)) is not None]
    for slot, agent, status in there:
        if (end := _find_end(view, job, agent, slot, status)) is not None:
            alike.setdefault(end, []).append(slot)
    ends = {group[0]: (end, group) for end, group in alike.items()}
    for slot, agent, status in there:
        if slot in ends and status is not None:
            out.findings.append(_end_finding(view, job, status, *ends[slot]))
        for find in (_find_replaced, _find_note):
            finding = find(view, job, agent, slot, status)
            if finding is not None:
                out.findings.append(finding)
    return out


class _End(NamedTuple):
    """The end of a process. Two of one agent that are equal are judged as one."""

    what: What
    identity: Identity
    code: int
    oom: bool
    last_line: str
    quick: bool
    """Whether it came soon after the start of the process."""
    fault_of: int
    """The slot of a process that names its fault: that one is judged alone. -1 for any other."""


def _find_end(view: View, job: JobView, agent: AgentView, slot: int, status: RankStatus | None) -> _End | None:
    end = status.end if status is not None else None
    if status is None or end is None or agent.status.leaving:
        return None
    identity = Identity(agent.agent, status.incarnation)
    if job.state.slot(slot).exit_seen == identity:
        return None
    wanted = end.code == 0 or _is_wanted(view, job, agent, slot, identity)
    what, quick = What.WANTED_END if wanted else What.EXIT, view.state.history.policy.quick_seconds
    fault_of = slot if status.fault is not None else -1
    return _End(what, identity, end.code, end.oom, end.last_line, end.lived <= quick, fault_of)


def _end_finding(view: View, job: JobView, status: RankStatus, found: _End, slots: list[int]) -> Finding:
    """Return the finding about alike ends. status: that of the first of these slots."""
    fault = (status.fault.cause or f"{status.fault.type}: {status.fault.text}") if status.fault else ""
    evidence = "\n".join(part for part in dict.fromkeys((fault, found.last_line)) if part)
    source, by = (Source.AGENT, "process exit") if status.exit else (Source.RANK, "exception")
    details = {"identity": found.identity, "exit": status.end, "fault": status.fault, "pid": status.pid}
    return slot_finding(view, job, found.what, tuple(slots), source, evidence, by, **details)


def apart(job: JobView, finding: Finding) -> list[Finding]:
    """Split a finding about alike ends into one for each process."""
    found = ((slot, job.status(slot)) for slot in finding.slots)
    return [
        replace(finding, slots=(slot,), exit=status.end, pid=status.pid, iteration=status.iteration)
        for slot, status in found
        if status is not None and status.end is not None
    ]


def _is_wanted(view: View, job: JobView, agent: AgentView, slot: int, identity: Identity) -> bool:
    state = job.state
    record = state.agents.get(agent.element)
    return (
        state.banished.get(slot) == identity
        or state.slot(slot).wanted > identity.incarnation
        or agent.status.noticed
        or taken_away(state, agent.element)
        or ended_with_block(state, agent.element)
        or (record is not None and given_up(view, state, record))
    )


def taken_away(job: JobState, element: int) -> bool:
    """Whether the element's end is wanted: the plan has taken its node, or it was asked to end and has left. A member
    that is neither allotted nor leaving was ended by Slurm."""
    planned = job.allotted is None or element in job.allotted or element in job.leaving
    return (not planned or element in job.noticed) and not _trains(job, element)


def ended_with_block(job: JobState, element: int) -> bool:
    """Whether Slurm ends the element because its block lost another node, and the job went on without it."""
    return job.torn(element) and not _trains(job, element)


def _trains(job: JobState, element: int) -> bool:
    per_node = max(1, job.settings.ranks_per_node)
    mine = range(element * per_node, (element + 1) * per_node)
    return any(slot in job.members and slot not in job.lost for slot in mine)


def given_up(view: View, job: JobState, agent: AgentRecord) -> bool:
    """Whether the job went on without the agent after its node was taken out of service or left: its end is no news."""
    mark = job.avoid.get(agent.node)
    if not view.unfit(agent.node) and (mark is None or mark.agent != agent.agent):
        return False
    return not any((s in job.members or s in job.joining) and s not in job.lost for s in agent.slots)


def _find_replaced(view: View, job: JobView, agent: AgentView, slot: int, status: RankStatus | None) -> Finding | None:
    state = job.state
    member = state.members.get(slot) or state.joining.get(slot)
    if member is None or slot in state.lost or slot in state.condemned:
        return None
    why, what, by = "", What.REPLACED, "status"
    if agent.agent != member.agent:
        why = "was replaced: its element was started again"
    elif status is None or status.state == "finished" or not agent.alive:
        return None
    elif status.incarnation != member.incarnation:
        why = "was started again"
    elif status.state == "left" and slot in state.members and state.phase is not Phase.OFFERING:
        why = "left"
    elif state.phase is Phase.BREAKING and status.state == "stopped" and status.fault is not None:
        why, what, by = f"stopped: {status.fault.type}: {status.fault.text}", What.BROKEN, "exception"
    if not why:
        return None
    source = Source.RANK if what is What.BROKEN else Source.AGENT
    fault = status.fault if status else None
    return slot_finding(view, job, what, (slot,), source, why, by, identity=member, fault=fault)


def _find_note(view: View, job: JobView, agent: AgentView, slot: int, status: RankStatus | None) -> Finding | None:
    note = status.note if status is not None else None
    if note is None or note.at <= job.state.slot(slot).noted or is_known(job.state, note):
        return None
    by = "recomputation" if note.type in (UNSOUND_MICRO_BATCH, UNSOUND_RANK) else "checksum"
    return slot_finding(view, job, What.NOTE, (slot,), Source.RANK, note.text, by, fault=note, iteration=note.iteration)


def is_known(job: JobState, note: Fault) -> bool:
    """Whether the same was noted by another rank: all that have computed something again may say so."""
    if note.iteration is None:
        return False
    slots = [] if note.culprit is None else [note.culprit]
    what = note.iteration, note.micro_batch, slots
    return any(
        known.noted is not None and (known.iteration, _index(known.micro_batch), known.slots) == what
        for known in (failure.record for failure in job.failures)
    )


def _index(micro_batch: tuple[int, int] | None) -> int | None:
    return micro_batch[1] if micro_batch is not None else None


def check_leaving(view: View, job: JobView, agent: AgentView | None) -> Outcome:
    """Report an agent that announces its end, because its ranks finished or Slurm stopped it, unless that is known."""
    out, record = Outcome(), job.state.agents.get(agent.element) if agent is not None else None
    if agent is not None and record is not None and not record.gone and record.agent == agent.agent:
        name, slots, text = job.state.job, tuple(agent.slots), agent.status.leaving
        out.findings.append(
            Finding(What.LEFT, name, slots, view.now, Source.AGENT, text, agent.element, agent.node, by="agent")
        )
    return out


def check_missed(view: View, job: JobView, before: AgentRecord | None) -> Outcome:
    """Report members whose agent has been replaced before it reported why the others went on without them."""
    out, state = Outcome(), job.state
    if before is None or before.gone:
        return out
    missed = {slot: at for slot, (agent, at) in job.missed.items() if agent == before.agent}
    later = (f for f in state.failures if f.detected_at >= max(missed.values(), default=0.0))
    if missed and not any(not missed.keys().isdisjoint(f.record.slots) for f in later):
        out.findings.append(missed_finding(view, job, list(missed), before.node))
    return out


def missed_finding(view: View, job: JobView, slots: list[int], node: str) -> Finding:
    """Report that the others went on without these slots while this controller was away."""
    evidence = f"the job's agents went on without slots {slots} while this controller was away"
    element = job.state.element(slots[0])
    return Finding(
        What.MISSED, job.state.job, tuple(slots), view.now, Source.PEER, evidence, element, node, by="agreement"
    )
