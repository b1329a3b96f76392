"""Leases of agents: who has fallen silent, and what is done about it (docs/design/silence.md).

Silence is not death. A silent agent is suspected: other agents and the controller's own sockets probe it. Its node
counts as lost on two independent kinds of evidence, the lease and either witnesses or Slurm (:mod:`verdict`). Ranks
that step together are alive: as long as their job's iterations end, none of its members is silent.

Living agents stand in the order of their last word (`Live.leases`), so a tick looks only at those that are late.
"""

from __future__ import annotations

from collections.abc import Iterator

from unicron_ctl.controller.failure_detector import ending_nodes, probes, quorum, self_suspicion
from unicron_ctl.controller.failure_detector.probes import ANSWER_SECONDS, ROUND_SECONDS, Tick
from unicron_ctl.controller.failure_detector.verdict import BY_LEASE, Evidence, judge_silence
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.finding import What
from unicron_ctl.controller.model.job_state import NODE_ENDED, AgentRecord, JobState, Phase
from unicron_ctl.controller.model.requests import Probe
from unicron_ctl.controller.model.suspicion import Suspicion
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.shared.log import records

MISSING_SECONDS = 0.5  # between two looks for agents that have not come back to a restarted controller


def check_leases(view: View) -> Outcome:
    """Opens suspicions, probes, and reports what they came to. Called at every tick; it changes `view.suspicions`."""
    out, tick, suspicions = Outcome(), Tick(view), view.suspicions
    self_suspicion.check_alone(view, out)
    if not suspicions.recalled and view.now - view.started_at > view.config.restart_grace:
        suspicions.recalled = True
        _recall_given_up(view, out)
    ending_nodes.check_ending_nodes(view, tick, out)
    for suspicion in list(_new_suspicions(view)):
        suspicions.open[suspicion.key] = suspicion
    for suspicion in list(suspicions.open.values()):
        if _still_silent(view, suspicion):
            _check_suspicion(view, tick, suspicion, out)
        else:
            suspicions.close(suspicion.key)
    self_suspicion.check_most_silent(view, probes.late_after(view), out)
    return out


def _check_suspicion(view: View, tick: Tick, suspicion: Suspicion, out: Outcome) -> None:
    suspicions = view.suspicions
    if not view.alone:
        late = suspicion.since + probes.late_after(view)
        early = bool(suspicion.number) and suspicion.begun <= late < view.now
        if early:  # what was silent before its word was late may have stopped for a moment only
            suspicion.probing = 0
        if early or not suspicion.number or view.now - suspicion.begun > ROUND_SECONDS:
            suspicions.begin_round(suspicion, view.now)
        probes.send_probes(view, tick, suspicion, out)
    evidence = Evidence(view, tick, suspicion)
    finding = judge_silence(evidence)
    if finding is None:
        _record_doubt(evidence, out)
        return
    out.findings.append(finding)
    suspicions.close(suspicion.key)
    if finding.by.startswith(BY_LEASE) and not finding.dead:
        suspicions.given_up[suspicion.key] = suspicion
    if finding.what is What.AGENT_DIED and not finding.answers:
        ending_nodes.open_ending_node(view, suspicion)


# ---------------------------------------------------------------- who is silent
def late_agents(view: View) -> list[AgentView]:
    """Living agents whose next word is late, the longest silent first."""
    found: list[AgentView] = []
    for agent in view.live.leases.values():
        if view.now - agent.last_heard <= probes.late_after(view):
            break  # all others have spoken later than this one
        found.append(agent)
    return found


def _new_suspicions(view: View) -> Iterator[Suspicion]:
    """Agents that are late, those whose tasks ended by the word of Slurm or its plugin, and those in the log that have
    not spoken since this controller's start."""
    suspicions = view.suspicions
    for agent in late_agents(view):
        known = (agent.job, agent.element) in suspicions.open
        if not known and view.now - sign_of_life(view, agent) > probes.late_after(view):
            yield _suspicion(view, agent)
    for key, suspect in view.live.suspects.items():
        if key not in suspicions.open:
            yield _suspicion(view, suspect)
    if view.now - view.started_at > view.config.restart_grace and view.now >= suspicions.missing_check_at:
        suspicions.missing_check_at = view.now + MISSING_SECONDS
        for job in view.state.jobs.values():
            yield from _missing(view, job)


