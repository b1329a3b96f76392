"""The worth of hot spares: nodes that do not work, so that a lost one's place is taken at once
(docs/design/hot-spares.md).

Each of m working nodes fails once in MTBF hours, and without a spare its place stays empty until another node is found
and its processes have started. The number of empty places is then Poisson distributed with mean m x wait / MTBF,
whatever the distribution of the waits (M/G/infinity; Erlang's formula without blocking). With s spares the job runs on
m - max(0, n - s) nodes while n are out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from unicron_planner.problem.objective import number, whole

FURTHEST = 12.0  # the largest number of empty places that counts, in standard deviations


def worth(
    flops: Mapping[int, float], members: int, spares: int, min_nodes: int, mtbf_node_hours: float, wait_seconds: float
) -> dict[int, float]:
    """Nodes in all (members + 1 to members + spares) -> FLOP/s that the spares among them save on average. flops: T by
    node count; a count that is not listed runs as the next smaller one. Raises PlanError for invalid numbers."""
    whole(members, "members", least=1)
    whole(spares, "spares")
    mean = members * number(wait_seconds, "wait_seconds") / (3600.0 * number(mtbf_node_hours, "mtbf", positive=True))
    rates, rate = [], 0.0
    for size in range(members + 1):
        rate = flops.get(size, rate)
        rates.append(rate if size >= max(1, min_nodes) else 0.0)
    last = min(members, math.ceil(mean + FURTHEST * math.sqrt(mean)) + 2)
    out = [math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) if mean else float(n == 0) for n in range(last)]
    out.append(max(0.0, 1.0 - math.fsum(out)))  # the last number stands for all larger ones
    without = math.fsum(chance * rates[members - places] for places, chance in enumerate(out))
    found, before = {}, 0.0
    for count in range(1, spares + 1):
        having = math.fsum(chance * rates[members - max(0, places - count)] for places, chance in enumerate(out))
        before = found[members + count] = max(before, having - without)  # sums are not exact to the last bit
    return found
