"""The savings that acting would have brought in partitions that are only observed: a pure function over the log.

While the plan would give a job more nodes than it trains on, the difference is what acting would have brought: nodes
that idle because nobody starts its lost elements on them. Transitions are not taken off, so it is an upper bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event

WEEK_SECONDS = 7 * 86400.0
KINDS = (records.ActionObserved, records.GenerationEntered, records.JobEnded)  # all that it needs of a log
PLAN = "plan"


def observed_week(
    events: Iterable[Event],
    since: float,
    until: float,
    ranks_per_node: Mapping[str, int],
    before: records.ObservedWeek | None = None,
) -> records.ObservedWeek:
    """The sum of the events between two times (seconds since the epoch), which must be in order; those of other kinds
    count for nothing. before: the sum of the time before it, which says how things stood."""
    planned = dict(before.planned) if before else {}
    nodes = dict(before.nodes) if before else {}
    calls: Counter[str] = Counter()
    seconds, at = 0.0, since
    for event in events:
        seconds += _short(planned, nodes) * max(0.0, event.time - at)
        at = max(at, event.time)
        record = event.record
        if isinstance(record, records.JobEnded):
            planned.pop(event.job, None)
            nodes.pop(event.job, None)
        elif isinstance(record, records.GenerationEntered):
            per_node = max(1, ranks_per_node.get(event.job, 1))
            nodes[event.job] = len({slot // per_node for slot in record.members})
        elif isinstance(record, records.ActionObserved):
            if record.action == PLAN:
                planned[event.job] = record.nodes
            else:
                calls[record.action] += 1
    seconds += _short(planned, nodes) * max(0.0, until - at)
    hours = seconds / 3600.0
    counted = ", ".join(
        f"{count} {call}" for call, count in sorted(calls.items(), key=lambda item: (-item[1], item[0]))
    )
    days = (until - since) / 86400.0
    reason = (
        f"in {days:.1f} days of observing, acting would have given jobs up to {hours:.1f} more node-hours "
        f"(calls of Slurm not made: {counted or 'none'})"
    )
    return records.ObservedWeek(
        since=since, node_hours=hours, calls=dict(calls), planned=planned, nodes=nodes, reason=reason
    )


def _short(planned: Mapping[str, int], nodes: Mapping[str, int]) -> int:
    """Nodes that jobs lack at present."""
    return sum(max(0, want - nodes[job]) for job, want in planned.items() if job in nodes)
