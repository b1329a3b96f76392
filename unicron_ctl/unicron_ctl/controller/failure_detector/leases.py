"""Leases of agents: silent agents are suspected and probed, and a table of evidence judges them.

Silence alone is not death: a node is lost only on the lease and either witnesses or Slurm (docs/design/silence.md).
While a job's iterations end, none of its members is silent. Living agents stand in the order of their last word
(`Live.leases`), so a tick looks only at those that are late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from msgspec.structs import replace

from unicron_ctl.controller.failure_detector import ending_nodes, probes, quorum, self_suspicion
from unicron_ctl.controller.failure_detector.probes import ANSWER_SECONDS, ROUND_SECONDS, Tick
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.finding import Finding, Source, What
from unicron_ctl.controller.model.job_state import NODE_ENDED, AgentRecord, JobState, Phase
from unicron_ctl.controller.model.requests import Probe
from unicron_ctl.controller.model.suspicion import OWN, Answer, Suspicion
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol.reach import Reach

MISSING_SECONDS = 0.5  # between two checks for agents that have not come back to a restarted controller
PORT_CLOSED = "its port is closed"
BY_LEASE = "lease and "  # begins `Finding.by` if silence is one of the two kinds of evidence


def check_leases(view: View) -> Outcome:
    """Open suspicions, probe, and report conclusions. Called at every tick; it changes `view.suspicions`."""
    out, tick, suspicions = Outcome(), Tick(view), view.suspicions
    self_suspicion.check_alone(view, out)
    if not suspicions.recalled and view.now - view.started_at > view.config.restart_grace:
        suspicions.recalled = True
        _recall_given_up(view, out)
    ending_nodes.check_ending_nodes(tick, out)
    for suspicion in list(_new_suspicions(view)):
        suspicions.open[suspicion.key] = suspicion
    for suspicion in list(suspicions.open.values()):
        if _still_silent(view, suspicion):
            _check_suspicion(tick, suspicion, out)
        else:
            suspicions.close(suspicion.key)
    self_suspicion.check_most_silent(view, probes.late_after(view), out)
    return out


def _check_suspicion(tick: Tick, suspicion: Suspicion, out: Outcome) -> None:
    view, suspicions = tick.view, tick.view.suspicions
    if not view.alone:
        late = suspicion.since + probes.late_after(view)
        early = bool(suspicion.number) and suspicion.begun <= late < view.now
        if early:  # answers from before its next word was late do not count: it may have paused for a moment
            suspicion.probing = 0
        if early or not suspicion.number or view.now - suspicion.begun > ROUND_SECONDS:
            suspicions.begin_round(suspicion, view.now)
        probes.send_probes(tick, suspicion, out)
    evidence = Evidence(tick, suspicion)
    finding = evidence.judge()
    if finding is None:
        _record_doubt(evidence, out)
        return
    out.findings.append(finding)
    suspicions.close(suspicion.key)
    if finding.by.startswith(BY_LEASE) and not finding.dead:
        suspicions.given_up[suspicion.key] = suspicion
    if finding.what is What.AGENT_DIED and not finding.answers:
        ending_nodes.open_ending_node(view, suspicion)


# ---------------------------------------------------------------- which agents are silent
def late_agents(view: View) -> list[AgentView]:
    """Return the living agents whose next word is late, the longest silent first."""
    found: list[AgentView] = []
    for agent in view.live.leases.values():
        if view.now - agent.last_heard <= probes.late_after(view):
            break  # all others have spoken later than this one
        found.append(agent)
    return found


def _new_suspicions(view: View) -> Iterator[Suspicion]:
    """Yield new suspicions: agents that are late, agents whose tasks ended according to Slurm or its plugin, and agents
    in the log that have not spoken since this controller's start."""
    suspicions = view.suspicions
    late = (agent for agent in late_agents(view) if view.now - sign_of_life(view, agent) > probes.late_after(view))
    for agent in (*late, *view.live.suspects.values()):
        if (agent.job, agent.element) not in suspicions.open:
            yield _suspicion(view, agent.job, agent.element, agent, sign_of_life(view, agent))
    if view.now - view.started_at > view.config.restart_grace and view.now >= suspicions.missing_check_at:
        suspicions.missing_check_at = view.now + MISSING_SECONDS
        for job, element, record in view.known_agents():
            gone = record.gone and not _needed_again(job, record)
            if not gone and element not in view.job(job).agents and (job.job, element) not in suspicions.open:
                yield _suspicion(view, job.job, element, record, view.started_at)


