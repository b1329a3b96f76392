"""Silence: agents that have not been heard of. It is not death.

A silent agent leads to questions at once, to other agents and to this controller's own sockets: does its door answer,
does its node's slurmd? Its node counts as lost on two independent kinds of evidence: the lease, and either witnesses
who cannot reach it, or Slurm. What goes wrong on the witness's side (names, descriptors) says nothing.

- Whoever refuses a connection lives: nobody listens at the agent's door, so only the agent died. Something on the way
  may refuse, too, so the node has to say it, or two. After the lease, or earlier at a door that is known (`doors`).
- Ranks that step together are alive: as long as their job's iterations end, none of its members is silent.
- When nobody at all is heard, the trouble is this controller's own, and nobody is judged. When most fall silent
  together, it may be, and no node is taken (`sense.together`).
- Those that cannot be heard may go on without this controller once they are a majority (docs/design/agreement.md):
  it never leaves out more than half of a generation but for those that are shown dead (`sense.elsewhere`).

Living agents stand in the order of their last word (`Live.leases`), so a tick looks at those only whose time is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from unicron.ctl.controller.failure_detector import doors, elsewhere, ending_nodes, probes, quorum
from unicron.ctl.controller.failure_detector.probes import ANSWER_SECONDS, ROUND_SECONDS, Sight
from unicron.ctl.controller.log import records
from unicron.ctl.controller.model.agent_view import AgentView
from unicron.ctl.controller.model.finding import Finding, Source, What
from unicron.ctl.controller.model.inquiry import OWN, Inquiry, Key, Word
from unicron.ctl.controller.model.job_state import NODE_ENDED, AgentRecord, JobState, Phase
from unicron.ctl.controller.model.requests import Probe
from unicron.ctl.controller.model.view import Outcome, View
from unicron.ctl.protocol.reach import Reach

MISSING_SECONDS = 0.5  # between two looks for agents that have not come back to a restarted controller
CLOSED = "its port is closed"
BY_LEASE = "lease and "  # how it is said that silence, and what else, showed the end


def look(view: View) -> Outcome:
    """Opens inquiries, asks, and reports what they came to. Called at every tick."""
    out, sight = Outcome(), Sight(view)
    inquiries = view.inquiries
    _alone(view, out)
    if not inquiries.recalled and view.now - view.started_at > view.config.restart_grace:
        inquiries.recalled = True
        _recall(view, out)
    ending_nodes.look(view, sight, out)
    for key, inquiry in list(_silent(view)):
        inquiries.open[key] = inquiry
    for key, inquiry in list(inquiries.open.items()):
        if not _still_silent(view, inquiry):
            inquiries.close(key)
            continue
        if not view.alone:
            early = _was_early(view, inquiry)
            if early:
                inquiry.probing = 0  # what is under way began too early
            if early or not inquiry.number or view.now - inquiry.begun > ROUND_SECONDS:
                inquiries.begin_round(inquiry, view.now)
            probes.ask(view, sight, inquiry, out)
        finding = verdict(view, sight, inquiry)
        if finding is not None:
            out.findings.append(finding)
            inquiries.close(key)
            if finding.by.startswith(BY_LEASE) and not finding.dead:
                inquiries.judged[key] = inquiry
            if finding.what is What.AGENT_DIED and not finding.answers:
                ending_nodes.begin(view, inquiry)
        else:
            _say(view, sight, inquiry, out)
    quorum.look(view, probes.ask_after(view), out)
    return out


# ---------------------------------------------------------------- who is silent
def late(view: View) -> list[AgentView]:
    """Living agents whose next word is late, the longest silent first."""
    found: list[AgentView] = []
    for key in view.live.leases:
        agent = view.live.agent(*key)
        if agent is None or view.now - agent.last_heard <= probes.ask_after(view):
            break  # all others have spoken later than this one
        found.append(agent)
    return found


def _silent(view: View) -> Iterator[tuple[Key, Inquiry]]:
    """Agents whose next word is late, those of which Slurm or its plugin says that they ended, those that do not answer
    after their peers' connections broke, and those that the log knows and that have not spoken to this controller since
    its start."""
    inquiries = view.inquiries
    for one in late(view):
        key = one.job, one.element
        if key not in inquiries.open and view.now - sign_of_life(view, one) > probes.ask_after(view):
            yield key, _inquiry(view, one)
    for key in chain(view.live.suspects, doors.hushed(view)):
        agent = view.live.agent(*key)
        if agent is not None and agent.alive and key not in inquiries.open:
            yield key, _inquiry(view, agent)
    if view.now - view.started_at > view.config.restart_grace and view.now >= inquiries.look_at:
        inquiries.look_at = view.now + MISSING_SECONDS
        for job in view.state.jobs.values():
            yield from _missing(view, job)


def _was_early(view: View, inquiry: Inquiry) -> bool:
    """This round began before its next word was late: what is silent then may have stopped for a moment only."""
    late = inquiry.since + probes.ask_after(view)
    return bool(inquiry.number) and inquiry.begun <= late < view.now


def _missing(view: View, job: JobState) -> Iterator[tuple[Key, Inquiry]]:
    live = view.job(job)
    for element, record in job.agents.items() if not job.over else ():
        key = job.job, element
        if element in live.agents or key in view.inquiries.open or (record.gone and not _needed_again(job, record)):
            continue
        targets = probes.targets(view, record.node, record.door)
        yield key, Inquiry(job.job, element, record.agent, record.node, view.started_at, targets)


def _recall(view: View, out: Outcome) -> None:
    """Those whom the controller before this one gave up because they were silent, and that have not come back: they
    are counted for `together` as if they had been heard at this one's start. Nodes that were taken are settled."""
    for job in view.state.jobs.values():
        for element, record in job.agents.items() if not job.over else ():
            if record.gone not in ("silent", NODE_ENDED) or view.unfit(record.node) or element in view.job(job).agents:
                continue
            targets = probes.targets(view, record.node, record.door)
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
    since, targets = sign_of_life(view, agent), probes.targets(view, agent.node, agent.door)
    return Inquiry(agent.job, agent.element, agent.agent, agent.node, since, targets)


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


