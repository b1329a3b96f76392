"""What is asked about an agent or a node that may be gone: of this controller's own sockets, and of living agents.

Two witnesses are asked in each round, where there are so many, and others in the place of those that cannot say
anything. Strangers, agents of other jobs, are asked where the job itself has too few, and are believed less.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice

from unicron.ctl.controller.failure_detector import elsewhere
from unicron.ctl.controller.model.agent_view import AgentView
from unicron.ctl.controller.model.inquiry import OWN, Ending, Inquiries, Inquiry, Key, Word
from unicron.ctl.controller.model.requests import Probe
from unicron.ctl.controller.model.view import Outcome, View
from unicron.ctl.protocol import wire
from unicron.ctl.protocol.reach import Reach, door_at
from unicron.ctl.system.addresses import is_numeric

ASK_PERIODS = 1.3  # heartbeat periods of silence after which others are asked, so that they have answered at the lease
WITNESSES = 2  # agents that are asked, and that must agree, where there are so many
ANSWER_SECONDS = 1.5  # for a witness to answer; then another one is asked
ROUND_SECONDS = 2.0  # between two rounds of questions about the same agent
CONTROL = 2  # place of the control in a Probe
MOST_IN_SERVICE = 64  # nodes that are looked through for one that can be a control
MOST_ASKED = 8  # in one round, this controller among them: strangers' words that differ lead to more questions


@dataclass
class Sight:
    """What one tick's verdicts have in common, each worked out once: jobs have up to 16,384 agents."""

    view: View
    _away: dict[str, list[int]] = field(default_factory=dict)
    _free: dict[str, tuple[bool, bool]] = field(default_factory=dict)
    _own: dict[str, list[int]] = field(default_factory=dict)

    def away(self, job: str) -> list[int]:
        """Its elements that may go on without this controller."""
        if job not in self._away:
            self._away[job] = elsewhere.away(self.view, self.view.state.jobs[job])
        return self._away[job]

    def may_go_on(self, job: str) -> tuple[bool, bool]:
        """They are no majority; or, at least, nobody goes on by itself."""
        if job not in self._free:
            view, state, missing = self.view, self.view.state.jobs[job], self.away(job)
            free = elsewhere.may_go_on(view, state, missing)
            self._free[job] = free, free or not elsewhere.goes_on(view, state, missing)
        return self._free[job]

    def own(self, job: str) -> list[int]:
        """Its elements whose agents can be asked."""
        if job not in self._own:
            agents = self.view.job(self.view.state.jobs[job]).agents
            self._own[job] = sorted(element for element, agent in agents.items() if _is_there(self.view, agent))
        return self._own[job]

    @cached_property
    def many_refuse(self) -> bool:
        """More than half of all agents at once seem to have closed their ports, on nodes of which nothing else answers:
        a firewall that refuses is likelier."""
        view = self.view
        closed = [{w.door for w in one.words.values()} for one in view.inquiries.open.values() if not slurmd_is(one)]
        refused = sum(Reach.REFUSED in doors for doors in closed)
        return refused > 1 and 2 * refused > len(view.live.leases)

    @cached_property
    def in_service(self) -> list[str]:
        """Some nodes that Slurm hears, first those whose slurmd this controller has reached."""
        seen, known = self.view.slurm.seen, self.view.live.slurmds
        heard = [node.name for node in seen.nodes if node.heard] if seen is not None else []
        return heapq.nsmallest(MOST_IN_SERVICE, heard, key=lambda name: name not in known)


def ask(view: View, sight: Sight, inquiry: Inquiry, out: Outcome) -> None:
    if OWN not in inquiry.asked:
        inquiry.asked[OWN] = view.now
    # The last round's tries may still wait.
    if any(inquiry.targets) and not inquiry.probing and OWN not in inquiry.words:
        targets = (*inquiry.targets, _control(view, sight, inquiry))
        inquiry.probing, inquiry.probe = sum(map(bool, inquiry.targets)), inquiry.number
        out.requests.append(Probe(inquiry.job, inquiry.element, inquiry.node, targets, inquiry.number))
    waiting = [key for key, at in inquiry.asked.items() if key not in inquiry.words]
    useful = len(inquiry.witnessed()) - len(inquiry.strangers())
    useful += sum(1 for key in waiting if key != OWN and view.now - inquiry.asked[key] < ANSWER_SECONDS)
    most = min(WITNESSES - useful, MOST_ASKED - len(inquiry.asked))
    for agent in islice(witnesses(view, sight, inquiry), max(0, most)):
        inquiry.asked[agent.job, agent.element] = view.now
        out.send(agent, wire.Reach(number=inquiry.number, targets=list(inquiry.targets)))


def _control(view: View, sight: Sight, inquiry: Inquiry) -> str:
    """What has to answer where a refusal is to count: another agent's door of the same job before the lease; another
    node's slurmd where a node may have ended."""
    if isinstance(inquiry, Ending):
        if not inquiry.refused:
            return ""
        asked = view.inquiries.nodes()
        names = (name for name in sight.in_service if name != inquiry.node and name not in asked)
        return slurmd_of(view, next(names, ""))
    if (inquiry.job, inquiry.element) not in view.live.unanswered:
        return ""
    other = next(own_witnesses(view, sight, inquiry), None)
    return targets(view, other.node, other.door)[0] if other is not None else ""


