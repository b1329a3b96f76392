"""Finds the source from which a piece of training state arrives soonest, by measured bandwidth
(docs/design/memory.md). Pure.

A rank that has the piece needs nothing, and ranks are merely told of one that is in their own node's memory. Otherwise
it comes from the node whose copy would arrive first, by its size, by the speed of recent transfers between the two, and
by what either already has to send and to receive. Sources that recently failed the receiver come last. What is in no
memory, the ranks read from files.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.shared.protocol.structs import Image, RankStatus

USUAL_RATE = 1e8  # bytes a second, until one was measured: a gigabit network's
LEAST_RATE = 1.0
RECEIVERS = 4  # ranks of a place that are considered; more would not get it sooner
MOST_NAMED = 3  # failing sources in a text


@dataclass(frozen=True)
class Way:
    """The way of an image to the ranks of one place."""

    receiver: AgentView
    source: AgentView
    image: Image
    seconds: float  # from now until it arrives
    words: str  # for people


@dataclass
class Load:
    """element -> seconds of sending and receiving that are assigned already."""

    sends: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    receives: dict[int, float] = field(default_factory=lambda: defaultdict(float))


def usual(agents: Iterable[AgentView]) -> float:
    """Return the bytes a second between two agents without a measurement."""
    measured = [rate for agent in agents for rate in agent.status.rates.values()]
    return max(LEAST_RATE, statistics.median(measured)) if measured else USUAL_RATE


def measured_rate(one: AgentView, other: AgentView) -> float | None:
    """Return the bytes a second between the two, the lower of their measurements."""
    rates = [one.status.rates.get(other.element), other.status.rates.get(one.element)]
    return min((max(LEAST_RATE, rate) for rate in rates if rate is not None), default=None)


def ways(
    job: JobView,
    reports: Mapping[int, RankStatus],
    missing: Sequence[int],
    there: Mapping[int, Mapping[str, tuple[AgentView, Image]]],
    domains: Mapping[str, str],
) -> list[Way]:
    """Return a way for each missing place; none if one has no way, or nothing is missing.

    reports: of ranks that can enter. there: place -> node -> agent and image. domains: node -> its switch.
    """
    size, load, rate, chosen = job.replica, Load(), usual(job.alive()), []
    able: dict[int, list[AgentView]] = defaultdict(list)
    for slot in sorted(reports):
        if (agent := job.agent(slot)) is not None:
            able[slot % size].append(agent)
    for place in missing:
        way = nearest(able[place], there.get(place, {}), load, rate, domains)
        if way is None:
            return []
        chosen.append(way)
    return chosen


def nearest(
    receivers: Sequence[AgentView],
    there: Mapping[str, tuple[AgentView, Image]],
    load: Load,
    usual_rate: float,
    domains: Mapping[str, str],
) -> Way | None:
    """Return the way by which the image arrives first, and add it to the load; None if nobody has the image, or nobody
    can take it. Sources that recently failed a receiver come last."""
    for agent in receivers:
        if agent.node in there:
            source, image = there[agent.node]
            return Way(agent, source, image, 0.0, f"from the memory of its own node {agent.node}")
    best: tuple[tuple[int, float, bool, int, int], Way] | None = None
    for receiver in receivers[:RECEIVERS]:
        for source, image in there.values():
            measured, failing = measured_rate(receiver, source), receiver.status.failing.get(source.images_at)
            busy = max(load.sends[source.element], load.receives[receiver.element])
            seconds = busy + image.bytes / (measured or usual_rate)
            far = domains.get(source.node, "") != domains.get(receiver.node, "")
            rank = failing.times if failing else 0, seconds, far, source.element, receiver.element
            if best is None or rank < best[0]:
                how = f"{(measured or usual_rate) / 1e6:,.0f} MB/s {'measured' if measured else 'supposed'}"
                size = f"{image.bytes / 1e6:,.1f} MB, {seconds:.1f} s at {how}"
                words = f"{receiver.node} from {source.node} ({size}{_failed_tries(receiver, source, there)})"
                best = rank, Way(receiver, source, image, seconds, words)
    if best is None:
        return None
    way = best[1]
    # If sizes are not known, each image counts a little, so that sources still take turns.
    load.sends[way.source.element] = load.receives[way.receiver.element] = way.seconds + 1e-6
    return way


def _failed_tries(receiver: AgentView, source: AgentView, there: Mapping[str, tuple[AgentView, Image]]) -> str:
    """Describe, for people, the sources that failed the receiver; empty if there are none."""
    reports = receiver.status.failing
    failing = {one.node: reports[one.images_at] for one, _ in there.values() if one.images_at in reports}
    again = failing.pop(source.node, None)
    tries = f"; tries that failed: {again.times}, the last: {again.why}" if again else ""
    return tries + "".join(f"; not from {node}: {one.why}" for node, one in list(failing.items())[:MOST_NAMED])
