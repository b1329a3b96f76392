"""What the evidence about a silent agent comes to: the table of docs/design/silence.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from unicron_ctl.controller.failure_detector import probes, quorum
from unicron_ctl.controller.failure_detector.probes import ANSWER_SECONDS, Tick
from unicron_ctl.controller.model.finding import Finding, Source, What
from unicron_ctl.controller.model.suspicion import OWN, Answer, Suspicion
from unicron_ctl.controller.model.view import View
from unicron_ctl.shared.protocol.reach import Reach

CLOSED = "its port is closed"
BY_LEASE = "lease and "  # begins `Finding.by` where silence is one of the two kinds of evidence


@dataclass
class Evidence:
    """What is known about one silent agent at one tick."""

    view: View
    tick: Tick
    suspicion: Suspicion

    @property
    def silent_seconds(self) -> float:
        return self.view.now - self.suspicion.since

    @property
    def lease_over(self) -> bool:
        return self.silent_seconds > self.view.config.lease

    @property
    def task_ended(self) -> bool:
        """Slurm or its plugin says that the agent's task ended."""
        agent = self.view.live.agent(*self.suspicion.key)
        return agent is not None and agent.suspect_since is not None

    @cached_property
    def answers(self) -> list[Answer]:
        return list(self.suspicion.answers.values())

    @cached_property
    def refused(self) -> list[Answer]:
        """Answers that show that nobody listens at the door any more; empty while they are not enough.

        One answer is enough where its witness reaches the slurmd there: the node itself refuses. Otherwise two are
        needed and nobody may contradict them, for a firewall may refuse, too. Strangers are not believed.
        """
        asked = self.suspicion
        own = [a for key, a in asked.answers.items() if asked.own(key) and a.door is not Reach.UNKNOWN]
        refused = [answer for answer in own if answer.door is Reach.REFUSED]
        if not refused or any(answer.door is Reach.REACHED for answer in own):
            return []
        if any(answer.slurmd is Reach.REACHED for answer in refused):
            return refused
        others = any(key[0] == asked.job for key in asked.asked)
        others = others or any(probes.own_witnesses(self.view, self.tick, asked))
        least = 2 if others or asked.targets[1] else 1  # without Slurm there may be nobody else to ask
        return refused if len(own) == len(refused) >= least and not self.tick.many_refuse else []

    @cached_property
    def shown_dead(self) -> str:
        """How Slurm, or a person through Slurm, shows that nothing of the element lives."""
        job = self.view.state.jobs[self.suspicion.job]
        return quorum.shown_dead(self.view, job, self.suspicion.element, self.suspicion.since)

    @cached_property
    def slurm(self) -> str:
        """The states by which Slurm calls the node dead."""
        return probes.slurm_calls_dead(self.view, self.tick, self.suspicion.node)

    @cached_property
    def reached(self) -> list[Answer]:
        """Answers that show that the agent lives.

        The controller and agents of the same job are believed. A stranger is one voice against all that reach nothing,
        and Slurm counts twice. After `state_wait_seconds` no answer counts: the address may be somebody else's by now.
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

    @property
    def nobody_answered_yet(self) -> bool:
        return not self.answers and self.view.now - self.suspicion.begun < ANSWER_SECONDS

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
        found = [answer for answer in self.suspicion.witnessed() if answer.door is not Reach.REACHED]
        enough = bool(found) and len(found) >= probes.needed_witnesses(self.view, self.tick, self.suspicion)
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
    def own_probe_runs(self) -> bool:
        return bool(self.suspicion.probing) and self.view.now - self.suspicion.begun < ANSWER_SECONDS

    @property
    def given_up(self) -> bool:
        """Silent for `state_wait_seconds`. Where Slurm is used, it has to say that a job's only node is lost."""
        if self.silent_seconds <= self.view.config.state_wait_seconds or self.view.alone:
            return False
        return self.no_majority_missing or (self.no_majority_runs and not self.view.slurm.used)


