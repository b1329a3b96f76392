"""Silence: agents that have not been heard of. It is not death.

A silent agent leads to questions at once, to other agents and to this controller's own sockets: does its door answer,
does its node's slurmd? Its node counts as lost on two independent kinds of evidence: the lease, and either witnesses
who cannot reach it, or Slurm. What goes wrong on the witness's side (names, descriptors) says nothing.

- Whoever refuses a connection lives: nobody listens at the agent's door, so only the agent died. Something on the way
  may refuse, too, so the node has to say it, or two.
- Ranks that step together are alive: as long as their job's iterations end, none of its members is silent.
- When nobody at all is heard, the trouble is this controller's own, and nobody is judged. When most fall silent
  together, it may be, and no node is taken (`sense.together`).
- Those that cannot be heard may go on without this controller once they are a majority (docs/design/agreement.md):
  it never leaves out more than half of a generation but for those that are shown dead (`sense.elsewhere`).

Living agents stand in the order of their last word (`Live.leases`), so a tick looks at those only whose time is over.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice

from unicron_ctl.controller.log import records
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.finding import Finding, Source, What
from unicron_ctl.controller.model.inquiry import OWN, Inquiries, Inquiry, Key, Word
from unicron_ctl.controller.model.job import AgentRecord, JobState, Phase
from unicron_ctl.controller.model.requests import Probe
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.sense import elsewhere, together
from unicron_ctl.protocol import wire
from unicron_ctl.reach import Reach, door_at, is_address

ASK_PERIODS = 1.3  # heartbeat periods of silence after which others are asked, so that they have answered at the lease
WITNESSES = 2  # agents that are asked, and that must agree, where there are so many
ANSWER_SECONDS = 1.5  # for a witness to answer; then another one is asked
ROUND_SECONDS = 2.0  # between two rounds of questions about the same agent
MISSING_SECONDS = 0.5  # between two looks for agents that have not come back to a restarted controller
BY_LEASE = "lease and "  # how it is said that silence, and what else, showed the end
MOST_ASKED = 8  # in one round, this controller among them: strangers' words that differ lead to more questions


def look(view: View) -> Outcome:
    """Opens inquiries, asks, and reports what they came to. Called at every tick."""
    out, sight = Outcome(), Sight(view)
    inquiries = view.inquiries
    _alone(view, out)
    if not inquiries.recalled and view.now - view.started_at > view.config.restart_grace:
        inquiries.recalled = True
        _recall(view, out)
    for key, inquiry in list(_silent(view)):
        inquiries.open[key] = inquiry
    for key, inquiry in list(inquiries.open.items()):
        if not _still_silent(view, inquiry):
            inquiries.close(key)
            continue
        if not view.alone:
            if not inquiry.number or view.now - inquiry.begun > ROUND_SECONDS:
                inquiries.begin_round(inquiry, view.now)
            _ask(view, sight, inquiry, out)
        finding = verdict(view, sight, inquiry)
        if finding is not None:
            out.findings.append(finding)
            inquiries.close(key)
            if finding.by.startswith(BY_LEASE) and not finding.dead:
                inquiries.judged[key] = inquiry
        else:
            _say(view, sight, inquiry, out)
    together.look(view, _ask_after(view), out)
    return out


# ---------------------------------------------------------------- who is silent
def _ask_after(view: View) -> float:
    return min(view.config.lease, view.config.heartbeat_period * ASK_PERIODS)


def _silent(view: View) -> Iterator[tuple[Key, Inquiry]]:
    """Agents whose next word is late, those of which Slurm or its plugin says that they ended, and those that the log
    knows and that have not spoken to this controller since its start."""
    late, inquiries = _ask_after(view), view.inquiries
    for key in view.live.leases:
        agent = view.live.agent(*key)
        if agent is None or view.now - agent.last_heard <= late:
            break  # all others have spoken later than this one
        if key not in inquiries.open and view.now - sign_of_life(view, agent) > late:
            yield key, _inquiry(view, agent)
    for key in view.live.suspects:
        agent = view.live.agent(*key)
        if agent is not None and agent.alive and key not in inquiries.open:
            yield key, _inquiry(view, agent)
    if view.now - view.started_at > view.config.restart_grace and view.now >= inquiries.look_at:
        inquiries.look_at = view.now + MISSING_SECONDS
        for job in view.state.jobs.values():
            yield from _missing(view, job)


def _missing(view: View, job: JobState) -> Iterator[tuple[Key, Inquiry]]:
    live = view.job(job)
    for element, record in job.agents.items() if not job.over else ():
        key = job.job, element
        if element in live.agents or key in view.inquiries.open or (record.gone and not _needed_again(job, record)):
            continue
        targets = _targets(view, record.node, record.door)
        yield key, Inquiry(job.job, element, record.agent, record.node, view.started_at, targets)


def _recall(view: View, out: Outcome) -> None:
    """Those whom the controller before this one gave up because they were silent, and that have not come back: they
    are counted for `together` as if they had been heard at this one's start. Nodes that were taken are settled."""
    for job in view.state.jobs.values():
        for element, record in job.agents.items() if not job.over else ():
            if record.gone != "silent" or view.unfit(record.node) or element in view.job(job).agents:
                continue
            targets = _targets(view, record.node, record.door)
            inquiry = Inquiry(job.job, element, record.agent, record.node, view.started_at, targets)
            inquiry.probing = sum(map(bool, targets))
            view.inquiries.judged[job.job, element] = inquiry
            if inquiry.probing:
                out.requests.append(Probe(job.job, element, record.node, targets, inquiry.number))


