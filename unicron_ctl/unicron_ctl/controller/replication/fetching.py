"""Fetches a newer state from other nodes' memory for ranks that will form a job (docs/design/memory.md). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.live import Fetching, ImageRoute
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.replication import nearest
from unicron_ctl.controller.replication.cuts import FAR, first_of, strategy_of
from unicron_ctl.controller.replication.forming import FormableGeneration
from unicron_ctl.controller.replication.receivers import holder_of
from unicron_ctl.controller.replication.strategy import State
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.protocol.structs import RankStatus

FETCH_SECONDS = 120.0  # without an image, or a byte of one; then the job goes on with the state of its ranks
FETCH_AGAIN_SECONDS = 1.0


@dataclass(frozen=True)
class FetchableState:
    """A state to fetch from other nodes' memory, newer than that of the ranks."""

    state: State
    ways: Sequence[nearest.Way]
    """The way of each part that ranks lack to them."""


def wanted_state(
    view: View, job: JobView, reports: Mapping[int, RankStatus], found: FormableGeneration | None
) -> FetchableState | None:
    """Return the newest state of which every part is with a rank that could begin with it, or in a living node's
    memory; None if the ranks can get nothing newer. found: what they could form with."""
    newest = job.state.newest_sound
    for state, ways in strategy_of(job).sources(view, job, reports):
        if newest is not None and state[0] > newest:
            continue
        if found is not None and state[0] <= found.iteration:
            return None
        if ways is not None:
            return FetchableState(state, ways) if ways else None
    return None


def fetch_orders(view: View, job: JobView, wanted: FetchableState | None) -> Outcome | None:
    """Return orders that bring the ranks a newer state, for which the job waits; None if there is none, or it does not
    arrive."""
    fetching = job.fetching
    if wanted is None:
        fetching.began = None
        return None
    moved = sum(agent.status.moved for agent in job.alive())
    if fetching.began is None or fetching.state != wanted.state:
        longest = max((way.seconds for way in wanted.ways), default=0.0)
        job.fetching = fetching = Fetching(wanted.state, view.now, moved, view.now, FETCH_SECONDS + FAR * longest)
    elif moved != fetching.moved or len(wanted.ways) != fetching.left:
        fetching.moved, fetching.moved_at = moved, view.now
    fetching.left = len(wanted.ways)
    _note_ways(job, fetching, wanted.ways)
    assert fetching.began is not None
    if view.now - fetching.moved_at >= FETCH_SECONDS or view.now - fetching.began >= fetching.most:
        return None
    out = Outcome()
    if view.now >= fetching.again_at:
        fetching.again_at = view.now + FETCH_AGAIN_SECONDS
        for way in wanted.ways:
            out.send(way.receiver, wire.Fetch(image=way.image, holder=holder_of(way.source)))
    return out


def _note_ways(job: JobView, fetching: Fetching, ways: Iterable[nearest.Way]) -> None:
    """Note, for people, where the images come from. The first order's words stay, since figures change at every check,
    unless its source has failed the receiver."""
    for way in ways:
        image = (way.image.kind, way.image.place, way.image.shard)
        route = fetching.words.get(image)
        receiver = job.agents.get(route.receiver) if route is not None else None
        if route is None or receiver is None or route.source in receiver.status.failing:
            fetching.words[image] = ImageRoute(way.receiver.element, way.source.images_at, way.words)


def fetched_from(job: JobView, iteration: int) -> str:
    """Return, for the plan's reason, where the state was fetched from, or that a newer one did not arrive. This also
    resets the job's fetching."""
    fetching, job.fetching = job.fetching, Fetching()
    if not fetching.words or fetching.state[0] < iteration:
        return ""
    late = f"iteration {fetching.state[0]} did not come: " if fetching.state[0] > iteration else ""
    routes = [f"place {place}: {route.words}" for (_, place, _), route in fetching.words.items()]
    return f" ({late}{first_of(routes, '; ')}; the other places have a rank with it)"