# ---------------------------------------------------------------- what it comes to
def verdict(view: View, sight: Sight, inquiry: Inquiry) -> Finding | None:
    """Whether the agent died, or its node is lost; None while that is not known."""
    silent, lease = view.now - inquiry.since, view.config.lease
    agent = view.live.agent(inquiry.job, inquiry.element)
    ended = agent is not None and agent.suspect_since is not None  # somebody says that its task has
    if (ended or silent > lease) and (refused := _refused(sight, inquiry)):
        return _finding(view, inquiry, What.AGENT_DIED, Source.PEER, CLOSED, refused)
    if doors.ended(view, inquiry):
        told: list[Word | str] = [*inquiry.words.values()]
        told.append("its peers' connections broke, and its port had answered lately")
        return _finding(view, inquiry, What.AGENT_DIED, Source.PEER, CLOSED, told)
    if silent <= lease:
        return None
    job, words = view.state.jobs[inquiry.job], list(inquiry.words.values())
    if shown := elsewhere.shown_dead(view, job, inquiry.element, inquiry.since):
        what = What.NODE_LOST if elsewhere.hears_nothing(view, inquiry.node) else What.AGENT_DIED
        return _finding(view, inquiry, what, Source.SLURM, f"{BY_LEASE}Slurm ({shown})", words, dead=True)
    slurm = probes.slurm_says(view, sight, inquiry.node)
    if lives(view, inquiry, bool(slurm)) or (not words and view.now - inquiry.begun < ANSWER_SECONDS):
        return None
    free, either = sight.may_go_on(inquiry.job)
    if slurm and either:
        return _finding(view, inquiry, What.NODE_LOST, Source.SLURM, f"{BY_LEASE}Slurm ({slurm})", words)
    witnessed = [word for word in inquiry.witnessed() if word.door is not Reach.REACHED]
    if free and witnessed and len(witnessed) >= probes.needed(view, sight, inquiry):
        if all(word.unreachable for word in witnessed) and not probes.slurmd_is(inquiry):
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
    others = any(key[0] == inquiry.job for key in inquiry.asked) or any(
        probes.own_witnesses(sight.view, sight, inquiry)
    )
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


def _finding(
    view: View,
    inquiry: Inquiry,
    what: What,
    source: Source,
    by: str,
    words: Sequence[Word | str],
    dead: bool = False,
    spare: bool = False,
) -> Finding:
    told = "; ".join(str(word) for word in words)
    said = f"no message from {inquiry.node} for {view.now - inquiry.since:.2f} s" + (f" ({told})" if told else "")
    element, node = inquiry.element, inquiry.node
    answers = what is What.AGENT_DIED and (dead or probes.slurmd_is(inquiry))
    who = Finding(what, inquiry.job, (), view.now, source, said, element=element, node=node, by=by)
    return replace(who, dead=dead, answers=answers, spare=spare)


def _say(view: View, sight: Sight, inquiry: Inquiry, out: Outcome) -> None:
    """Puts on record, once, what keeps a silent agent from being judged."""
    if view.now - inquiry.since <= view.config.lease:
        return
    slurm = probes.slurm_says(view, sight, inquiry.node)
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
