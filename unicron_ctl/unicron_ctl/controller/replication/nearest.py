"""From where a piece of training state is got soonest: the nearest principle, by measured bandwidth. Pure
(docs/design/memory.md).

A rank that has it needs nothing, and what lies in a node's memory is only pointed out to its ranks. Else another node
gives it: the one from which it would be there first, by its size, by how fast images went between the two of late, and
by what either has to send and to receive already. From whom it could not get images of late, by what its agent reports,
it gets this one last, whatever was measured before. What no memory has is read from files, by the ranks.
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
RECEIVERS = 4  # ranks of a place that are weighed; more would not have it sooner
MOST_NAMED = 3  # failing sources in a text


@dataclass(frozen=True)
class Way:
    """The way of an image to the ranks of one place. seconds: until it is there, counted from now."""

    receiver: AgentView
    source: AgentView
    image: Image
    seconds: float
    words: str


@dataclass
class Load:
    """element -> seconds of sending, or of receiving, that are given out already."""

    sends: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    receives: dict[int, float] = field(default_factory=lambda: defaultdict(float))


def usual(agents: Iterable[AgentView]) -> float:
    """Bytes a second between two of them of which nothing is known."""
    measured = [rate for agent in agents for rate in agent.status.rates.values()]
    return max(LEAST_RATE, statistics.median(measured)) if measured else USUAL_RATE


def measured_rate(one: AgentView, other: AgentView) -> float | None:
    """Bytes a second between the two, as either has seen them; the less of both."""
    seen = [one.status.rates.get(other.element), other.status.rates.get(one.element)]
    return min((max(LEAST_RATE, rate) for rate in seen if rate is not None), default=None)


def ways(
    job: JobView,
    reports: Mapping[int, RankStatus],
    missing: Sequence[int],
    there: Mapping[int, Mapping[str, tuple[AgentView, Image]]],
    domains: Mapping[str, str],
) -> list[Way]:
    """Return a way for each missing place; none where one has no way, or nothing is missing. reports: of the ranks
    that can enter. there: place -> node -> who has the image. domains: node -> the switch behind which it is."""
    size, load, rate, found = job.replica, Load(), usual(job.alive()), []
    able: dict[int, list[AgentView]] = defaultdict(list)
    for slot in sorted(reports):
        if (agent := job.agent(slot)) is not None:
            able[slot % size].append(agent)
    for place in missing:
        way = nearest(able[place], there.get(place, {}), load, rate, domains)
        if way is None:
            return []
        found.append(way)
    return found


def nearest(
    receivers: Sequence[AgentView],
    there: Mapping[str, tuple[AgentView, Image]],
    load: Load,
    usual_rate: float,
    domains: Mapping[str, str],
) -> Way | None:
    """The one of these by which the image is there first; what it takes is added to the load. From whom a receiver
    could not get images of late it is to get this one last. None where nobody has it, or nobody can take it."""
    for agent in receivers:
        if agent.node in there:
            source, image = there[agent.node]
            return Way(agent, source, image, 0.0, f"from the memory of its own node {agent.node}")
    best: tuple[tuple[int, float, bool, int, int], Way] | None = None
    for receiver in receivers[:RECEIVERS]:
        for source, image in there.values():
            known, failing = measured_rate(receiver, source), receiver.status.failing.get(source.images_at)
            busy = max(load.sends[source.element], load.receives[receiver.element])
            seconds = busy + image.bytes / (known or usual_rate)
            far = domains.get(source.node, "") != domains.get(receiver.node, "")
            rank = failing.times if failing else 0, seconds, far, source.element, receiver.element
            if best is None or rank < best[0]:
                how = f"{(known or usual_rate) / 1e6:,.0f} MB/s {'measured' if known else 'supposed'}"
                size = f"{image.bytes / 1e6:,.1f} MB, {seconds:.1f} s at {how}"
                words = f"{receiver.node} from {source.node} ({size}{_failed_tries(receiver, source, there)})"
                best = rank, Way(receiver, source, image, seconds, words)
    if best is None:
        return None
    way = best[1]
    # Where sizes are not known each image counts a little: sources take turns then, too.
    load.sends[way.source.element] = load.receives[way.receiver.element] = way.seconds + 1e-6
    return way


def _failed_tries(receiver: AgentView, source: AgentView, there: Mapping[str, tuple[AgentView, Image]]) -> str:
    """From whom the receiver could not get images, and so takes this source, for people; empty where there is none."""
    failing = {one.node: found for one, _ in there.values() if (found := receiver.status.failing.get(one.images_at))}
    again = failing.pop(source.node, None)
    said = [f"; tries that failed: {again.times}, the last: {again.why}"] if again else []
    return "".join([*said, *(f"; not from {node}: {found.why}" for node, found in list(failing.items())[:MOST_NAMED])])