def _door_refuses(e: Evidence) -> Finding:
    return _finding(e, What.AGENT_DIED, Source.PEER, CLOSED, e.refused)


def _slurm_shows_the_end(e: Evidence) -> Finding:
    what = What.NODE_LOST if quorum.slurm_hears_nothing(e.view, e.suspicion.node) else What.AGENT_DIED
    return _finding(e, what, Source.SLURM, f"{BY_LEASE}Slurm ({e.shown_dead})", e.answers, dead=True)


def _slurm_hears_nothing(e: Evidence) -> Finding:
    return _finding(e, What.NODE_LOST, Source.SLURM, f"{BY_LEASE}Slurm ({e.slurm})", e.answers)


def _node_unreachable(e: Evidence) -> Finding:
    own = e.suspicion.answers.get(OWN)
    # Witnesses may lie, even about their own job's agent: a node is taken only where slurmd is silent here, too.
    spare = own is None or own.slurmd is not Reach.SILENT
    answers = e.witnesses if own is None else [*e.witnesses, own]
    return _finding(e, What.NODE_LOST, Source.PEER, f"{BY_LEASE}witnesses", answers, spare=spare)


def _door_unreachable(e: Evidence) -> Finding:
    return _finding(e, What.AGENT_DIED, Source.PEER, f"{BY_LEASE}witnesses", e.witnesses)


def _given_up(e: Evidence) -> Finding:
    return _finding(e, What.NODE_LOST, Source.CLOCK, "state_wait_seconds", e.answers, spare=True)


class Row(NamedTuple):
    """One row of the table. case: its words in docs/design/silence.md. finding: None where nothing follows yet."""

    case: str
    holds: Callable[[Evidence], object]
    finding: Callable[[Evidence], Finding] | None


VERDICTS: tuple[Row, ...] = (
    Row("the door refuses, and the task has ended", lambda e: e.task_ended and e.refused, _door_refuses),
    Row("the lease is not over", lambda e: not e.lease_over, None),
    Row("the door refuses", lambda e: e.refused, _door_refuses),
    Row("Slurm shows the element's end", lambda e: e.shown_dead, _slurm_shows_the_end),
    Row("somebody reaches the door", lambda e: e.reached, None),
    Row("nobody has answered yet", lambda e: e.nobody_answered_yet, None),
    Row("Slurm hears nothing of the node", lambda e: e.slurm and e.no_majority_runs, _slurm_hears_nothing),
    Row("the controller's own probes still run", lambda e: e.unreachable and e.own_probe_runs, None),
    Row("nobody reaches door or slurmd", lambda e: e.unreachable, _node_unreachable),
    Row("slurmd is reached, and not the door", lambda e: e.door_silent, _door_unreachable),
    Row("nothing is known for `state_wait_seconds`", lambda e: e.given_up, _given_up),
)
"""The first row that holds decides; each needs two independent kinds of evidence before a node is lost."""


def judge_silence(evidence: Evidence) -> Finding | None:
    """Whether the agent died or its node is lost; None while that is not known."""
    row = next((row for row in VERDICTS if row.holds(evidence)), None)
    return row.finding(evidence) if row is not None and row.finding is not None else None


def _finding(
    e: Evidence,
    what: What,
    source: Source,
    by: str,
    answers: Sequence[Answer],
    dead: bool = False,
    spare: bool = False,
) -> Finding:
    suspicion, told = e.suspicion, "; ".join(str(answer) for answer in answers)
    said = f"no message from {suspicion.node} for {e.silent_seconds:.2f} s" + (f" ({told})" if told else "")
    node_answers = what is What.AGENT_DIED and (dead or probes.slurmd_answers(suspicion))
    return Finding(
        what,
        suspicion.job,
        (),
        e.view.now,
        source,
        said,
        element=suspicion.element,
        node=suspicion.node,
        by=by,
        dead=dead,
        answers=node_answers,
        spare=spare,
    )