def _suspicion(view: View, agent: AgentView) -> Suspicion:
    since, targets = sign_of_life(view, agent), probes.targets(view, agent.node, agent.door)
    return Suspicion(agent.job, agent.element, agent.agent, agent.node, since, targets)


def _missing(view: View, job: JobState) -> Iterator[Suspicion]:
    """Agents of the job that have not come back since this controller's start."""
    live = view.job(job)
    for element, record in job.agents.items() if not job.over else ():
        open_already = (job.job, element) in view.suspicions.open
        if element in live.agents or open_already or (record.gone and not _needed_again(job, record)):
            continue
        targets = probes.targets(view, record.node, record.door)
        yield Suspicion(job.job, element, record.agent, record.node, view.started_at, targets)


def _needed_again(job: JobState, record: AgentRecord) -> bool:
    """Restart mode: a world that breaks needs the agents again whose ranks had ended well."""
    again = not job.mode.finishes_alone and job.phase is Phase.BREAKING and record.gone == "finished"
    return again and any(s in job.members and s not in job.lost and s not in job.condemned for s in record.slots)


def _recall_given_up(view: View, out: Outcome) -> None:
    """Takes up agents that an earlier controller gave up as silent and that have not come back.

    They count for self-suspicion as if they had been heard at this controller's start.
    """
    for job in view.state.jobs.values():
        for element, record in job.agents.items() if not job.over else ():
            if record.gone not in ("silent", NODE_ENDED) or view.unfit(record.node) or element in view.job(job).agents:
                continue
            targets = probes.targets(view, record.node, record.door)
            suspicion = Suspicion(job.job, element, record.agent, record.node, view.started_at, targets)
            suspicion.probing = sum(map(bool, targets))
            view.suspicions.given_up[suspicion.key] = suspicion
            if suspicion.probing:
                out.requests.append(Probe(job.job, element, record.node, targets, suspicion.number))


def sign_of_life(view: View, agent: AgentView) -> float:
    """When the agent, or a collective that needs its ranks, last showed that it lives."""
    job = view.state.jobs.get(agent.job)
    if job is None or job.phase not in (Phase.RUNNING, Phase.OFFERING):
        return agent.last_heard
    inside = any(slot in job.members and slot not in job.condemned for slot in agent.slots)
    return max(agent.last_heard, view.job(job).stepped.before) if inside else agent.last_heard


def _still_silent(view: View, suspicion: Suspicion) -> bool:
    agent, job = view.live.agent(*suspicion.key), view.state.jobs.get(suspicion.job)
    record = job.agents.get(suspicion.element) if job is not None and not job.over else None
    if record is None or record.agent != suspicion.agent:
        return False
    if agent is None:
        return True
    return agent.agent == suspicion.agent and agent.alive and sign_of_life(view, agent) <= suspicion.since


def _record_doubt(evidence: Evidence, out: Outcome) -> None:
    """Puts on record, once, why a silent agent is not taken for lost."""
    view, suspicion = evidence.view, evidence.suspicion
    if not evidence.lease_over:
        return
    why = "it lives: others reach it" if evidence.reached else ""
    witnessed = suspicion.witnessed() if view.now - suspicion.begun > ANSWER_SECONDS / 2 else []
    if not why and (witnessed or evidence.slurm) and not evidence.no_majority_missing:
        command = quorum.declare_dead_command(view, suspicion.node)
        why = (
            "more of its job is silent than is heard: they may go on by themselves. Where they are dead, say so: "
            f"{command}"
        )
    if why and why != suspicion.recorded:
        suspicion.recorded = why
        answers = "; ".join(map(str, evidence.reached or suspicion.witnessed()))
        who = f"{view.state.jobs[suspicion.job].label(suspicion.element)} on {suspicion.node}"
        reason = f"no message from {who}, which is not taken for lost: {why}" + (f" ({answers})" if answers else "")
        record = records.Silence(element=suspicion.element, node=suspicion.node, reason=reason)
        out.record(view.state.jobs[suspicion.job], record)
