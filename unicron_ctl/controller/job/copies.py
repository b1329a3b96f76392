"""In how many nodes the training state is, which copies are made of it, and who gets one when ranks need it. Pure
(docs/design/memory.md).

A place of the layout that several nodes train needs no copies: each replica is one. For the others the controller names
cuts, iterations of which all nodes keep the state and some give it to others. A cut of which every place is in enough
nodes is *good*: the job can go on from it whatever that many nodes fail at once. Which cuts are good is what the agents
say that they have, so a controller that was restarted knows it, too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from transition.memory.images import STATE
from unicron_ctl.controller.job import spares
from unicron_ctl.controller.job.candidates import Formed, states
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.job import Phase
from unicron_ctl.controller.model.live import JobView
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.protocol import wire
from unicron_ctl.protocol.wire import RankStatus

CUT_SECONDS = 5.0  # between two cuts, at least
LOOK_SECONDS = 0.5  # between two looks whether it is good
CUT_LIMIT_SECONDS = 120.0  # for a cut to become good; then another one is tried
AHEAD_SECONDS = 1.0  # for the word to reach all ranks before they come by the iteration
AHEAD = 2  # iterations, at least
FETCH_SECONDS = 120.0  # for images to be got; then the job goes on from what its ranks have
FETCH_AGAIN_SECONDS = 1.0

State = tuple[int, str]  # (iteration, mark)


@dataclass
class Cuts:
    """What is remembered for now of one job's: the last that was asked for, and when; the newest from which it can go
    on; and, of those who were there then, in how many more nodes which places are to be, and who gives what he has to
    whom."""

    asked: int = -1
    asked_at: float = 0.0
    good: int = -1
    look_at: float = 0.0
    there: tuple[object, ...] = ()
    wanting: dict[int, int] = field(default_factory=dict)
    targets: dict[int, list[wire.Holder]] = field(default_factory=dict)


# ---------------------------------------------------------------- who has what
def holders(job: JobView) -> dict[int, set[int]]:
    """place -> elements whose members train it."""
    found: dict[int, set[int]] = defaultdict(set)
    for slot in job.state.members:
        found[slot % job.replica].add(job.state.element(slot))
    return found


def wanting(job: JobView) -> dict[int, int]:
    """place -> in how many more nodes its state is to be than train it; nothing where all have enough, or copies cannot
    be made."""
    agents = [agent for agent in job.alive() if agent.images_at]
    nodes, wanted = {agent.node for agent in agents}, 1 + job.state.settings.copies
    if not job.live.remembers or len(agents) < len(job.alive()):
        return {}
    most = min(wanted, len(nodes))
    trained = {place: {job.agents[e].node for e in found if e in job.agents} for place, found in holders(job).items()}
    return {place: most - len(found) for place, found in sorted(trained.items()) if len(found) < most}


def images(agents: Iterable[AgentView]) -> dict[State, dict[int, dict[str, tuple[AgentView, wire.Image]]]]:
    """state -> place -> node -> who has it."""
    found: dict[State, dict[int, dict[str, tuple[AgentView, wire.Image]]]] = defaultdict(lambda: defaultdict(dict))
    for agent in agents:
        for image in agent.images:
            if image.kind == STATE:  # shards have their own way (transition.safekeeping)
                found[image.iteration, image.mark][image.place][agent.node] = agent, image
    return found


def newest_good(job: JobView, enough: bool = True) -> int:
    """The newest iteration of which every place's state lies in enough nodes' memory, or, if that is not asked, in any;
    -1 where there is none."""
    agents, size = job.alive(), job.replica
    most = min(1 + job.state.settings.copies, len({agent.node for agent in agents})) if enough else 1
    whole = [
        iteration
        for (iteration, _), places in images(agents).items()
        if len(places) == size and all(len(nodes) >= most for nodes in places.values())
    ]
    return max(whole, default=-1)


# ---------------------------------------------------------------- making copies
def cut(view: View, job: JobView, cuts: Cuts) -> Iterator[tuple[AgentView, wire.Cut]]:
    """The cut that each agent is to keep, for those that have not heard of it. Called at every tick."""
    state = job.state
    if state.over or state.phase is not Phase.RUNNING or state.plan is None or state.restart_mode:
        return
    job.live.fetch_since = None
    if view.now >= cuts.look_at or state.plan.generation != next(iter(cuts.there), -1):
        cuts.look_at = view.now + LOOK_SECONDS
        _look(view, job, cuts)
        _ask(view, job, cuts)
    for agent in [agent for agent in job.alive() if agent.cut != cuts.asked] if cuts.wanting else []:
        yield agent, wire.Cut(iteration=cuts.asked, good=cuts.good, targets=cuts.targets.get(agent.element, []))


def _look(view: View, job: JobView, cuts: Cuts) -> None:
    """Who is there to keep copies: whoever came has heard of no cut, and what was lost is to be made again."""
    assert job.state.plan is not None
    waits = [element for element, how in spares.standing(job).items() if how == "ready"]
    agents = [(one.element, one.node, one.images_at) for one in job.alive()]
    there = job.state.plan.generation, *agents, *waits
    if there != cuts.there:
        cuts.there, cuts.wanting, cuts.asked_at = there, wanting(job), -math.inf
        cuts.targets = targets(job, cuts.wanting, view.slurm.domains, waits)


def _ask(view: View, job: JobView, cuts: Cuts) -> None:
    """Name another cut where the last one is good, or has come to nothing."""
    waited = view.now - cuts.asked_at
    if waited < CUT_SECONDS or not cuts.wanting:
        return
    good = newest_good(job)
    if cuts.asked > good and waited < CUT_LIMIT_SECONDS:
        return
    cuts.good = good if good >= 0 else newest_good(job, enough=False)  # what there is stays until there is a better one
    known = [cuts.asked, *(agent.cut for agent in job.alive())]
    ahead = max(AHEAD, math.ceil(AHEAD_SECONDS / max(job.state.seconds or AHEAD_SECONDS, 1e-3)))
    cuts.asked, cuts.asked_at = max(job.state.iteration + 1 + ahead, 1 + max(known)), view.now


def targets(
    job: JobView, missing: Mapping[int, int], domains: Mapping[str, str], waiting: Collection[int] = ()
) -> dict[int, list[wire.Holder]]:
    """By element, to whom it gives what it has of a cut; of several that train a place the first gives it. domains:
    node -> with what it fails. waiting: elements that are hot spares, which begin with what they have when they take a
    place."""
    if not missing:
        return {}
    trained, room = holders(job), Receivers(job, domains, waiting)
    chosen: dict[int, dict[int, wire.Holder]] = defaultdict(dict)
    for place, left in missing.items():
        giver = min(trained[place])
        has = {job.agents[element].node for element in trained[place] if element in job.agents}
        for _ in range(left):
            if (one := room.next(place, giver, has)) is None:
                break
            has.add(one.node)
            chosen[giver][one.element] = holder(one)
    return {giver: list(each.values()) for giver, each in chosen.items()}


class Receivers:
    """Who could be given a copy. Whatever fails with the nodes that have the state comes last: with their switch, or
    their block. Of the rest a hot spare whose ranks would take that place comes first, then the elements after the
    giver's."""

    def __init__(self, job: JobView, domains: Mapping[str, str], waiting: Collection[int]) -> None:
        self._ring = [one for one in job.alive() if one.images_at]
        self._domains, self._all = domains, {domains.get(one.node, "") for one in self._ring}
        self._position = {one.element: place for place, one in enumerate(self._ring)}
        self._spares: dict[int, list[AgentView]] = defaultdict(list)  # by the places that they would take
        for one in self._ring:
            for place in {slot % job.replica for slot in one.slots} if one.element in waiting else ():
                self._spares[place].append(one)

    def next(self, place: int, giver: int, has: Collection[str]) -> AgentView | None:
        """The next one for a state of which these nodes have a copy."""
        used = {self._domains.get(node, "") for node in has}
        able, begin = self._spares.get(place, []), self._position.get(giver, -1) + 1
        for avoid in (used, set[str]()) if self._all - used else (set[str](),):
            for agents, first in (able, 0), (self._ring, begin):
                if (found := self._first(agents, first, has, avoid)) is not None:
                    return found
        return None

    def _first(
        self, agents: Sequence[AgentView], first: int, has: Collection[str], avoid: Collection[str]
    ) -> AgentView | None:
        for step in range(len(agents)):
            one = agents[(first + step) % len(agents)]
            if one.node not in has and self._domains.get(one.node, "") not in avoid:
                return one
        return None


