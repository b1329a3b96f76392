"""Many agents that fall silent together: then this controller suspects itself, also where a few are still heard.

A head node that is cut off with one rack hears that rack, and witnesses there confirm that all others are dead. So
while more than half of all agents are silent since about the same time, no node is taken out of service and nothing is
requeued (`Inquiries.doubt`); each job is healed within what it has as always (`sense.elsewhere`). Whoever is shown dead
does not count, nor whoever has been silent for `state_wait_seconds`: so it ends by itself.
"""

from __future__ import annotations

from itertools import chain

from unicron_ctl.controller.log import records
from unicron_ctl.controller.model.inquiry import Inquiry
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.sense import elsewhere

LEAST = 4  # agents, and nodes, below which most is no crowd
WINDOW_LEASES = 2.0  # within which the last words of those that fell silent together lie
TOGETHER_SECONDS = 0.5  # between two counts of silent agents, unless a node is about to be taken
UNSURE_PERIODS = 0.6  # heartbeat periods after which an agent's next word may be late already
UNSEEN = ("", "silent", "agent died")  # how an agent is gone of which nobody has seen the end; "": not judged yet
MOST = "more than half of all agents fell silent together, so this controller's own network may be the cause"
UNSURE = "whether most others fell silent with it is not known yet"


def look(view: View, after: float, out: Outcome) -> None:
    """Says whether silence is to be believed now, before what was found at this tick is judged. after: seconds of
    silence after which an agent is late. Only `sense.silence` calls it; it changes `view.inquiries`."""
    inquiries, now = view.inquiries, view.now
    due = now >= inquiries.counted_at and bool(inquiries.open or inquiries.judged or inquiries.doubt)
    urgent = inquiries.most_since is None and bool(out.findings or view.state.deferred)
    if view.alone or not (due or urgent):
        return
    inquiries.counted_at = now + TOGETHER_SECONDS
    for key, inquiry in list(inquiries.judged.items()):
        if not _counts(view, inquiry):
            del inquiries.judged[key]
    silent, heard = _silent(view, after)
    agents = len(silent) + heard
    if most := _most(view, silent, heard):
        inquiries.most_at = now
    if most and inquiries.most_since is None:
        inquiries.most_since = now
        said = f"{len(silent)} of {agents} agents are silent, {MOST}: no node is taken out of service and nothing is "
        reason = f"{said}requeued until most are heard, or shown dead"
        out.record(None, records.MostSilent(silent=len(silent), agents=agents, reason=reason))
    elif inquiries.most_since is not None and now - inquiries.most_at > view.config.lease:
        seconds, inquiries.most_since = now - inquiries.most_since, None
        reason = f"most agents are silent together no more, after {seconds:.1f} s: {heard} of {agents} are heard"
        out.record(None, records.MostHeard(seconds=seconds, reason=reason))
    if inquiries.most_since is not None:
        inquiries.doubt = MOST
    else:
        inquiries.doubt = UNSURE if _most(view, *_silent(view, UNSURE_PERIODS * view.config.heartbeat_period)) else ""


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


def _silent(view: View, after: float) -> tuple[list[float], int]:
    """The last words of those that have been silent for longer than that, and not for too long, in order; and how many
    are heard."""
    leases, oldest = view.live.leases, view.now - view.config.state_wait_seconds
    found, late = [one.since for one in _unheard(view) if one.since >= oldest], 0
    for key in leases:  # those that have been silent for longest first
        agent = view.live.agent(*key)
        if agent is None or view.now - agent.last_heard <= after:
            break
        late += 1
        if agent.last_heard >= oldest and key not in view.inquiries.judged:
            found.append(agent.last_heard)
    return sorted(found), len(leases) - late


def _unheard(view: View) -> chain[Inquiry]:
    """Those that are silent and not in the order of leases: given up, or not heard since this controller's start."""
    inquiries = view.inquiries
    missing = (one for key, one in inquiries.open.items() if view.live.agent(*key) is None)
    return chain(inquiries.judged.values(), missing)


def _most(view: View, silent: list[float], heard: int) -> bool:
    """They are more than half, their last words lie close to each other, and they are no handful."""
    half, width = (len(silent) + heard) // 2, WINDOW_LEASES * view.config.lease
    if len(silent) <= half or len(silent) + heard < LEAST:
        return False
    close = any(silent[place + half] - silent[place] <= width for place in range(len(silent) - half))
    return close and _on_many_nodes(view)


def _on_many_nodes(view: View) -> bool:
    nodes = set()
    living = (agent.node for key in view.live.leases if (agent := view.live.agent(*key)) is not None)
    for node in chain(living, (inquiry.node for inquiry in _unheard(view))):
        nodes.add(node)
        if len(nodes) >= LEAST:
            return True
    return False
