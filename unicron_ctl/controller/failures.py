"""Detection on the controller's side: exits, silent agents, agents that leave; what each means, and what is done
about the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from detector.escalation import END_JOB as END
from detector.escalation import ISOLATE, REATTEMPT, RESTART, Decision, as_fault
from detector.escalation import decide as escalate
from detector.severity import Severity, Verdict
from unicron_ctl.controller import collectives, peers, restarting
from unicron_ctl.controller.machine import Event as Happening
from unicron_ctl.controller.signals import Signal
from unicron_ctl.controller.soft import AgentView
from unicron_ctl.controller.state import AgentRecord, Identity, JobState
from unicron_ctl.protocol.wire import Exit, RankStatus

if TYPE_CHECKING:
    from unicron_ctl.controller.engine import Engine
    from unicron_ctl.controller.monitoring import Suspect

DEFAULT_EXIT = 1


# ---------------------------------------------------------------- judging
def judge(
    engine: Engine, job: JobState, slot: int, verdict: Verdict, uptime: float | None
) -> tuple[Decision, dict[str, Any]]:
    """What is to be done about a verdict on a slot, by the escalation table; and its memory for the event log."""
    worked = job.slot(slot).worked is not None and job.slot(slot).worked == _identity(engine, job, slot)
    node = job.node(slot)
    decision = escalate(
        engine.state.history,
        verdict,
        engine.now,
        job=job.job,
        slot=slot,
        node=node,
        uptime=uptime,
        worked=worked,
        job_nodes=max(1, len(job.agents)),
    )
    fault = as_fault(verdict, engine.now, job=job.job, slot=slot, node=node, uptime=uptime, worked=worked)
    memory = {
        "scope": fault.scope,
        "severity": int(fault.severity),
        "uptime": uptime,
        "worked": worked,
        "event": decision.event.value,
        "state": decision.state.value,
    }
    return decision, memory


def record(
    engine: Engine,
    job: JobState,
    kind: str,
    slots: list[int],
    verdict: Verdict,
    decision: Decision,
    by: str,
    **more: Any,
) -> int:
    """Records a failure; returns its id."""
    element = job.element(slots[0]) if slots else more.get("element", -1)
    agent = job.agents.get(element)
    more.setdefault("element", element)
    more.setdefault("node", agent.node if agent else "")
    member = any(slot in job.members or slot in job.joining for slot in slots)
    member = more.pop("member", member)
    event = engine.emit(
        "failure_detected",
        job.job,
        job.generation,
        kind_of_failure=kind,
        slots=slots,
        severity=int(decision.severity),
        cause=verdict.cause,
        action=decision.action,
        reason=decision.reason + peers.evidence(engine, more["node"]),
        detected_by=by,
        member=member,
        **more,
    )
    return event.id


def _identity(engine: Engine, job: JobState, slot: int) -> Identity | None:
    return engine.view(job).identity(slot)


# ---------------------------------------------------------------- exits
def exits(engine: Engine, job: JobState) -> None:
    """Processes that ended since the last look."""
    if job.ended:
        return
    for view, slot, status in list(engine.view(job).all_ranks()):
        identity = Identity(view.agent, status.incarnation)
        end = status.end
        if end is None or view.left or job.slot(slot).exit_seen == identity:
            continue
        planned = (
            (slot, identity) in job.banished
            or job.slot(slot).wanted > status.incarnation
            or taken_away(job, view.element)
            or given_up(engine, job, job.agents[view.element])
        )
        if end.code == 0 or planned:
            engine.emit(
                "exit_noted",
                job.job,
                slot=slot,
                agent=identity.agent,
                incarnation=identity.incarnation,
                code=end.code,
            )
        else:
            _died(engine, job, view, slot, status, end)
        if job.ended:
            return


def taken_away(job: JobState, element: int) -> bool:
    """The plan has taken the element's node: its end is wanted. A member that is neither allotted nor leaving is one
    that Slurm has ended."""
    if job.allotted is None or element in job.allotted or element in job.leaving:
        return False
    return not any(job.element(slot) == element for slot in job.members if slot not in job.lost)


def given_up(engine: Engine, job: JobState, agent: AgentRecord) -> bool:
    """The node was put aside and the job went on without it: what ends there is no news."""
    inside = {*job.members, *job.joining} - set(job.lost)
    return agent.node in engine.cluster.put_aside() and not inside & set(agent.slots)


def _died(engine: Engine, job: JobState, view: AgentView, slot: int, status: RankStatus, end: Exit) -> None:
    config, known = engine.config, job.slot(slot)
    text = f"{status.fault.type}: {status.fault.text}" if status.fault else ""
    verdict = engine.classifier.exit(end.code, "\n".join(part for part in (text, end.last_line) if part), end.oom)
    verdict = engine.node_events.note(view, end.code, end.at, status.pid, verdict)
    verdict = restarting.reading(job, verdict, end)
    decision, memory = restarting.consequence(engine, job, verdict, end), None
    if decision is None:
        decision, memory = judge(engine, job, slot, verdict, end.lived)
    identity = Identity(view.agent, status.incarnation)
    quick = known.quick_deaths + 1 if known.ready != identity and end.lived <= config.quick_death_seconds else 0
    if memory is None:
        quick = known.quick_deaths  # it was not its own doing
    action, reason = decision.action, decision.reason
    if quick >= config.quick_deaths and action == RESTART:
        action = END
        died = f"slot {slot} died {quick} times within {config.quick_death_seconds:g} s of its start"
        reason = f"{died} and was never ready: the script itself fails"
    decision = Decision(
        decision.severity, action, reason, decision.cause, decision.event, decision.state, decision.wait_seconds
    )
    failure = record(
        engine,
        job,
        "rank",
        [slot],
        verdict,
        decision,
        "process exit" if status.exit else "exception",
        exit_code=end.code,
        pid=status.pid,
        last_line=end.last_line,
        lived=end.lived,
        fault_at=status.fault.at if status.fault else None,
        escalation=memory,
        iteration=status.iteration,
        exits=[{"slot": slot, "agent": identity.agent, "incarnation": identity.incarnation, "quick_deaths": quick}],
    )
    if action == END:
        code = end.code if 0 < end.code < 256 else DEFAULT_EXIT
        last = end.last_line or text
        engine.drive(job, Signal(Happening.FAILED, reason + (f"; last line: {last}" if last else ""), code=code))
    elif engine.config.observe:
        return
    elif action == ISOLATE and engine.cluster.isolate(job, view, failure, reason):
        return
    else:
        start(
            engine,
            job,
            slot,
            status.incarnation + 1,
            engine.now + decision.wait_seconds,
            f"exited with {end.code}: {verdict.cause}" if status.exit else f"ends by an exception: {verdict.cause}",
            failure,
        )


def start(
    engine: Engine, job: JobState, slot: int, incarnation: int, at: float, why: str, failure: int | None = None
) -> None:
    """Orders a new process in the slot, unless a newer one is ordered already."""
    if job.slot(slot).wanted >= incarnation or engine.config.observe:
        return
    engine.emit("rank_start", job.job, job.generation, slot=slot, incarnation=incarnation, not_before=at, reason=why)
    if failure is not None:
        wait = f" in {at - engine.now:.0f} s" if at > engine.now else ""
        engine.emit("failure_action", job.job, failure=failure, text=f"restart slot {slot} in place{wait}")


# ---------------------------------------------------------------- members that are declared lost
def of_signal(engine: Engine, job: JobState, signal: Signal, by: str) -> set[int]:
    """Records what a LOSS, FAULT or TIMEOUT says of slots of which no failure is on record; returns the lost slots."""
    if reason := collectives.reported(engine, job, signal):
        return collectives.judge(engine, job, reason, by)
    lost: set[int] = set()
    view = engine.view(job)
    for slot, why in sorted(signal.slots.items()):
        status, identity = view.status(slot), job.members.get(slot) or job.joining.get(slot)
        if signal.event is Happening.LOSS and _on_record(job, slot):
            lost.add(slot)
            continue
        if status is not None and status.fault is not None and status.state == "stopped":
            verdict = engine.classifier.text(f"{status.fault.type}: {status.fault.text}")
            if (
                signal.event is Happening.FAULT
                and engine.classifier.match(f"{status.fault.type}: {status.fault.text}") is None
            ):
                verdict = engine.classifier.cause(
                    "other_network_error",
                    "stopped in a collective by an error that no rule knows; tried again in place",
                )
            kind, by = "exception", "exception"
        else:
            verdict = engine.classifier.cause(
                "task_hang" if signal.event is not Happening.FAULT else "other_network_error", why
            )
            kind = "hang" if status is not None and status.state != "exited" else "rank"
        if signal.event is Happening.FAULT:
            verdict = engine.node_events.links(job, job.node(slot), verdict)
        decision, memory = judge(engine, job, slot, verdict, None)
        gone = signal.event is not Happening.FAULT or decision.action not in (REATTEMPT, "report")
        failure = record(
            engine,
            job,
            kind,
            [slot],
            verdict,
            decision,
            by,
            escalation=memory,
            iteration=status.iteration if status else None,
        )
        if gone:
            lost.add(slot)
            agent = engine.agents.get((job.job, job.element(slot)))
            if decision.action == ISOLATE and agent is not None and agent.alive:
                engine.cluster.isolate(job, agent, failure, decision.reason)
            if decision.action == END:
                engine.drive(job, Signal(Happening.FAILED, decision.reason, code=DEFAULT_EXIT))
                return lost
            if identity is not None:
                engine.emit("failure_action", job.job, failure=failure, text=f"slot {slot} is left out: {why}")
    return lost


def notes(engine: Engine, job: JobState) -> None:
    """What ranks have put right by themselves: it goes on record, nothing has to be done."""
    for _, slot, status in engine.view(job).all_ranks():
        note = status.note
        if note is None or note.at <= job.slot(slot).noted:
            continue
        verdict = engine.classifier.text(f"{note.type}: {note.text}")
        decision = Decision(verdict.severity, REATTEMPT, note.text, verdict.cause)
        failure = record(engine, job, "transfer", [slot], verdict, decision, "checksum", noted=note.at, member=False)
        engine.emit("failure_action", job.job, failure=failure, text="nothing was trained with it")


# ---------------------------------------------------------------- iterations that do not end
def hang(engine: Engine, job: JobState, slot: int, reason: str) -> tuple[int, Decision]:
    """Records that the others wait for this rank; returns the failure's id and what is to be done."""
    verdict = engine.classifier.cause("task_hang", reason)
    decision, memory = judge(engine, job, slot, verdict, None)
    status = engine.view(job).status(slot)
    iteration = status.iteration if status else None
    failure = record(
        engine, job, "hang", [slot], verdict, decision, "statistics", escalation=memory, iteration=iteration
    )
    return failure, decision


