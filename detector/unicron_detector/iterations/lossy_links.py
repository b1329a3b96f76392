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
    sums: dict[Link, list[float]] = {}
    for (sender, receiver), (sent, lost) in losses.items():
        if sender != receiver:
            both = sums.setdefault((min(sender, receiver), max(sender, receiver)), [0.0, 0.0])
            both[0], both[1] = both[0] + sent, both[1] + lost
    shares = {link: lost / max(sent, lost) for link, (sent, lost) in sums.items() if lost > 0}
    lossy = {link for link, share in shares.items() if share >= LEAST_SHARE and sums[link][1] >= LEAST_LOST}
    hints = {link for link, share in shares.items() if share >= LEAST_SHARE and sums[link][1] >= HINT_LOST}
    culprits: list[str] = []
    while lossy:
        worst = _most_explained(lossy, sums)
        if worst is None:
            break
        culprits.append(worst)
        lossy = {link for link in lossy if worst not in link}
        hints = {link for link in hints if worst not in link}
    links = []
    for link in sorted(lossy):
        more = Counter(end for each in hints if each != link for end in each if end in link)
        if len(more) == 1:
            culprits.append(next(iter(more)))
        else:
            links.append(link)
    if len(culprits) + len(links) > max(1, len(nodes) // MOST_NODES):
        return Blame()
    named = {node: max(share for link, share in shares.items() if node in link) for node in culprits if node in nodes}
    return Blame(named, {link: shares[link] for link in links if set(link) & set(nodes)})


def _most_explained(lossy: Collection[Link], sums: Mapping[Link, list[float]]) -> str | None:
    """Return the end of most lossy links, of equals the one that lost most; None if no two links have a common end."""
    count = Counter(end for link in lossy for end in link)
    lost: Counter[str] = Counter()
    for link in lossy:
        for end in link:
            lost[end] += sums[link][1]  # type: ignore[assignment]
    best = max(count, key=lambda end: (count[end], lost[end], end))
    return best if count[best] > 1 else None
