"""Indirect probes: agents are asked whether they reach a silent agent, or a node that may have ended.

Each round asks the controller's own sockets and two living agents, and others in place of those that know nothing. If
the job itself has too few agents, those of other jobs (strangers) are asked, and are believed less.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice

from unicron_ctl.controller.failure_detector import quorum
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.requests import Probe
from unicron_ctl.controller.model.suspicion import OWN, Answer, EndingNode, Key, Suspicion, Suspicions
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.protocol.reach import Reach, door_at
from unicron_ctl.shared.slurm.states import DOWN
from unicron_ctl.shared.system.addresses import is_numeric

ASK_PERIODS = 1.3  # heartbeat periods of silence after which others are asked: they answer before the lease ends
WITNESSES = 2  # agents that are asked and must agree, if there are so many
ANSWER_SECONDS = 1.5  # for a witness to answer; then another one is asked
ROUND_SECONDS = 2.0  # between two rounds of probes of the same agent
CONTROL = 2  # index of the control among a Probe's targets
MOST_IN_SERVICE = 64  # nodes to search for one that can be a control
MOST_ASKED = 8  # in one round, this controller included: contradicting strangers lead to more questions


@dataclass
class Tick:
    """Facts that the verdicts of one tick share, each computed once: jobs have up to 16,384 agents."""

    view: View
    _missing: dict[str, tuple[bool, bool]] = field(default_factory=dict)
    _own: dict[str, list[int]] = field(default_factory=dict)

    def missing_majority(self, job: str) -> tuple[bool, bool]:
        """Return whether the job's missing agents have no majority, and whether a majority of them may train on."""
        if job not in self._missing:
            view, state = self.view, self.view.state.jobs[job]
            missing = quorum.missing_elements(view, state)
            free = quorum.no_majority_missing(view, state, missing)
            self._missing[job] = free, not free and quorum.majority_may_run(view, state, missing)
        return self._missing[job]

    def own_elements(self, job: str) -> list[int]:
        """Return the job's elements whose agents can be asked."""
        if job not in self._own:
            agents = self.view.job(self.view.state.jobs[job]).agents
            self._own[job] = sorted(element for element, agent in agents.items() if _can_answer(self.view, agent))
        return self._own[job]

    @cached_property
    def many_refuse(self) -> bool:
        """More than half of all agents seem to have closed their ports, and nothing else on their nodes answers. Then a
        firewall is the likelier cause."""
        view = self.view
        silent = [one for one in view.suspicions.open.values() if not slurmd_answers(one)]
        refused = sum(any(a.door is Reach.REFUSED for a in one.answers.values()) for one in silent)
        return refused > 1 and 2 * refused > len(view.live.leases)

    @cached_property
    def in_service(self) -> list[str]:
        """Some nodes that Slurm hears, first those whose slurmd this controller has reached."""
        seen, reached = self.view.slurm.seen, self.view.live.slurmds
        heard = [node.name for node in seen.nodes if node.heard] if seen is not None else []
        return heapq.nsmallest(MOST_IN_SERVICE, heard, key=lambda name: name not in reached)


# ---------------------------------------------------------------- asking
def send_probes(tick: Tick, suspicion: Suspicion, out: Outcome) -> None:
    """Start the controller's own probes of this round, and ask as many witnesses as are still needed."""
    view = tick.view
    suspicion.asked.setdefault(OWN, view.now)
    # Probes of the last round may still run.
    if any(suspicion.targets) and not suspicion.probing and OWN not in suspicion.answers:
        targets = (*suspicion.targets, _control(tick, suspicion))
        suspicion.probing, suspicion.probe = sum(map(bool, suspicion.targets)), suspicion.number
        out.requests.append(Probe(suspicion.job, suspicion.element, suspicion.node, targets, suspicion.number))
    waiting = [key for key, at in suspicion.asked.items() if key not in suspicion.answers]
    useful = len(suspicion.testimony()) - len(suspicion.strangers())
    useful += sum(1 for key in waiting if key != OWN and view.now - suspicion.asked[key] < ANSWER_SECONDS)
    most = min(WITNESSES - useful, MOST_ASKED - len(suspicion.asked))
    for agent in islice(witnesses(tick, suspicion), max(0, most)):
        suspicion.asked[agent.job, agent.element] = view.now
        out.send(agent, wire.Reach(number=suspicion.number, targets=list(suspicion.targets)))


def _control(tick: Tick, suspicion: Suspicion) -> str:
    """Return another node's slurmd. It has to answer if a refusal by an ending node's slurmd is to count."""
    if not isinstance(suspicion, EndingNode) or not suspicion.refused:
        return ""
    asked = tick.view.suspicions.nodes()
    return slurmd_address(tick.view, next((name for name in tick.in_service if name not in asked), ""))


