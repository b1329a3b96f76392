"""Doors and slurmds that are known to answer, and agents that do not answer after their peers' connections broke.

Such an agent's lease need not be waited for when its node says itself that nobody listens there any more. But something
on the way may refuse, too, and always have. So each door is tried now and then while all is well, and a refusal counts
early (`ended`) only at a door that has answered lately, from this controller and from all who were asked, while another
door of the same job answers this controller at the same time (the control). A slurmd's port is tried beside the door:
where it has never answered from here, be it another port or a filter on the way, that it refuses says nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from unicron.ctl.controller.failure_detector import probes
from unicron.ctl.controller.model.inquiry import Inquiry, Key
from unicron.ctl.controller.model.requests import Greeting
from unicron.ctl.controller.model.view import Outcome, View
from unicron.ctl.protocol.reach import Reach

AT_ONCE = 8  # doors that are being tried, of 64 threads: who is silent is asked about by the same ones
TRY_SECONDS = 300.0  # between two tries of a door
KNOWN_SECONDS = 2 * TRY_SECONDS  # for which an answer counts
UNANSWERED_SECONDS = 0.3  # for an agent to answer after others' ranks stopped; then others are asked about it
MOST_HUSHED = 2  # agents of a job that are asked about so; more are rather slow to answer, and keep their leases


def look(view: View) -> Outcome:
    """Tries the doors that are due, a few at a time. Where Slurm is used it has to say first where the nodes are."""
    out, live = Outcome(), view.live
    if view.alone or (view.slurm.used and view.slurm.seen is None):
        return out
    while live.doors and live.trying < AT_ONCE:
        key, due = next(iter(live.doors.items()))
        if due > view.now:
            break
        live.doors[key] = view.now + TRY_SECONDS
        live.doors.move_to_end(key)
        agent = live.agent(*key)
        if agent is None or not agent.alive:
            continue
        for node, address in zip(("", agent.node), probes.targets(view, agent.node, agent.door), strict=True):
            if address:
                live.trying += 1
                out.requests.append(Greeting(agent.job, agent.element, agent.agent, address, node))
    return out


def answered(view: View, greeting: Greeting, answer: Reach | None) -> None:
    """What came of it; None: the try itself failed."""
    view.live.trying -= 1
    if node := greeting.slurmd:
        if answer is Reach.REACHED:
            view.live.slurmds[node] = greeting.address
        return
    agent = view.live.agent(greeting.job, greeting.element)
    if agent is not None and agent.agent == greeting.agent:
        agent.answers_at, agent.answered = greeting.address if answer is Reach.REACHED else "", view.now


def slurmd_known(view: View, node: str, address: str) -> bool:
    """The node's slurmd has answered at this address, so that a refusal there means something."""
    return bool(address) and address in (view.live.slurmds.get(node), view.state.node(node).slurmd)


def hushed(view: View) -> Iterator[Key]:
    """Agents that others are asked about, since they have not answered for a while: the last few of a job."""
    if not view.live.unanswered:
        return
    count = Counter(job for job, _ in view.live.unanswered)
    for key, at in view.live.unanswered.items():
        if view.now - at > UNANSWERED_SECONDS and count[key[0]] <= MOST_HUSHED:
            yield key


def ended(view: View, inquiry: Inquiry) -> bool:
    """The agent's node says that nobody listens at its door any more, before its lease is over."""
    key, words = (inquiry.job, inquiry.element), inquiry.words
    agent = view.live.agent(*key)
    if agent is None or key not in view.live.unanswered or agent.answers_at != inquiry.targets[0]:
        return False
    known = bool(agent.answers_at) and view.now - agent.answered <= KNOWN_SECONDS
    all_say = words.keys() == inquiry.asked.keys() and all(word.door is Reach.REFUSED for word in words.values())
    return known and all_say and inquiry.control is Reach.REACHED