def witnesses(view: View, sight: Sight, inquiry: Inquiry) -> Iterator[AgentView]:
    """Living agents on other nodes that have not been asked: those of the same job first, then those heard last."""
    yield from own_witnesses(view, sight, inquiry)
    for key in reversed(view.live.leases):
        other = view.live.agent(*key)
        if other is None or view.now - other.last_heard > ask_after(view):
            return
        if other.job != inquiry.job and _is_there(view, other) and _may_witness(inquiry, other):
            yield other


def own_witnesses(view: View, sight: Sight, inquiry: Inquiry) -> Iterator[AgentView]:
    agents = view.job(view.state.jobs[inquiry.job]).agents
    return (agents[e] for e in _around(inquiry.element, sight.own(inquiry.job)) if _may_witness(inquiry, agents[e]))


def _around(element: int, all_of_them: list[int]) -> Iterator[int]:
    """Those after it first: not all questions of a rack's loss go to the same two agents."""
    place = bisect.bisect_right(all_of_them, element)
    return chain(islice(all_of_them, place, None), islice(all_of_them, place))


def _is_there(view: View, agent: AgentView) -> bool:
    here = agent.alive and view.now - agent.last_heard <= ask_after(view)
    return here and (agent.job, agent.element) not in view.inquiries.open


def _may_witness(inquiry: Inquiry, agent: AgentView) -> bool:
    return agent.node != inquiry.node and (agent.job, agent.element) not in inquiry.asked


def needed(view: View, sight: Sight, inquiry: Inquiry) -> int:
    """How many witnesses must agree: WITNESSES where there are so many."""
    asked = sum(1 for key in inquiry.asked if key != OWN)
    there = asked if asked >= WITNESSES else asked + sum(1 for _ in islice(witnesses(view, sight, inquiry), WITNESSES))
    return max(1, min(WITNESSES, there))


def ask_after(view: View) -> float:
    return min(view.config.lease, view.config.heartbeat_period * ASK_PERIODS)


def targets(view: View, node: str, door: str) -> tuple[str, str]:
    """The agent's door and the node's slurmd, host:port; the latter empty where Slurm does not know the node, or is not
    used. The door is where Slurm says that the node is; where that is a name, the address by which the agent came
    (`Server`): no user chooses what others connect to, or names that take long."""
    info = view.slurm.node(node)
    if info is None:
        return door, ""
    return door_at(info.address, door) if is_numeric(info.address) else door, slurmd_of(view, node)


def slurmd_of(view: View, node: str) -> str:
    """Where Slurm says that the node's slurmd listens, host:port; empty for a node that Slurm does not know."""
    info = view.slurm.node(node)
    return f"{info.address}:{info.port}" if info is not None else ""


# ---------------------------------------------------------------- answers
def answered(inquiries: Inquiries, agent: AgentView, message: wire.Reached) -> None:
    """A witness's answer; one that nobody asked for, or asks for no more, says nothing."""
    key = agent.job, agent.element
    inquiry = _of_round(inquiries, message.number, key)
    if inquiry is not None and len(message.words) == len(inquiry.targets):
        door, slurmd = (Reach(word) if word in set(Reach) else Reach.UNKNOWN for word in message.words)
        inquiry.words[key] = Word(f"{agent.job}_{agent.element} on {agent.node}", door, slurmd)


def probed(inquiries: Inquiries, probe: Probe, place: int, answer: Reach | None) -> None:
    """What this controller's own sockets say of one of the addresses; None: the try itself failed."""
    key = probe.job, probe.element
    may_be = (inquiries.open.get(key), inquiries.judged.get(key), inquiries.ending.get(probe.node))
    of_this = (one for one in may_be if one is not None and one.probe == probe.number)
    answer = answer or Reach.UNKNOWN
    if place == CONTROL:
        if (inquiry := next(of_this, None)) is not None:
            inquiry.control = answer
        return
    inquiry = next((one for one in of_this if one.probing), None)
    if inquiry is not None:  # the try that it waits for
        inquiry.probing -= 1
        word = inquiry.words.get(OWN, Word("the controller", Reach.UNKNOWN, Reach.UNKNOWN))
        word = replace(word, door=answer) if place == 0 else replace(word, slurmd=answer)
        inquiry.words[OWN] = word
        if Reach.REACHED in (word.door, word.slurmd):
            inquiry.reached = True
        elif not inquiry.probing:
            inquiry.reached = False


def _of_round(inquiries: Inquiries, number: int, witness: Key) -> Inquiry | None:
    inquiry = inquiries.rounds.get(number)
    return inquiry if inquiry is not None and witness in inquiry.asked else None


def slurmd_is(inquiry: Inquiry) -> bool:
    """The node's slurmd answers, so what its other ports say is the node's own word."""
    return any(word.slurmd is Reach.REACHED for word in inquiry.words.values())


def slurm_says(view: View, sight: Sight, node: str) -> str:
    """Slurm itself holds the node for dead, and not only because this host's network is out of order: it hears
    others. What was set down here it shows so because of that; of a node that was only drained it is its own word."""
    info = view.slurm.node(node)
    if info is None or info.asleep or (view.unfit(node) and not view.state.node(node).drained):
        return ""
    bad = info.states & elsewhere.GONE
    return "+".join(sorted(bad)) if bad and any(name != node for name in sight.in_service) else ""