def _suspicion(view: View, job: str, element: int, agent: AgentView | AgentRecord, since: float) -> Suspicion:
    targets = probes.targets(view, agent.node, agent.door)
    return Suspicion(job, element, agent.agent, agent.node, since, targets)


def _needed_again(job: JobState, record: AgentRecord) -> bool:
    """In restart mode, a world that breaks needs the agents again whose ranks had finished."""
    again = not job.mode.finishes_alone and job.phase is Phase.BREAKING and record.gone == "finished"
    return again and any(s in job.members and s not in job.lost and s not in job.condemned for s in record.slots)


def _recall_given_up(view: View, out: Outcome) -> None:
    """Recall agents that the previous controller gave up as silent and that have not come back.

    Self-suspicion counts them as last heard at this controller's start.
    """
    for job, element, record in view.known_agents():
        if record.gone not in ("silent", NODE_ENDED) or view.unfit(record.node) or element in view.job(job).agents:
            continue
        suspicion = _suspicion(view, job.job, element, record, view.started_at)
        suspicion.probing = sum(map(bool, suspicion.targets))
        view.suspicions.given_up[suspicion.key] = suspicion
        if suspicion.probing:
            out.requests.append(Probe(job.job, element, record.node, suspicion.targets, suspicion.number))


def sign_of_life(view: View, agent: AgentView) -> float:
    """Return when the agent, or a collective that needs its ranks, last showed that it lives."""
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


