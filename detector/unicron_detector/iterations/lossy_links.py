"""Which node loses packets, from what each node's connections lost by peer.

A sender sees that a packet did not arrive, not whose fault it was: both ends of a connection look alike. So the node is
named that explains most lossy connections. Where one connection alone is lossy, both of its ends are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

LEAST_LOST, LEAST_SHARE = 5.0, 0.03  # segments, and of those sent, from which a link is lossy
HINT_LOST = 2.0  # the same of a link that only decides between the ends of another
MOST_NODES = 4  # no more than one node in so many is named: else it is the network
Link = tuple[str, str]


@dataclass(frozen=True)
class Blame:
    """The share of segments that were lost."""

    nodes: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[Link, float] = field(default_factory=dict)
    """Links of which neither end explains more."""


def blame(losses: Mapping[Link, tuple[float, float]], nodes: Collection[str]) -> Blame:
    """Say who loses packets. losses: (from, to) -> segments (sent, lost). nodes: those that may be named; other ends
    are hosts that nothing else is known of."""
    sums = _both_ways(losses)
    shares = {link: lost / max(sent, lost) for link, (sent, lost) in sums.items() if lost > 0}
    bad = {link for link, share in shares.items() if share >= LEAST_SHARE and sums[link][1] >= HINT_LOST}
    lossy = {link for link in bad if sums[link][1] >= LEAST_LOST}
    culprits: list[str] = []
    while (worst := _most_explained(lossy, sums)) is not None:
        culprits.append(worst)
        lossy = {link for link in lossy if worst not in link}
        bad = {link for link in bad if worst not in link}
    links = []
    for link in sorted(lossy):
        if (end := _worse_end(link, bad)) is not None:
            culprits.append(end)
        else:
            links.append(link)
    if len(culprits) + len(links) > max(1, len(nodes) // MOST_NODES):
        return Blame()
    named = _worst_shares(culprits, nodes, shares)
    return Blame(named, {link: shares[link] for link in links if set(link) & set(nodes)})


def _worst_shares(culprits: list[str], nodes: Collection[str], shares: Mapping[Link, float]) -> dict[str, float]:
    return {node: max(share for link, share in shares.items() if node in link) for node in culprits if node in nodes}


def _both_ways(losses: Mapping[Link, tuple[float, float]]) -> dict[Link, tuple[float, float]]:
    """Return the sums of both directions of each link."""
    sums: dict[Link, tuple[float, float]] = {}
    for (sender, receiver), (sent, lost) in losses.items():
        if sender != receiver:
            link = min(sender, receiver), max(sender, receiver)
            before = sums.get(link, (0.0, 0.0))
            sums[link] = before[0] + sent, before[1] + lost
    return sums


def _worse_end(link: Link, bad: Collection[Link]) -> str | None:
    """Return the end of a lossy link that loses some packets to others, too; None if both do, or neither."""
    more = {end for other in bad if other != link for end in other if end in link}
    return more.pop() if len(more) == 1 else None


def _most_explained(lossy: Collection[Link], sums: Mapping[Link, tuple[float, float]]) -> str | None:
    """Return the end of most lossy links, of equals the one that lost most; None if no two links have a common end."""
    count = Counter(end for link in lossy for end in link)

    def order(end: str) -> tuple[int, float, str]:
        return count[end], sum(sums[link][1] for link in lossy if end in link), end

    best = max(count, key=order, default="")
    return best if count[best] > 1 else None
