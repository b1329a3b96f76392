"""Self-suspicion: if no agent, or hardly any, is heard, the controller's own network is the likelier cause.

- If no agent at all is heard (`alone`), nobody is judged and nothing is sent.
- While the agents on more than half of all nodes are silent since about the same time (`Suspicions.doubt`), no node is
  taken out of service and nothing is requeued: a head node that is cut off together with one rack hears that rack,
  whose agents confirm that all others are dead. Each job is healed within what it has (:mod:`quorum`).

A node that the controller's own sockets reach counts as heard: then the network is not the cause. Nodes that are shown
dead, or silent for `state_wait_seconds`, do not count, so the doubt ends by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain

from unicron_ctl.controller.failure_detector import quorum
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.job_state import AGENT_DIED, NODE_ENDED
from unicron_ctl.controller.model.suspicion import Suspicion
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.shared.log import records

LEAST = 4  # nodes; of fewer, "most" proves nothing
WINDOW_LEASES = 2.0  # within which nodes that fall silent together speak last
COUNT_SECONDS = 0.5  # between two counts of silent nodes, unless a node is about to be taken
UNSURE_PERIODS = 0.6  # heartbeat periods after which an agent's next word may be late already
UNSEEN = ("", "silent", AGENT_DIED, NODE_ENDED)  # ends of agents that nobody has seen; "" is not judged yet
MOST = "the agents on most nodes fell silent together, so this controller's own network may be the cause"
UNSURE = "whether most others fell silent with it is not known yet"


# ---------------------------------------------------------------- nobody at all
def check_alone(view: View, out: Outcome) -> None:
    """Record that no agent at all is heard."""
    suspicions = view.suspicions
    leases: dict[tuple[str, int], AgentView] = view.live.leases
    agent = next(reversed(leases.values()), None)
    if agent is not None and view.now - agent.last_heard > view.config.lease:
        over = {job.job for job in view.state.jobs.values() if job.over}  # their agents end unheard
        leases = {key: one for key, one in leases.items() if one.job not in over}
        agent = next(reversed(leases.values()), None)
    if agent is not None:
        heard, many = agent.last_heard, len(leases) > 1
    else:
        expected = sum(not record.gone for _, _, record in view.known_agents())
        heard, many = view.started_at + view.config.restart_grace, expected > 1
    if many and view.now - heard > view.config.lease and suspicions.alone_since is None:
        suspicions.alone_since = heard
        reason = (
            "no agent at all is heard: this controller's own network is the likely cause. Nobody is judged, and "
            "nothing is sent, until somebody is heard"
        )
        out.record(None, records.Alone(reason=reason))
    elif not many:
        suspicions.alone_since = None  # according to Slurm, those that were not heard have ended


def end_alone(view: View, since: float) -> Outcome:
    """Give every agent a whole lease again: one speaks after all were silent since then."""
    out, suspicions, seconds = Outcome(), view.suspicions, view.now - since
    suspicions.alone_since = None
    for key in list(suspicions.open):
        suspicions.close(key)
    out.record(None, records.HeardAgain(seconds=seconds, reason=f"agents are heard again after {seconds:.1f} s"))
    return out


# ---------------------------------------------------------------- most at once
def check_most_silent(view: View, late_after: float, out: Outcome) -> None:
    """Decide whether silence counts as evidence now, before the findings of this tick are judged.

    late_after: seconds of silence after which an agent is late.
    """
    suspicions = view.suspicions
    some = suspicions.open or suspicions.given_up or suspicions.doubt or suspicions.unsure
    due = view.now >= suspicions.counted_at and bool(some)
    urgent = suspicions.most_since is None and bool(out.findings or view.state.deferred)
    if view.alone or not (due or urgent):
        return
    suspicions.counted_at = view.now + COUNT_SECONDS
    given_up = suspicions.given_up.items()
    suspicions.given_up = {key: suspicion for key, suspicion in given_up if _still_counts(view, suspicion)}
    silent, heard = _silent_nodes(view, late_after)
    most = _are_most(view, silent, heard)
    _note_most(view, most, silent, heard, out)
    suspicions.doubt = MOST if most or suspicions.most_since is not None else ""
    may_be = UNSURE_PERIODS * view.config.heartbeat_period
    suspicions.unsure = UNSURE if not suspicions.doubt and _are_most(view, *_silent_nodes(view, may_be)) else ""


def _note_most(view: View, most: bool, silent: Collection[str], heard: Collection[str], out: Outcome) -> None:
    """Record that most nodes are silent together once all have been probed, and that this is over a lease after they
    were last counted so."""
    suspicions, now = view.suspicions, view.now
    if most and (suspicions.most_since is not None or _all_probed(view, silent)):
        suspicions.most_at = now
        if suspicions.most_since is None:
            suspicions.most_since = now
            nodes = len(silent) + len(heard)
            reason = (
                f"{len(silent)} of {nodes} nodes are silent: {MOST}. No node is taken out of service and nothing is "
                "requeued until most are heard, or shown dead"
            )
            out.record(None, records.MostSilent(silent=len(silent), nodes=nodes, reason=reason))
    elif suspicions.most_since is not None and now - suspicions.most_at > view.config.lease:
        seconds, suspicions.most_since = now - suspicions.most_since, None
        reason = f"most nodes are silent together no more, after {seconds:.1f} s"
        out.record(None, records.MostHeard(seconds=seconds, reason=reason))


def _still_counts(view: View, suspicion: Suspicion) -> bool:
    """Whether an agent that was given up as silent still is, as far as anybody knows."""
    job = view.state.jobs.get(suspicion.job)
    record = job.agents.get(suspicion.element) if job is not None and not job.over else None
    if job is None or record is None or record.agent != suspicion.agent or record.gone not in UNSEEN:
        return False
    agent = view.live.agent(*suspicion.key)
    speaks = agent is not None and agent.alive and agent.last_heard > suspicion.since
    if speaks or view.now - suspicion.since > view.config.state_wait_seconds:
        return False
    return not quorum.shown_dead(view, job, suspicion.element, suspicion.since)


def _silent_nodes(view: View, after: float) -> tuple[dict[str, float], set[str]]:
    """Return silent nodes with their last words, and nodes that are heard or reached: only as many of the latter as it
    takes to see whether most nodes are silent.

    A node is silent if none of its agents was heard for longer than `after`, and not for too long.
    """
    leases, suspicions = view.live.leases, view.suspicions
    oldest = view.now - view.config.state_wait_seconds
    silent: dict[str, float] = {}
    heard: set[str] = set()

    def count_late(node: str, last: float, suspicion: Suspicion | None) -> None:
        if suspicion is not None and suspicion.reached:
            heard.add(node)
        elif last >= oldest:
            silent[node] = max(last, silent.get(node, last))

    # Agents without a lease: given up, or not heard since this controller's start.
    missing = (one for key, one in suspicions.open.items() if view.live.agent(*key) is None)
    for suspicion in chain(suspicions.given_up.values(), missing):
        count_late(suspicion.node, suspicion.since, suspicion)
    for agent in leases.values():  # those that have been silent for longest first
        if view.now - agent.last_heard <= after:
            break
        key = agent.job, agent.element
        if key not in suspicions.given_up:
            count_late(agent.node, agent.last_heard, suspicions.open.get(key))
    for node in heard:
        silent.pop(node, None)
    for agent in reversed(leases.values()):
        if view.now - agent.last_heard > after or len(heard) >= len(silent):
            break
        heard.add(agent.node)
        silent.pop(agent.node, None)
    return silent, heard


def _all_probed(view: View, silent: Collection[str]) -> bool:
    """Whether the controller's own sockets have tried every silent node. Otherwise a user who stops his agents again
    and again would keep everybody's nodes from being taken."""
    suspicions = view.suspicions
    waiting = {one.node for one in suspicions.open.values() if one.reached is None and any(one.targets)}
    waiting |= {one.node for one in suspicions.given_up.values() if one.reached is None and one.probing}
    return not any(node in waiting for node in silent)


def _are_most(view: View, silent: Mapping[str, float], heard: Collection[str]) -> bool:
    """Whether the silent are more than half, fell silent together, and are not just a handful."""
    nodes, width, last = len(silent) + len(heard), WINDOW_LEASES * view.config.lease, sorted(silent.values())
    half = nodes // 2
    together = any(last[place + half] - last[place] <= width for place in range(len(last) - half))
    return together and nodes >= LEAST