def stop_hanging(engine: Engine, job: JobState, suspects: Sequence[Suspect]) -> None:
    """The generation is over for those who hang: nobody waits for their end, which a stuck kernel could put off for
    ever."""
    lost: dict[int, str] = {}
    for suspect in suspects:
        if job.members.get(suspect.slot) != suspect.identity or job.ended:
            continue
        agent = engine.agents.get((job.job, job.element(suspect.slot)))
        if suspect.action == END:
            engine.drive(job, Signal(Happening.FAILED, suspect.reason, code=DEFAULT_EXIT))
            return
        isolated = suspect.action == ISOLATE and agent is not None
        if not (isolated and engine.cluster.isolate(job, agent, suspect.failure, suspect.reason)):
            at = engine.now + suspect.wait
            start(engine, job, suspect.slot, suspect.identity.incarnation + 1, at, "hangs", suspect.failure)
        lost[suspect.slot] = "hangs"
    if lost:
        engine.drive(job, Signal(Happening.LOSS, "; ".join(s.reason for s in suspects if s.slot in lost), lost))


def _on_record(job: JobState, slot: int) -> bool:
    """A failure that has not been dealt with names the slot."""
    return any(
        slot in failure["slots"] and failure["member"] and failure["planned_at"] is None for failure in job.failures
    )


