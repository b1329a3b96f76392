"""Doors that are known to answer: this controller's own sockets have got through to them.

Where one of these refuses later it is no firewall that has refused all along, so of an agent whose peers' connections
broke, and that does not answer, a refusal need not wait for its lease (`sense.silence`). Each door is tried once when
its agent has come, a few at a time: thousands come at once, and who is silent is asked about by the same threads.
"""

from __future__ import annotations

from unicron_ctl.controller.model.inquiry import Inquiry
from unicron_ctl.controller.model.requests import Greeting
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.sense import questions
from unicron_ctl.reach import Reach

AT_ONCE = 8  # doors that are being tried, of 64 threads


def look(view: View, out: Outcome) -> None:
    """Tries the doors of agents that have come. Where Slurm is used it has to say first where their nodes are."""
    live = view.live
    if view.slurm.used and view.slurm.seen is None:
        return
    while live.untried and live.trying < AT_ONCE:
        key = live.untried.popitem(last=False)[0]
        agent = live.agent(*key)
        address = questions.targets(view, agent.node, agent.door)[0] if agent is not None and agent.alive else ""
        if agent is not None and address:
            live.trying += 1
            out.requests.append(Greeting(agent.job, agent.element, agent.agent, address))


def answered(view: View, greeting: Greeting, answer: Reach | None) -> None:
    """What came of it; None: the try itself failed."""
    view.live.trying -= 1
    agent = view.live.agent(greeting.job, greeting.element)
    if agent is not None and agent.agent == greeting.agent and answer is Reach.REACHED:
        agent.answers_at = greeting.address


def known(view: View, inquiry: Inquiry) -> bool:
    """The door that is asked about has answered this controller."""
    agent = view.live.agent(inquiry.job, inquiry.element)
    return agent is not None and bool(inquiry.targets[0]) and agent.answers_at == inquiry.targets[0]