def _needed_again(job: JobState, record: AgentRecord) -> bool:
    """Restart mode: a world that breaks needs those once more that had ended well."""
    again = job.restart_mode and job.phase is Phase.BREAKING and record.gone == "finished"
    return again and any(s in job.members and s not in job.lost and s not in job.condemned for s in record.slots)


def _inquiry(view: View, agent: AgentView) -> Inquiry:
    since, targets = sign_of_life(view, agent), _targets(view, agent.node, agent.door)
    return Inquiry(agent.job, agent.element, agent.agent, agent.node, since, targets)


def _targets(view: View, node: str, door: str) -> tuple[str, str]:
    """The agent's door and the node's slurmd. The door is where Slurm says that the node is; where that is a name, the
    address by which the agent came (`Server`): no user chooses what others connect to, or names that take long."""
    info = view.slurm.node(node)
    if info is None:
        return door, ""
    return door_at(info.address, door) if is_address(info.address) else door, f"{info.address}:{info.port}"


def sign_of_life(view: View, agent: AgentView) -> float:
    """When the agent, or a collective that needs its ranks, last showed that it lives."""
    job = view.state.jobs.get(agent.job)
    if job is None or job.phase not in (Phase.RUNNING, Phase.OFFERING):
        return agent.last_heard
    inside = any(slot in job.members and slot not in job.condemned for slot in agent.slots)
    return max(agent.last_heard, view.job(job).live.stepped.before) if inside else agent.last_heard


def _still_silent(view: View, inquiry: Inquiry) -> bool:
    agent, job = view.live.agent(inquiry.job, inquiry.element), view.state.jobs.get(inquiry.job)
    record = job.agents.get(inquiry.element) if job is not None and not job.over else None
    if record is None or record.agent != inquiry.agent:
        return False
    if agent is None:
        return True
    return agent.agent == inquiry.agent and agent.alive and sign_of_life(view, agent) <= inquiry.since


# ---------------------------------------------------------------- nobody at all
def _alone(view: View, out: Outcome) -> None:
    """Nobody is heard: the controller's own network, or its host, is the likelier cause by far."""
    inquiries = view.inquiries
    newest = next(reversed(view.live.leases), None)
    agent = view.live.agent(*newest) if newest is not None else None
    if agent is not None:
        heard, many = agent.last_heard, len(view.live.leases) > 1
    else:
        known = sum(
            not record.gone for job in view.state.jobs.values() if not job.over for record in job.agents.values()
        )
        heard, many = view.started_at + view.config.restart_grace, known > 1
    alone = many and view.now - heard > view.config.lease
    if alone and inquiries.alone_since is None:
        inquiries.alone_since = heard
        said = "no agent at all is heard: this controller's own network is the likely cause. Nobody is judged, and "
        out.record(None, records.Alone(reason=f"{said}nothing is sent, until somebody is heard"))
    elif not many:
        inquiries.alone_since = None  # those that were not heard have ended by Slurm's word