def holder(agent: AgentView) -> wire.Holder:
    """As others reach it."""
    return wire.Holder(element=agent.element, address=agent.images_at, token=agent.token)


# ---------------------------------------------------------------- getting them back
@dataclass(frozen=True)
class Wanted:
    """state: newer than what the ranks could form with; orders: what makes it theirs."""

    state: State
    orders: list[tuple[AgentView, wire.Fetch]]


def waits(view: View, job: JobView, reports: Mapping[int, RankStatus], found: Formed | None) -> Outcome | None:
    """The job is not formed yet: its ranks get a newer state first. None where there is none, or it has not come in
    time."""
    live = job.live
    more = None if job.state.restart_mode else wanted(job, reports, found)
    if more is None:
        return None
    if live.fetch_since is None:
        live.fetch_since = view.now
    if view.now - live.fetch_since >= FETCH_SECONDS:
        return None
    out = Outcome()
    if view.now >= live.fetch_at:
        live.fetch_at = view.now + FETCH_AGAIN_SECONDS
        for agent, order in more.orders:
            out.send(agent, order)
    return out


def wanted(job: JobView, reports: Mapping[int, RankStatus], found: Formed | None) -> Wanted | None:
    """The newest state of which every place is with a rank that could begin with it, or in a living node's memory; None
    where the ranks have nothing newer to get. Each image comes from the node that gives least so far."""
    size, given = job.replica, defaultdict[int, int](int)
    there = images(agent for agent in job.alive() if agent.images_at)
    ranks: dict[State, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for slot, status in sorted(reports.items()):
        for one in states(status):
            ranks[one][slot % size].append(slot)
    for one in sorted(there, reverse=True):
        if found is not None and one[0] <= found.iteration:
            return None
        orders = _orders(job, reports, size, ranks[one], there[one], given)
        if orders:
            return Wanted(one, orders)
    return None


def _orders(
    job: JobView,
    reports: Mapping[int, RankStatus],
    size: int,
    ranks: Mapping[int, list[int]],
    there: Mapping[int, Mapping[str, tuple[AgentView, wire.Image]]],
    given: dict[int, int],
) -> list[tuple[AgentView, wire.Fetch]]:
    """What has to be got so that there is a rank with this state for every place; nothing where that cannot be."""
    orders = []
    by_place: dict[int, list[int]] = defaultdict(list)
    for slot in sorted(reports):
        by_place[slot % size].append(slot)
    for place in range(size):
        if ranks.get(place):
            continue
        able = by_place[place]
        if not able or not there.get(place):
            return []
        own = [slot for slot in able if (agent := job.agent(slot)) is not None and agent.node in there[place]]
        receiver = job.agent((own or able)[0])
        if receiver is None:
            return []
        near = there[place].get(receiver.node)
        source, image = near or min(there[place].values(), key=lambda each: (given[each[0].element], each[0].element))
        given[source.element] += 1
        orders.append((receiver, wire.Fetch(image=image, holder=holder(source))))
    return orders
