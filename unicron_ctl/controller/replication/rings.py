"""To whom copies of the training state go: the agents in order of their elements, in a ring. Pure.

Whoever was given least comes first, so that the nodes behind one switch do not all give to the first one behind the
next; of equals the next one after the giver.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence

from unicron.ctl.controller.model.agent_view import AgentView
from unicron.ctl.protocol import ranges

Away = Mapping[int, Collection[str]]  # by element, the nodes to which its copies do not go while there are others


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


def refusing(agents: Sequence[AgentView], before: Mapping[int, Mapping[str, str]]) -> dict[int, dict[str, str]]:
    """By element, the nodes that have taken no image from it, and why: those that its agent tells of, and those from
    before as long as it tells of any. When they are too many to be passed over no more are counted."""
    at = {agent.images_at: agent.node for agent in agents}
    found: dict[int, dict[str, str]] = {}
    for agent in agents:
        if told := {at[address]: one.why for address, one in agent.refusing.items() if address in at}:
            known = before.get(agent.element, {})
            found[agent.element] = {**known, **told} if len(known) < ranges.MOST_PASSED_OVER else dict(known)
    return found


def passed_over(refusing: Mapping[int, Collection[str]]) -> Away:
    """Of those who take nothing. A giver's word counts for its own copies alone: it may be its own network that fails.
    That, or that nobody has room, it is where so many took nothing, and looking for others would have no end: its
    copies go where they went first."""
    return {giver: nodes for giver, nodes in refusing.items() if len(nodes) < ranges.MOST_PASSED_OVER}


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