def heard_again(view: View) -> Outcome:
    """Somebody speaks after nobody did."""
    out, inquiries = Outcome(), view.inquiries
    seconds = view.now - (inquiries.alone_since or view.now)
    inquiries.alone_since = None
    for key in list(inquiries.open):
        inquiries.close(key)  # everybody has a lease again
    out.record(None, records.HeardAgain(seconds=seconds, reason=f"agents are heard again after {seconds:.1f} s"))
    return out


# ---------------------------------------------------------------- questions and answers
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
        closed = [{w.door for w in one.words.values()} for one in view.inquiries.open.values() if not _slurmd_is(one)]
        refused = sum(Reach.REFUSED in doors for doors in closed)
        return refused > 1 and 2 * refused > len(view.live.leases)

    @cached_property
    def in_service(self) -> list[str]:
        """Two nodes that Slurm hears, if there are so many."""
        seen = self.view.slurm.seen
        return list(islice((node.name for node in seen.nodes if node.healthy), 2)) if seen is not None else []


def _ask(view: View, sight: Sight, inquiry: Inquiry, out: Outcome) -> None:
    if OWN not in inquiry.asked:
        inquiry.asked[OWN] = view.now
    targets = sum(map(bool, inquiry.targets))
    if targets and not inquiry.probing and OWN not in inquiry.words:  # the last round's tries may still wait
        inquiry.probing = targets
        out.requests.append(Probe(inquiry.job, inquiry.element, inquiry.node, inquiry.targets, inquiry.number))
    waiting = [key for key, at in inquiry.asked.items() if key not in inquiry.words]
    useful = len(inquiry.witnessed()) - len(inquiry.strangers(Reach.REACHED))
    useful += sum(1 for key in waiting if key != OWN and view.now - inquiry.asked[key] < ANSWER_SECONDS)
    most = min(WITNESSES - useful, MOST_ASKED - len(inquiry.asked))
    for agent in islice(_witnesses(view, sight, inquiry), max(0, most)):
        inquiry.asked[agent.job, agent.element] = view.now
        out.send(agent, wire.Reach(number=inquiry.number, targets=list(inquiry.targets)))


def _witnesses(view: View, sight: Sight, inquiry: Inquiry) -> Iterator[AgentView]:
    """Living agents on other nodes that have not been asked: those of the same job first, then those heard last."""
    yield from _own_witnesses(view, sight, inquiry)
    for key in reversed(view.live.leases):
        other = view.live.agent(*key)
        if other is None or view.now - other.last_heard > _ask_after(view):
            return
        if other.job != inquiry.job and _is_there(view, other) and _may_witness(inquiry, other):
            yield other


def _own_witnesses(view: View, sight: Sight, inquiry: Inquiry) -> Iterator[AgentView]:
    agents = view.job(view.state.jobs[inquiry.job]).agents
    return (agents[e] for e in _around(inquiry.element, sight.own(inquiry.job)) if _may_witness(inquiry, agents[e]))


def _around(element: int, all_of_them: list[int]) -> Iterator[int]:
    """Those after it first: not all questions of a rack's loss go to the same two agents."""
    place = bisect.bisect_right(all_of_them, element)
    return chain(islice(all_of_them, place, None), islice(all_of_them, place))


def _is_there(view: View, agent: AgentView) -> bool:
    here = agent.alive and view.now - agent.last_heard <= _ask_after(view)
    return here and (agent.job, agent.element) not in view.inquiries.open


