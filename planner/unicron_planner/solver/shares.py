"""Division of the nodes among owners: by weight, and never by what jobs claim to do with them.

The weights are bounded by the admin; FLOP/s, transition times and minima are claims. So only weights, the sizes at
which jobs can run and the nodes that jobs have now take part here (docs/design/planning.md, *Between owners*).

Think of a water level that rises for all owners alike: at level l an owner of weight w may have w x l nodes. An owner
whose jobs can use no more, or whose next usable number needs more nodes than are left, leaves the rest to the others.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from unicron_planner.problem.objective import Job, Scenario

CLOSE = 1e-9  # relative error of a level
HIGHEST = 1e300  # stands for a level at which all owners have as much as they can use


@dataclass(frozen=True)
class Claim:
    """The nodes that one owner can be given."""

    owner: str
    steps: tuple[tuple[float, int], ...]
    """(weight, nodes that jobs up to this weight can use), ascending; so a small job of great weight does not raise the
    share of the owner's other jobs."""
    totals: int
    """Bit k is set if the jobs can use k nodes in all."""
    holds: int
    """Nodes that the jobs have now."""
    floor: int
    """Nodes of them that hold the state of running jobs."""
    elsewhere: int = 0
    """Nodes outside this problem, as in `Scenario`."""

    @property
    def most(self) -> int:
        """The most nodes that the jobs can use together."""
        return self.steps[-1][1]

    @property
    def weight(self) -> float:
        """The largest of the jobs' weights. A sum would favour an owner who splits a job into several."""
        return self.steps[-1][0]

    def share_at(self, level: float) -> float:
        """The nodes that the owner may have when the water is at `level`."""
        above = [weight * level + self.most - upto for weight, upto in self.steps]
        return max(0.0, min(self.most, min(above) - self.elsewhere))

    def level(self, nodes: int) -> float:
        """The lowest level at which the owner may have `nodes` nodes."""
        return max(
            0.0 if missing <= 0 else missing / weight if weight else math.inf
            for weight, upto in self.steps
            for missing in [nodes + self.elsewhere - (self.most - upto)]
        )

    def bends(self) -> list[float]:
        """The levels at which `share_at` bends: the first node, the last one, and each change of step."""
        crossings = [
            (above - upto) / (weight - lighter)
            for (lighter, upto), (weight, above) in itertools.combinations(self.steps, 2)
        ]
        return [self.level(0), self.level(self.most), *crossings]

    def usable(self, nodes: int) -> int:
        """The largest number up to `nodes` that the jobs can use."""
        return max(0, (self.totals & ((2 << nodes) - 1)).bit_length() - 1)

    def following(self, nodes: int) -> int | None:
        """The next larger number that the jobs can use; None if `nodes` is all they can use."""
        rest = self.totals >> (nodes + 1)
        return nodes + (rest & -rest).bit_length() if rest else None

    def turn_for(self, nodes: int) -> tuple[float, bool, float, str]:
        """The sort key of the owner's turn for `nodes` nodes, after all owners have their shares by weight.

        A number up to what its jobs hold now counts as one less, so nobody is disturbed for a fraction of a node."""
        kept = nodes <= self.holds
        return self.level(nodes - kept), kept, -self.weight, self.owner


def claim(owner: str, jobs: Sequence[Job], nodes: int, elsewhere: int = 0) -> Claim:
    """The Claim of an owner of these jobs, if there are `nodes` nodes in all."""
    totals, by_weight = 1, dict[float, int]()
    for job in jobs:
        sizes = _sizes(job, nodes)
        totals = (totals | _sums(totals, sizes)) & ((2 << nodes) - 1)
        by_weight[job.weight] = by_weight.get(job.weight, 0) + max(sizes, default=0)
    steps, total = [], 0
    for weight in sorted(by_weight):
        total += by_weight[weight]
        steps.append((weight, total))
    holds = sum(job.holds for job in jobs)
    floor = sum(min(job.keep, job.holds) for job in jobs)
    return Claim(owner, tuple(steps), totals, holds, floor, elsewhere)


def _sizes(job: Job, nodes: int) -> range | list[int]:
    """The sizes worth asking for, ascending: whole replicas, with a throughput above zero."""
    table = job.rates
    low = max(job.min_nodes, 1)
    high = nodes if job.max_nodes is None else min(nodes, job.max_nodes)
    found = table.sizes[(table.sizes >= low) & (table.sizes <= high) & (table.rates > 0)]
    if job.unit > 1 and len(found):
        found = found[(found % job.unit == 0) | (found == found[0])]
    if len(found) and job.unit == 1 and int(found[-1]) - int(found[0]) == len(found) - 1:
        return range(int(found[0]), int(found[-1]) + 1)
    return [int(size) for size in found]


def _sums(totals: int, sizes: range | list[int]) -> int:
    """All sums of a number in `totals` and one in `sizes`, as bits."""
    if isinstance(sizes, list):
        found = 0
        for size in sizes:
            found |= totals << size
        return found
    found, width = totals << sizes.start, 1
    while width < len(sizes):
        step = min(width, len(sizes) - width)
        found |= found << step
        width += step
    return found


def divide(scenario: Scenario) -> dict[str, int]:
    """Divides the nodes among the owners: n' at most, unless more hold the state of running jobs. An owner whose jobs
    can use their share by weight gets at least that, rounded down to whole nodes."""
    n = scenario.nodes
    elsewhere = scenario.elsewhere
    claims = [claim(owner, jobs, n, elsewhere.get(owner, 0)) for owner, jobs in scenario.owners.items()]
    given = {one.owner: one.floor for one in claims}
    left = max(0, n - sum(given.values()))
    level = _level(claims, n)
    for one in sorted(claims, key=lambda one: (one.level(one.holds), one.owner)):
        share = math.floor(one.share_at(level) * (1 + CLOSE) + CLOSE)
        now = given[one.owner]
        given[one.owner] = max(now, one.usable(min(share, now + left)))
        left -= given[one.owner] - now
    _deal(claims, given, left)
    return given


def _level(claims: Sequence[Claim], nodes: int) -> float:
    """The highest level at which there are nodes for everything that it allows, numbers that the jobs cannot
    use included. Between two bends the sum of the shares is a straight line."""

    def total(level: float) -> float:
        return sum(one.share_at(level) for one in claims)

    bends = sorted({0.0, *(level for one in claims for level in one.bends() if level < math.inf)})
    if total(bends[-1]) <= nodes:
        return HIGHEST
    low, high = 0, len(bends) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if total(bends[middle]) <= nodes else (low, middle)
    below, above = total(bends[low]), total(bends[high])
    return bends[low] + (bends[high] - bends[low]) * (nodes - below) / (above - below)


def _deal(claims: Sequence[Claim], given: dict[str, int], left: int) -> None:
    """Deals out the nodes that are left, turn by turn. An owner whose next usable number needs more nodes than are left
    drops out."""
    by_owner = {one.owner: one for one in claims}
    turns: list[tuple[tuple[float, bool, float, str], int]] = []
    for one in claims:
        wanted = one.following(given[one.owner])
        if wanted is not None:
            heapq.heappush(turns, (one.turn_for(wanted), wanted))
    while turns and left:
        (*_, owner), wanted = heapq.heappop(turns)
        if wanted - given[owner] > left:
            continue
        left -= wanted - given[owner]
        given[owner] = wanted
        following = by_owner[owner].following(wanted)
        if following is not None:
            heapq.heappush(turns, (by_owner[owner].turn_for(following), following))