# ---------------------------------------------------------------- the evidence about one of them
@dataclass
class Evidence:
    """The evidence about one silent agent at one tick, from its suspicion, its job and Slurm."""

    tick: Tick
    suspicion: Suspicion

    def __post_init__(self) -> None:
        self.view = self.tick.view
        self.silent_seconds = self.view.now - self.suspicion.since
        self.answers = list(self.suspicion.answers.values())

    def judge(self) -> Finding | None:
        """Return the conclusion of the first row that holds; None while nothing follows."""
        row = next((row for row in VERDICTS if row.holds(self)), None)
        return row.finding(self) if row is not None and row.finding is not None else None

    @property
    def lease_over(self) -> bool:
        return self.silent_seconds > self.view.config.lease

    @property
    def task_ended(self) -> bool:
        """Slurm or its plugin reports that the agent's task ended."""
        agent = self.view.live.agent(*self.suspicion.key)
        return agent is not None and agent.suspect_since is not None

    @cached_property
    def refused(self) -> list[Answer]:
        """Answers that prove that nobody listens at the door any more; empty if they are not enough.

        One answer is enough if its witness reaches the slurmd there: then the node itself refuses. Otherwise a firewall
        may refuse, so two are needed and nobody may contradict them. Strangers are not believed.
        """
        asked = self.suspicion
        own = [a for key, a in asked.answers.items() if asked.own(key) and a.door is not Reach.UNKNOWN]
        refused = [answer for answer in own if answer.door is Reach.REFUSED]
        if not refused or any(answer.door is Reach.REACHED for answer in own):
            return []
        if any(answer.slurmd is Reach.REACHED for answer in refused):
            return refused
        others = any(key[0] == asked.job for key in asked.asked) or any(probes.own_witnesses(self.tick, asked))
        least = 2 if others or asked.targets[1] else 1  # without Slurm there may be nobody else to ask
        return refused if len(own) == len(refused) >= least and not self.tick.many_refuse else []

    @cached_property
    def reached(self) -> list[Answer]:
        """Answers that show that the agent lives.

        The controller and agents of the same job are believed. A stranger is one voice against all that reach nothing,
        and Slurm counts twice. After `state_wait_seconds` no answer counts: another host may have the address by now.
        """
        asked = self.suspicion
        if self.silent_seconds > self.view.config.state_wait_seconds:
            return []
        answers = {**asked.before, **asked.answers}
        reached = {key: answer for key, answer in answers.items() if answer.door is Reach.REACHED}
        if any(asked.own(key) for key in reached):
            return list(reached.values())
        against = sum(a.door in (Reach.SILENT, Reach.REFUSED) for a in answers.values()) + 2 * bool(self.slurm)
        return list(reached.values()) if len(reached) >= max(1, against) else []

    @cached_property
    def shown_dead(self) -> str:
        """Why Slurm, or a person through Slurm, shows that nothing of the element lives; empty otherwise."""
        job = self.view.state.jobs[self.suspicion.job]
        return quorum.shown_dead(self.view, job, self.suspicion.element, self.suspicion.since)

    @cached_property
    def slurm(self) -> str:
        """The states by which Slurm calls the node dead."""
        return probes.slurm_calls_dead(self.tick, self.suspicion.node)

    @property
    def first_answers_due(self) -> bool:
        return self.view.now - self.suspicion.begun < ANSWER_SECONDS

    @cached_property
    def no_majority_missing(self) -> bool:
        """The silent agents of its job have no majority."""
        return self.tick.missing_majority(self.suspicion.job)[0]

    @cached_property
    def no_majority_runs(self) -> bool:
        """The silent agents of its job do not train on by themselves."""
        return not self.tick.missing_majority(self.suspicion.job)[1]

    @cached_property
    def witnesses(self) -> list[Answer]:
        """Answers of other agents that do not reach the door; empty while too few agree."""
        found = [answer for answer in self.suspicion.testimony() if answer.door is not Reach.REACHED]
        enough = bool(found) and len(found) >= probes.needed_witnesses(self.tick, self.suspicion)
        return found if self.no_majority_missing and enough else []

    @cached_property
    def unreachable(self) -> bool:
        """Enough witnesses reach neither door nor slurmd, and nobody reaches slurmd."""
        silent = bool(self.witnesses) and all(answer.unreachable for answer in self.witnesses)
        return silent and not probes.slurmd_answers(self.suspicion)

    @property
    def door_silent(self) -> bool:
        """Enough witnesses do not reach the door."""
        return bool(self.witnesses) and all(answer.door is Reach.SILENT for answer in self.witnesses)

    @property
    def given_up(self) -> bool:
        """Silent for `state_wait_seconds`. If Slurm is used, it must also confirm that a job's only node is lost."""
        if self.silent_seconds <= self.view.config.state_wait_seconds or self.view.alone:
            return False
        return self.no_majority_missing or (self.no_majority_runs and not self.view.slurm.used)

    # ------------------------------------------------------------ what follows
    def conclude(
        self, what: What, source: Source, by: str, answers: Sequence[Answer], dead: bool = False, spare: bool = False
    ) -> Finding:
        """Return a finding that rests on these answers. dead, spare: as in :class:`Finding`."""
        suspicion, details = self.suspicion, "; ".join(map(str, answers))
        evidence = f"no message from {suspicion.node} for {self.silent_seconds:.2f} s" + (details and f" ({details})")
        at, place = self.view.now, (suspicion.element, suspicion.node)
        found = Finding(what, suspicion.job, (), at, source, evidence, *place, by, dead=dead, spare=spare)
        answers_there = what is What.AGENT_DIED and (dead or probes.slurmd_answers(suspicion))
        return replace(found, agent=suspicion.agent, answers=answers_there)

    def conclude_unreachable(self) -> Finding:
        own = self.suspicion.answers.get(OWN)
        # Witnesses may lie, even about their own job's agent: the node is taken only if slurmd is silent here, too.
        spare = own is None or own.slurmd is not Reach.SILENT
        answers = self.witnesses if own is None else [*self.witnesses, own]
        return self.conclude(What.NODE_LOST, Source.PEER, f"{BY_LEASE}witnesses", answers, spare=spare)

    def conclude_dead(self) -> Finding:
        what = What.NODE_LOST if quorum.slurm_hears_nothing(self.view, self.suspicion.node) else What.AGENT_DIED
        return self.conclude(what, Source.SLURM, f"{BY_LEASE}Slurm ({self.shown_dead})", self.answers, dead=True)


