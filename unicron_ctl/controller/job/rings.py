"""To whom copies of the training state go: the agents in order of their elements, in a ring. Pure.

Whoever was given least comes first, so that the nodes behind one switch do not all give to the first one behind the
next; of equals the next one after the giver.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from unicron_ctl.controller.model.agent_view import AgentView


class Ring:
    """agents: in order of their elements. domains: node -> with what it fails, its switch or its block."""

    def __init__(self, agents: Sequence[AgentView], domains: Mapping[str, str]) -> None:
        self._agents, self._domains = agents, [domains.get(one.node, "") for one in agents]
        self._place = {one.element: place for place, one in enumerate(agents)}
        self._given = [0] * len(agents)
        self._levels = [list(range(len(agents)))]  # by how many copies they were given: their places
        self._after = list(range(1, len(agents) + 1))  # the next place that fails with something else
        for place in reversed(range(len(agents) - 1)):
            if self._domains[place] == self._domains[place + 1]:
                self._after[place] = self._after[place + 1]

    def next(self, giver: int, has: Collection[str], avoid: Collection[str]) -> AgentView | None:
        """The next one on none of these nodes that fails with none of these."""
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

    def give(self, one: AgentView) -> None:
        """It gets another one; who is not in the ring does not count."""
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


def refusing(agents: Iterable[AgentView], giver: AgentView) -> set[str]:
    """Nodes that have taken no image from this one of late. Its word counts for its own copies alone: it may be its own
    network that fails."""
    return {one.node for one in agents if one.images_at in giver.refusing} if giver.refusing else set()


def pass_over(
    away: Collection[str], chosen: list[AgentView], has: set[str], other: Callable[[], AgentView | None]
) -> None:
    """Others come in the places of those that are chosen and refuse, where there are others. What the rest are given
    stays as it is."""
    for at, one in enumerate(chosen):
        if one.node in away:
            has.discard(one.node)
            chosen[at] = other() or one
            has.add(chosen[at].node)