def _may_witness(inquiry: Inquiry, agent: AgentView) -> bool:
    return agent.node != inquiry.node and (agent.job, agent.element) not in inquiry.asked


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
    inquiry = inquiries.open.get(key) or inquiries.judged.get(key)
    if inquiry is not None and probe.number >= inquiry.first:  # of this silence, and tried just now
        inquiry.probing -= 1
        known = inquiry.words.get(OWN, Word("the controller", Reach.UNKNOWN, Reach.UNKNOWN))
        answer = answer or Reach.UNKNOWN
        word = replace(known, door=answer) if place == 0 else replace(known, slurmd=answer)
        inquiry.words[OWN] = word
        if Reach.REACHED in (word.door, word.slurmd):
            inquiry.reached = True
        elif not inquiry.probing:
            inquiry.reached = False


def _of_round(inquiries: Inquiries, number: int, witness: Key) -> Inquiry | None:
    inquiry = inquiries.open.get(inquiries.rounds.get(number, OWN))
    return inquiry if inquiry is not None and witness in inquiry.asked else None


# ---------------------------------------------------------------- what it comes to
def verdict(view: View, sight: Sight, inquiry: Inquiry) -> Finding | None:
    """Whether the agent died, or its node is lost; None while that is not known."""
    silent, lease = view.now - inquiry.since, view.config.lease
    agent = view.live.agent(inquiry.job, inquiry.element)
    ended = agent is not None and agent.suspect_since is not None  # somebody says that its task has
    if (ended or silent > lease) and (refused := _refused(sight, inquiry)):
        return _finding(view, inquiry, What.AGENT_DIED, Source.PEER, "its port is closed", refused)
    if silent <= lease:
        return None
    job, words = view.state.jobs[inquiry.job], list(inquiry.words.values())
    if shown := elsewhere.shown_dead(view, job, inquiry.element, inquiry.since):
        what = What.NODE_LOST if elsewhere.hears_nothing(view, inquiry.node) else What.AGENT_DIED
        return _finding(view, inquiry, what, Source.SLURM, f"{BY_LEASE}Slurm ({shown})", words, dead=True)
    slurm = _slurm_says(view, sight, inquiry.node)
    if lives(view, inquiry, bool(slurm)) or (not words and view.now - inquiry.begun < ANSWER_SECONDS):
        return None
    free, either = sight.may_go_on(inquiry.job)
    if slurm and either:
        return _finding(view, inquiry, What.NODE_LOST, Source.SLURM, f"{BY_LEASE}Slurm ({slurm})", words)
    witnessed = [word for word in inquiry.witnessed() if word.door is not Reach.REACHED]
    if free and witnessed and len(witnessed) >= _needed(view, sight, inquiry):
        if all(word.unreachable for word in witnessed) and not _slurmd_is(inquiry):
            own = inquiry.words.get(OWN)
            if inquiry.probing and view.now - inquiry.begun < ANSWER_SECONDS:
                return None
            # Witnesses may lie, be it about their own job's agent: a node is taken only where it is silent here, too.
            spare = own is None or own.slurmd is not Reach.SILENT
            said = witnessed if own is None else [*witnessed, own]
            return _finding(view, inquiry, What.NODE_LOST, Source.PEER, f"{BY_LEASE}witnesses", said, spare=spare)
        if all(word.door is Reach.SILENT for word in witnessed):
            return _finding(view, inquiry, What.AGENT_DIED, Source.PEER, f"{BY_LEASE}witnesses", witnessed)
    given_up = silent > view.config.state_wait_seconds and not view.alone
    if given_up and (free or (either and not view.slurm.used)):  # of the only node, Slurm has to say it
        return _finding(view, inquiry, What.NODE_LOST, Source.CLOCK, "state_wait_seconds", words, spare=True)
    return None


def _refused(sight: Sight, inquiry: Inquiry) -> list[Word]:
    """Words by which nobody listens at the agent's door any more; empty while they are not enough.

    One is, where its witness reaches the slurmd there: the node itself says it. Else two are, and nobody may say
    anything else, for something on the way may refuse, too. No stranger is believed.
    """
    own = [word for key, word in inquiry.words.items() if inquiry.own(key) and word.door is not Reach.UNKNOWN]
    refused = [word for word in own if word.door is Reach.REFUSED]
    if not refused or any(word.door is Reach.REACHED for word in own):
        return []
    if any(word.slurmd is Reach.REACHED for word in refused):
        return refused
    others = any(key[0] == inquiry.job for key in inquiry.asked) or any(_own_witnesses(sight.view, sight, inquiry))
    least = 2 if others or inquiry.targets[1] else 1  # without Slurm there may be nobody else to ask
    return refused if len(own) == len(refused) >= least and not sight.many_refuse else []