class Row(NamedTuple):
    """One row of the table."""

    case: str
    """Its name in docs/design/silence.md."""
    holds: Callable[[Evidence], object]
    finding: Callable[[Evidence], Finding] | None = None
    """Its conclusion; None if nothing follows yet."""


VERDICTS: tuple[Row, ...] = (
    Row(
        "the door refuses, and the task has ended",
        lambda e: e.task_ended and e.refused,
        lambda e: e.conclude(What.AGENT_DIED, Source.PEER, PORT_CLOSED, e.refused),
    ),
    Row("the lease is not over", lambda e: not e.lease_over),
    Row(
        "the door refuses",
        lambda e: e.refused,
        lambda e: e.conclude(What.AGENT_DIED, Source.PEER, PORT_CLOSED, e.refused),
    ),
    Row("Slurm shows the element's end", lambda e: e.shown_dead, Evidence.conclude_dead),
    Row("somebody reaches the door", lambda e: e.reached),
    Row("nobody has answered yet", lambda e: not e.answers and e.first_answers_due),
    Row(
        "Slurm hears nothing of the node",
        lambda e: e.slurm and e.no_majority_runs,
        lambda e: e.conclude(What.NODE_LOST, Source.SLURM, f"{BY_LEASE}Slurm ({e.slurm})", e.answers),
    ),
    Row(
        "the controller's own probes still run",
        lambda e: e.unreachable and e.suspicion.probing and e.first_answers_due,
    ),
    Row("nobody reaches door or slurmd", lambda e: e.unreachable, Evidence.conclude_unreachable),
    Row(
        "slurmd is reached, and not the door",
        lambda e: e.door_silent,
        lambda e: e.conclude(What.AGENT_DIED, Source.PEER, f"{BY_LEASE}witnesses", e.witnesses),
    ),
    Row(
        "nothing is known for `state_wait_seconds`",
        lambda e: e.given_up,
        lambda e: e.conclude(What.NODE_LOST, Source.CLOCK, "state_wait_seconds", e.answers, spare=True),
    ),
)
"""The first row that holds decides; each needs two independent kinds of evidence before a node is lost."""


def _record_doubt(evidence: Evidence, out: Outcome) -> None:
    """Record, once, why a silent agent does not count as lost."""
    view, suspicion = evidence.view, evidence.suspicion
    if not evidence.lease_over:
        return
    why = "it lives: others reach it" if evidence.reached else ""
    witnessed = suspicion.testimony() if view.now - suspicion.begun > ANSWER_SECONDS / 2 else []
    if not why and (witnessed or evidence.slurm) and not evidence.no_majority_missing:
        why = "more of its job is silent than is heard: they may go on by themselves. Where they are dead, say so: "
        why += quorum.declare_dead_command(view, suspicion.node)
    if why and why != suspicion.recorded:
        suspicion.recorded = why
        answers = "; ".join(map(str, evidence.reached or suspicion.testimony()))
        who = f"{view.state.jobs[suspicion.job].label(suspicion.element)} on {suspicion.node}"
        reason = f"no message from {who}, which is not taken for lost: {why}" + (f" ({answers})" if answers else "")
        record = records.Silence(element=suspicion.element, node=suspicion.node, reason=reason)
        out.record(view.state.jobs[suspicion.job], record)