def revive(engine: Engine, job: JobState) -> None:
    """Processes that a plan went on without, and that live: they hold old state, so they are started anew."""
    if job.ended or engine.config.observe:
        return
    for view, slot, status in engine.view(job).all_ranks():
        if (
            not view.alive
            or taken_away(job, view.element)
            or view.element in job.leaving
            or view.node in engine.cluster.put_aside()
        ):
            continue
        identity = Identity(view.agent, status.incarnation)
        banished = (slot, identity) in job.banished
        if (banished and status.state != "finished") or (
            status.state == "left" and slot not in job.members and job.phase == "running"
        ):
            why = "was declared lost" if banished else "was left out before"
            start(engine, job, slot, status.incarnation + 1, max(engine.now, job.slot(slot).not_before), why)


# ---------------------------------------------------------------- agents
def leases(engine: Engine, job: JobState) -> None:
    """Agents that have been silent for too long."""
    config = engine.config
    for element, agent in list(job.agents.items()):
        view = engine.agents.get((job.job, element))
        if agent.gone:
            continue
        if view is None:
            silent = engine.now - engine.started_at
            if silent > config.restart_grace:
                _silent(engine, job, element, silent, "lease after the controller's restart")
        elif view.alive:
            silent = engine.now - view.last_heard
            if silent > config.lease:
                view.expired = True
                _silent(engine, job, element, silent, "lease")
            elif view.suspect_since is not None and engine.now - view.suspect_since > config.hint_grace:
                view.expired = True
                _silent(engine, job, element, engine.now - view.suspect_since, "task exit in Slurm")