def lives(view: View, inquiry: Inquiry, slurm: bool) -> list[Word]:
    """The words by which the agent lives. The job's own agents and this controller are believed; a stranger is one
    voice against all that reach nothing, Slurm included (`slurm`). After `state_wait_seconds` without a word of the
    agent, and without an iteration that ended, none counts: its address may be somebody else's by now."""
    if view.now - inquiry.since > view.config.state_wait_seconds:
        return []
    words = {**inquiry.before, **inquiry.words}
    reached = {key: word for key, word in words.items() if word.door is Reach.REACHED}
    if any(inquiry.own(key) for key in reached):
        return list(reached.values())
    against = sum(word.door in (Reach.SILENT, Reach.REFUSED) for word in words.values()) + 2 * slurm
    return list(reached.values()) if len(reached) >= max(1, against) else []


def _slurmd_is(inquiry: Inquiry) -> bool:
    """The node's slurmd answers, so what its other ports say is the node's own word."""
    return any(word.slurmd is Reach.REACHED for word in inquiry.words.values())


def _needed(view: View, sight: Sight, inquiry: Inquiry) -> int:
    """How many witnesses must agree: WITNESSES where there are so many."""
    asked = sum(1 for key in inquiry.asked if key != OWN)
    there = asked if asked >= WITNESSES else asked + sum(1 for _ in islice(_witnesses(view, sight, inquiry), WITNESSES))
    return max(1, min(WITNESSES, there))


def _slurm_says(view: View, sight: Sight, node: str) -> str:
    """Slurm itself holds the node for dead, and not only because this host's network is out of order: it hears
    others. What was set down here it shows so because of that; of a node that was only drained it is its own word."""
    info = view.slurm.node(node)
    if info is None or (view.unfit(node) and not view.state.node(node).drained):
        return ""
    bad = info.states & elsewhere.GONE
    return "+".join(sorted(bad)) if bad and any(name != node for name in sight.in_service) else ""


def _finding(
    view: View,
    inquiry: Inquiry,
    what: What,
    source: Source,
    by: str,
    words: list[Word],
    dead: bool = False,
    spare: bool = False,
) -> Finding:
    answers = "; ".join(str(word) for word in words)
    said = f"no message from {inquiry.node} for {view.now - inquiry.since:.2f} s" + (f" ({answers})" if answers else "")
    element, node = inquiry.element, inquiry.node
    return Finding(
        what, inquiry.job, (), view.now, source, said, element=element, node=node, by=by, dead=dead, spare=spare
    )


def _say(view: View, sight: Sight, inquiry: Inquiry, out: Outcome) -> None:
    """Puts on record, once, what keeps a silent agent from being judged."""
    if view.now - inquiry.since <= view.config.lease:
        return
    slurm = _slurm_says(view, sight, inquiry.node)
    reached = lives(view, inquiry, bool(slurm))
    said = "it lives: others reach it" if reached else ""
    witnessed = inquiry.witnessed() if view.now - inquiry.begun > ANSWER_SECONDS / 2 else []
    if not said and (witnessed or slurm) and not sight.may_go_on(inquiry.job)[0]:
        said = (
            "more of its job is silent than is heard: they may go on by themselves. Where they are dead, say so: "
            + elsewhere.declare_dead(view, inquiry.node)
        )
    if said and said != inquiry.said:
        inquiry.said = said
        answers = "; ".join(map(str, reached or inquiry.witnessed()))
        reason = (
            f"no message from {inquiry.job}_{inquiry.element} on {inquiry.node}, which is not taken for lost: {said}"
        )
        record = records.Silence(
            element=inquiry.element, node=inquiry.node, reason=reason + (f" ({answers})" if answers else "")
        )
        out.record(view.state.jobs[inquiry.job], record)
