"""Division of the nodes among owners: by weight, and never by what jobs claim to do with them.

The weights are bounded by the admin; FLOP/s, transition times and minima are claims. So only weights, the sizes at
which jobs can run and the nodes that jobs have now take part here (docs/design/planning.md, *Between owners*).

Think of a water level that rises at all owners alike: at level l an owner of weight w may have w x l nodes. Who has all
that their jobs can use, or who cannot use the next node without more than are left, leaves the rest to the others.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from unicron_planner.problem.objective import Job, Scenario

CLOSE = 1e-9  # relative error of a level
HIGHEST = 1e300  # stands for a level at which all have what they can use


@dataclass(frozen=True)
class Claim:
    """Nodes that one owner can be given. steps: (weight, nodes that jobs of less than this weight, or of it, can use),
    ascending; so a small job of much weight does not raise what the others get. totals: bit k is set where the jobs can
    use k nodes in all. holds: nodes that the jobs have. floor: those of them that hold the state of running jobs.
    elsewhere: see `Scenario`."""

    owner: str
    steps: tuple[tuple[float, int], ...]
    totals: int
    holds: int
    floor: int
    elsewhere: int = 0

    @property
    def most(self) -> int:
        """The most nodes that the jobs can use together."""
        return self.steps[-1][1]

    @property
    def weight(self) -> float:
        """The largest of the jobs' weights. The sum would give more to who splits a job into several."""
        return self.steps[-1][0]

    def share_at(self, level: float) -> float:
        """Nodes that the owner may have when the water is at `level`."""
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
        """The levels at which the owner begins to have nodes, at which it has all, and at which another step counts."""
        crossings = [
            (above - upto) / (weight - lighter)
            for (lighter, upto), (weight, above) in itertools.combinations(self.steps, 2)
        ]
        return [self.level(0), self.level(self.most), *crossings]

    def usable(self, nodes: int) -> int:
        """The largest number up to `nodes` that the jobs can use."""
        return max(0, (self.totals & ((2 << nodes) - 1)).bit_length() - 1)

    def following(self, nodes: int) -> int | None:
        """The next larger number that the jobs can use; None where they have all they can use."""
        rest = self.totals >> (nodes + 1)
        return nodes + (rest & -rest).bit_length() if rest else None

    def turn_for(self, nodes: int) -> tuple[float, bool, float, str]:
        """When the owner's turn for `nodes` nodes comes, among those who have what is theirs by weight. Nodes that its
        jobs have now count for one less, so nobody is disturbed for a fraction of a node."""
        kept = nodes <= self.holds
        return self.level(nodes - kept), kept, -self.weight, self.owner


def claim(owner: str, jobs: Sequence[Job], nodes: int, elsewhere: int = 0) -> Claim:
    """The Claim of an owner of these jobs, where there are `nodes` nodes."""
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
    """The sizes that are worth asking for, ascending: those at which the job brings anything, of whole replicas."""
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
    """All sums of one of `totals` and one of `sizes`, as bits."""
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
    """Nodes by owner, at most n' in all, unless those that hold the state of running jobs are more. Who can use what is
    theirs by weight has at least that, to a whole node."""
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
    """The highest level at which all may have what it allows them; what jobs cannot use beside each other counts as if
    they could. Between two bends the sum of what is allowed is a straight line."""

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
    """Deals the nodes that are left, one turn after the other. Who cannot use its next nodes without more than there
    are has no further turn."""
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