def _silent(engine: Engine, job: JobState, element: int, seconds: float, by: str) -> None:
    agent = job.agents[element]
    view = engine.view(job)
    put_aside = given_up(engine, job, agent)
    if taken_away(job, element) or put_aside or all(view.finished(slot) for slot in agent.slots):
        engine.emit(
            "agent_gone",
            job.job,
            element=element,
            agent=agent.agent,
            reason="taken away" if taken_away(job, element) else "put aside" if put_aside else "finished",
        )
        return
    verdict = engine.classifier.cause("lost_connection", f"no message from {agent.node} for {seconds:.2f} s")
    decision = Decision(Severity.SEV1, ISOLATE, f"{verdict.reason} ({by})", verdict.cause)
    members = [slot for slot in agent.slots if slot in job.members or slot in job.joining]
    failure = record(
        engine, job, "node", members or agent.slots, verdict, decision, by, element=element, node=agent.node
    )
    engine.emit("agent_gone", job.job, element=element, agent=agent.agent, reason="silent")
    engine.cluster.probe(job, element, agent, failure)


def on_leaving(engine: Engine, job: JobState, view: AgentView, reason: str) -> None:
    """An agent says that it ends by itself: its ranks finished, or Slurm stopped it."""
    agent = job.agents.get(view.element)
    if agent is None or agent.gone or agent.agent != view.agent:
        return
    finished = all(engine.view(job).finished(slot) for slot in agent.slots)
    if not finished and not taken_away(job, view.element) and not given_up(engine, job, agent):
        verdict = engine.classifier.cause("killed_from_outside", f"the agent on {view.node} ended: {reason}")
        decision = Decision(
            Severity.SEV2, "wait", f"{verdict.reason}; what becomes of its element is Slurm's to say", verdict.cause
        )
        members = [slot for slot in agent.slots if slot in job.members or slot in job.joining]
        record(
            engine,
            job,
            "agent",
            members or agent.slots,
            verdict,
            decision,
            "agent",
            element=view.element,
            node=view.node,
        )
    engine.emit(
        "agent_gone", job.job, element=view.element, agent=view.agent, reason="finished" if finished else reason
    )
    engine.cluster.hurry()
