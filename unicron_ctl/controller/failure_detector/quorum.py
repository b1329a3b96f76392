"""Many agents that fall silent together: then this controller suspects itself, also where a few are still heard.

A head node that is cut off with one rack hears that rack, and witnesses there confirm that all others are dead. So
while the agents on more than half of all nodes are silent since about the same time, no node is taken out of service
and nothing is requeued (`Inquiries.doubt`); each job is healed within what it has as always (`sense.elsewhere`). A node
that this controller's own sockets reach counts as one that is heard: a user may stop his agents, and the network is not
the cause. Whoever is shown dead does not count, nor whoever has been silent for `state_wait_seconds`: so it ends by
itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain

from unicron.ctl.controller.failure_detector import elsewhere
from unicron.ctl.controller.log import records
from unicron.ctl.controller.model.agent_view import AgentView
from unicron.ctl.controller.model.inquiry import Inquiry, Key
from unicron.ctl.controller.model.job_state import AGENT_DIED, NODE_ENDED
from unicron.ctl.controller.model.view import Outcome, View

LEAST = 4  # nodes below which most is no crowd
WINDOW_LEASES = 2.0  # within which the last words of nodes that fell silent together lie
TOGETHER_SECONDS = 0.5  # between two counts of silent nodes, unless a node is about to be taken
UNSURE_PERIODS = 0.6  # heartbeat periods after which an agent's next word may be late already
UNSEEN = (
    "",
    "silent",
    AGENT_DIED,
    NODE_ENDED,
)  # how an agent is gone of which nobody has seen the end; "": not judged yet
MOST = "the agents on most nodes fell silent together, so this controller's own network may be the cause"
UNSURE = "whether most others fell silent with it is not known yet"


def look(view: View, after: float, out: Outcome) -> None:
    """Says whether silence is to be believed now, before what was found at this tick is judged. after: seconds of
    silence after which an agent is late. Only `sense.silence` calls it; it changes `view.inquiries`."""
    inquiries, now = view.inquiries, view.now
    some = inquiries.open or inquiries.judged or inquiries.doubt or inquiries.unsure
    due = now >= inquiries.counted_at and bool(some)
    urgent = inquiries.most_since is None and bool(out.findings or view.state.deferred)
    if view.alone or not (due or urgent):
        return
    inquiries.counted_at = now + TOGETHER_SECONDS
    for key, inquiry in list(inquiries.judged.items()):
        if not _counts(view, inquiry):
            del inquiries.judged[key]
    silent, heard = _silent(view, after)
    most = _most(view, silent, heard)
    if most and (inquiries.most_since is not None or _tried(view, silent)):
        inquiries.most_at = now
        if inquiries.most_since is None:
            inquiries.most_since = now
            nodes = len(silent) + len(heard)
            said = f"{len(silent)} of {nodes} nodes are silent: {MOST}. No node is taken out of service and nothing is "
            reason = f"{said}requeued until most are heard, or shown dead"
            out.record(None, records.MostSilent(silent=len(silent), nodes=nodes, reason=reason))
    elif inquiries.most_since is not None and now - inquiries.most_at > view.config.lease:
        seconds, inquiries.most_since = now - inquiries.most_since, None
        reason = f"most nodes are silent together no more, after {seconds:.1f} s"
        out.record(None, records.MostHeard(seconds=seconds, reason=reason))
    inquiries.doubt = MOST if most or inquiries.most_since is not None else ""
    soon = not inquiries.doubt and _most(view, *_silent(view, UNSURE_PERIODS * view.config.heartbeat_period))
    inquiries.unsure = UNSURE if soon else ""


def _counts(view: View, inquiry: Inquiry) -> bool:
    """The agent was given up because it was silent, and still is, as far as anybody knows."""
    job = view.state.jobs.get(inquiry.job)
    record = job.agents.get(inquiry.element) if job is not None and not job.over else None
    if job is None or record is None or record.agent != inquiry.agent or record.gone not in UNSEEN:
        return False
    agent = view.live.agent(inquiry.job, inquiry.element)
    speaks = agent is not None and agent.alive and agent.last_heard > inquiry.since
    if speaks or view.now - inquiry.since > view.config.state_wait_seconds:
        return False
    return not elsewhere.shown_dead(view, job, inquiry.element, inquiry.since)


def _silent(view: View, after: float) -> tuple[dict[str, float], set[str]]:
    """The nodes of which no agent has been heard for longer than that, and not for too long, with their last words; and
    those that are heard, or reached from here: of these no more than are needed to see that the others are not most."""
    leases, oldest = view.live.leases, view.now - view.config.state_wait_seconds
    silent: dict[str, float] = {}
    heard: set[str] = set()

    def late(node: str, last: float, inquiry: Inquiry | None) -> None:
        if inquiry is not None and inquiry.reached:
            heard.add(node)
        elif last >= oldest:
            silent[node] = max(last, silent.get(node, last))

    for inquiry in _unheard(view):
        late(inquiry.node, inquiry.since, inquiry)
    for agent in _agents(view, leases):  # those that have been silent for longest first
        if view.now - agent.last_heard <= after:
            break
        key = agent.job, agent.element
        if key not in view.inquiries.judged:
            late(agent.node, agent.last_heard, view.inquiries.open.get(key))
    for node in heard:
        silent.pop(node, None)
    for agent in _agents(view, reversed(leases)):
        if view.now - agent.last_heard > after or len(heard) >= len(silent):
            break
        heard.add(agent.node)
        silent.pop(agent.node, None)
    return silent, heard


def _agents(view: View, keys: Iterable[Key]) -> Iterator[AgentView]:
    return (agent for key in keys if (agent := view.live.agent(*key)) is not None)


def _unheard(view: View) -> Iterator[Inquiry]:
    """Those that are silent and not in the order of leases: given up, or not heard since this controller's start."""
    inquiries = view.inquiries
    missing = (one for key, one in inquiries.open.items() if view.live.agent(*key) is None)
    return chain(inquiries.judged.values(), missing)


def _tried(view: View, silent: Collection[str]) -> bool:
    """Nobody is believed to be out of reach whom this controller's own sockets have not tried: a user who stops his
    agents for a moment, again and again, would keep everybody's nodes from being taken."""
    inquiries = view.inquiries
    waiting = {one.node for one in inquiries.open.values() if one.reached is None and any(one.targets)}
    waiting |= {one.node for one in inquiries.judged.values() if one.reached is None and one.probing}
    return not any(node in waiting for node in silent)


def _most(view: View, silent: Mapping[str, float], heard: Collection[str]) -> bool:
    """They are more than half, their last words lie close to each other, and they are no handful."""
    half, width = (len(silent) + len(heard)) // 2, WINDOW_LEASES * view.config.lease
    if len(silent) <= half or len(silent) + len(heard) < LEAST:
        return False
    last = sorted(silent.values())
    return any(last[place + half] - last[place] <= width for place in range(len(last) - half))