def witnesses(tick: Tick, suspicion: Suspicion) -> Iterator[AgentView]:
    """Yield living agents on other nodes that have not been asked: first the job's own, then those heard last."""
    yield from own_witnesses(tick, suspicion)
    view = tick.view
    for other in reversed(view.live.leases.values()):
        if view.now - other.last_heard > late_after(view):
            return
        if other.job != suspicion.job and _can_answer(view, other) and _may_witness(suspicion, other):
            yield other


def own_witnesses(tick: Tick, suspicion: Suspicion) -> Iterator[AgentView]:
    """Yield witnesses of the same job, first those after it in the array: a rack is not asked about itself."""
    view = tick.view
    agents, elements = view.job(view.state.jobs[suspicion.job]).agents, tick.own_elements(suspicion.job)
    place = bisect.bisect_right(elements, suspicion.element)
    around = chain(islice(elements, place, None), islice(elements, place))
    return (agents[e] for e in around if _may_witness(suspicion, agents[e]))


def _can_answer(view: View, agent: AgentView) -> bool:
    heard = agent.alive and view.now - agent.last_heard <= late_after(view)
    return heard and (agent.job, agent.element) not in view.suspicions.open


def _may_witness(suspicion: Suspicion, agent: AgentView) -> bool:
    return agent.node != suspicion.node and (agent.job, agent.element) not in suspicion.asked


def needed_witnesses(tick: Tick, suspicion: Suspicion) -> int:
    """Return the number of witnesses that must agree: WITNESSES, if there are so many."""
    found = sum(1 for key in suspicion.asked if key != OWN)
    if found < WITNESSES:
        found += sum(1 for _ in islice(witnesses(tick, suspicion), WITNESSES))
    return max(1, min(WITNESSES, found))


def late_after(view: View) -> float:
    """Return the seconds of silence after which an agent is suspected."""
    return min(view.config.lease, view.config.heartbeat_period * ASK_PERIODS)


def targets(view: View, node: str, door: str) -> tuple[str, str]:
    """Return the agent's door and the node's slurmd, host:port; the latter is empty if Slurm does not know the node.

    The door's host is Slurm's numeric address of the node or, if Slurm has a name, the address from which the agent
    came (`Server`). So no user chooses what others connect to, or names that take long to resolve.
    """
    info = view.slurm.node(node)
    if info is None:
        return door, ""
    return door_at(info.address, door) if is_numeric(info.address) else door, slurmd_address(view, node)


def slurmd_address(view: View, node: str) -> str:
    """Return the slurmd's address in Slurm's configuration, host:port; empty if Slurm does not know the node."""
    info = view.slurm.node(node)
    return f"{info.address}:{info.port}" if info is not None else ""


# ---------------------------------------------------------------- answers
def on_reached(suspicions: Suspicions, agent: AgentView, label: str, message: wire.ReachAnswer) -> None:
    """Take in a witness's answer, unless it was not asked or answers an earlier round. label: Slurm's name of its
    element."""
    key: Key = agent.job, agent.element
    suspicion = suspicions.rounds.get(message.number)
    if suspicion is not None and key in suspicion.asked and len(message.words) == len(suspicion.targets):
        door, slurmd = (Reach(word) if word in set(Reach) else Reach.UNKNOWN for word in message.words)
        suspicion.answers[key] = Answer(f"{label} on {agent.node}", door, slurmd)


def on_probe(suspicions: Suspicions, probe: Probe, place: int, found: Reach | None) -> None:
    """Take in the answer of one of the probe's targets to this controller; None if the try itself failed."""
    key, found = (probe.job, probe.element), found or Reach.UNKNOWN
    may_be = (suspicions.open.get(key), suspicions.given_up.get(key), suspicions.ending_nodes.get(probe.node))
    of_this = (one for one in may_be if one is not None and one.probe == probe.number)
    if place == CONTROL:
        if (suspicion := next(of_this, None)) is not None:
            suspicion.control = found
        return
    suspicion = next((one for one in of_this if one.probing), None)
    if suspicion is None:
        return
    suspicion.probing -= 1
    answer = suspicion.answers.get(OWN, Answer("the controller", Reach.UNKNOWN, Reach.UNKNOWN))
    suspicion.answers[OWN] = answer = replace(answer, **{"slurmd" if place else "door": found})
    if Reach.REACHED in (answer.door, answer.slurmd):
        suspicion.reached = True
    elif not suspicion.probing:
        suspicion.reached = False


def slurmd_answers(suspicion: Suspicion) -> bool:
    """Whether the node's slurmd was reached, so that answers of its other ports are the node's own."""
    return any(answer.slurmd is Reach.REACHED for answer in suspicion.answers.values())


def slurm_calls_dead(tick: Tick, node: str) -> str:
    """Return the states by which Slurm calls the node dead; empty unless it hears others, so that its network works.

    Slurm's state of a node that was set down here is no evidence. That of a node that was only drained here is.
    """
    view = tick.view
    info = view.slurm.node(node)
    if info is None or info.asleep or (view.unfit(node) and not view.state.node(node).drained):
        return ""
    bad = info.states & DOWN
    return "+".join(sorted(bad)) if bad and any(name != node for name in tick.in_service) else ""
