"""Chooses the receivers of copies of the training state. Pure.

Here a switch or a block counts as one failure domain. :mod:`whole_states` and :mod:`shards` decide how many copies
there are, and :func:`unicron_transition.generations.sharding.partner_shifts` where ranks send copies of their shards by
themselves; these know nodes only.

The agents stand in a ring, in order of their elements. The agent with the fewest copies comes first, so that the nodes
behind one switch do not all give to the first one behind the next; of equals, the next one after the giver.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.shared.protocol import ranges, structs

Away = Mapping[int, Collection[str]]  # by element, nodes to which its copies do not go while there are others
NOBODY: Away = MappingProxyType({})


class Ring:
    """Agents in order of their elements."""

    def __init__(self, agents: Sequence[AgentView], domains: Mapping[str, str]) -> None:
        self._agents = agents
        self._domains = [domains.get(one.node, "") for one in agents]  # switches or blocks
        self._place = {one.element: place for place, one in enumerate(agents)}
        self._given = [0] * len(agents)
        self._levels = [list(range(len(agents)))]  # by how many copies they were given: their places
        self._after = list(range(1, len(agents) + 1))  # the next place in another failure domain
        for place in reversed(range(len(agents) - 1)):
            if self._domains[place] == self._domains[place + 1]:
                self._after[place] = self._after[place + 1]

    def next(self, giver: int, has: Collection[str], avoid: Collection[str]) -> AgentView | None:
        """Return the next agent after the giver on no node in `has` and in no domain in `avoid`."""
        begin = bisect_left(self._agents, giver + 1, key=lambda one: one.element)
        for level in self._levels:
            for first, last in ((begin, len(self._agents)), (0, begin)):
                at = bisect_left(level, first)
                while at < len(level) and level[at] < last:
                    place = level[at]
                    if self._domains[place] in avoid:
                        at = bisect_left(level, self._after[place], at)
                    elif self._agents[place].node in has:
                        at += 1
                    else:
                        return self._agents[place]
        return None

    def note_given(self, one: AgentView) -> None:
        """Count one more copy for the agent, if it is in the ring."""
        place = self._place.get(one.element)
        if place is None:
            return
        level = self._given[place]
        self._given[place] += 1
        if level + 1 == len(self._levels):
            self._levels.append([])
        del self._levels[level][bisect_left(self._levels[level], place)]
        above = self._levels[level + 1]
        above.insert(bisect_left(above, place), place)


def refusing(agents: Sequence[AgentView], before: Mapping[int, Mapping[str, str]]) -> dict[int, dict[str, str]]:
    """Return, by element, the nodes that have taken no image from it, and why.

    These are the nodes that its agent reports, and those from before as long as it reports any. Once they are too many
    to be passed over, no more are added.
    """
    at = {agent.images_at: agent.node for agent in agents}
    refusals: dict[int, dict[str, str]] = {}
    for agent in agents:
        if reported := {at[address]: one.why for address, one in agent.status.refusing.items() if address in at}:
            last = before.get(agent.element, {})
            refusals[agent.element] = {**last, **reported} if len(last) < ranges.MOST_PASSED_OVER else dict(last)
    return refusals


def passed_over(refusing: Mapping[int, Collection[str]]) -> Away:
    """Return, by element, the nodes that its copies pass over because they take nothing from it.

    A giver's word counts for its own copies alone, since its own network may fail. If too many nodes take nothing from
    it, that is so, or no node has room; then its copies go where they went first, since the search would not end.
    """
    return {giver: nodes for giver, nodes in refusing.items() if len(nodes) < ranges.MOST_PASSED_OVER}


def pass_over(
    away: Collection[str], chosen: list[AgentView], has: set[str], other: Callable[[], AgentView | None]
) -> None:
    """Replace chosen agents that refuse, if there are others. The rest stay as they are."""
    for at, one in enumerate(chosen):
        if one.node in away:
            has.discard(one.node)
            chosen[at] = other() or one
            has.add(chosen[at].node)


# ---------------------------------------------------------------- who gives to whom
def targets_by_element(
    able: Sequence[AgentView],
    inside: Collection[int],
    more: int,
    domains: Mapping[str, str],
    inside_first: bool = False,
    away: Away = NOBODY,
) -> dict[int, list[structs.Holder]]:
    """Return, by element inside, the `more` others to which it gives all that its ranks keep.

    Those behind another switch come first, and among these the next ones inside on other nodes, then those that wait.
    able: agents with a memory, in order of their elements. inside_first: agents inside come before all that wait, since
    a world that restarts could not get what those have.
    """
    members = [agent for agent in able if agent.element in inside]
    rings = Ring(members, domains), Ring([agent for agent in able if agent.element not in inside], domains)
    own = {agent.element: {agent.element} for agent in members}
    return _targets(able, own, dict.fromkeys(own, more), Receivers(rings, domains, {}, inside_first), away)


def targets_by_place(
    able: Sequence[AgentView],
    trainers: Mapping[int, Collection[int]],
    missing: Mapping[int, int],
    domains: Mapping[str, str],
    spares: Mapping[int, Sequence[AgentView]],
    away: Away = NOBODY,
) -> dict[int, list[structs.Holder]]:
    """Return, by element, the receivers of its parts of a cut; the first element that trains a place gives it.

    able: agents with a memory, in order of their elements. trainers: place -> elements that train it. missing: place ->
    how many more nodes should have its state. spares: place -> hot spares whose ranks would take it, and begin with
    what they have.
    """
    return _targets(able, trainers, missing, Receivers([Ring(able, domains)], domains, spares), away)


def _targets(
    able: Sequence[AgentView],
    trainers: Mapping[int, Collection[int]],
    missing: Mapping[int, int],
    room: Receivers,
    away: Away,
) -> dict[int, list[structs.Holder]]:
    agents = {agent.element: agent for agent in able}
    having = {place: agents.keys() & elements for place, elements in trainers.items()}
    givers = {place: min(having[place]) for place in missing if having.get(place)}
    there = {place: {agents[element].node for element in having[place]} for place in givers}
    beside: dict[int, set[str]] = defaultdict(set)
    for place, giver in givers.items():
        beside[giver] |= there[place]
    chosen: dict[int, list[AgentView]] = {}  # by place
    for place in sorted(givers, key=room.has_spare, reverse=True):  # a spare then also gets the giver's other places
        giver, has, chosen[place] = givers[place], there[place], []
        while len(chosen[place]) < missing[place] and (one := room.next(place, giver, has, beside[giver])) is not None:
            has.add(one.node)
            chosen[place].append(one)
    targets: dict[int, dict[int, structs.Holder]] = defaultdict(dict)
    for place, some in chosen.items():
        giver, has = givers[place], there[place]
        if gone := away.get(giver):
            pass_over(gone, some, has, partial(room.next, place, giver, has, beside[giver], gone))
        targets[giver] |= {one.element: holder_of(one) for one in some}
    return {giver: list(each.values()) for giver, each in targets.items() if each}


class Receivers:
    """The agents that could receive a copy.

    Agents in the failure domain of a node that has the state come last. An agent gives all that it has to each of its
    receivers, so those come first that already receive another place of the giver's. Then comes a hot spare whose ranks
    would take that place, then the agent of the rings with the fewest copies after the giver; among these, those first
    that train nothing of what the giver gives.
    """

    def __init__(
        self,
        rings: Sequence[Ring],
        domains: Mapping[str, str],
        spares: Mapping[int, Sequence[AgentView]],
        ring_by_ring: bool = False,
    ) -> None:
        self._rings, self._domains, self._spares = rings, domains, spares
        self._passes = [[ring] for ring in rings] if ring_by_ring else [rings]
        self._given: dict[int, list[AgentView]] = defaultdict(list)  # giver -> receivers

    def has_spare(self, place: int) -> bool:
        """Whether a hot spare's ranks would take the place."""
        return bool(self._spares.get(place))

    def next(
        self, place: int, giver: int, has: set[str], beside: set[str], away: Collection[str] = ()
    ) -> AgentView | None:
        """Return the next receiver of a state that is on the nodes in `has`, and count its copy.

        beside: nodes that train what else the giver gives. away: nodes that are passed over.
        """
        given, used = self._given[giver], {self._domains.get(node, "") for node in has}
        for rings, avoid in [(rings, avoid) for rings in self._passes for avoid in (used, set[str]())]:
            if (receiver := self._first(given, has.union(away), avoid)) is not None:
                return receiver
            for nodes in (has.union(beside, away), has.union(away)):
                spare = self._first(self._spares.get(place, ()), nodes, avoid)
                if receiver := spare or next(filter(None, (ring.next(giver, nodes, avoid) for ring in rings)), None):
                    for ring in self._rings:
                        ring.note_given(receiver)
                    given.append(receiver)
                    return receiver
        return None

    def _first(self, among: Iterable[AgentView], has: Collection[str], avoid: Collection[str]) -> AgentView | None:
        able = (one for one in among if one.node not in has)
        return next((one for one in able if self._domains.get(one.node, "") not in avoid), None)


def holder_of(agent: AgentView) -> structs.Holder:
    """Return how others reach the agent to give and get images."""
    return structs.Holder(element=agent.element, address=agent.images_at, token=agent.token)
