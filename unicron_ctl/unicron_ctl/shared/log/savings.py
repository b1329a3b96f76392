"""Sums up what acting would have saved in partitions that are only observed: a pure function over the log.

While a job trains on fewer nodes than the plan would give it, the difference counts: nodes that idle because nobody
starts the job's lost elements on them. Transitions are not subtracted, so the sum is an upper bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event

WEEK_SECONDS = 7 * 86400.0
KINDS = (records.ActionObserved, records.GenerationEntered, records.JobEnded)  # the records that count
PLAN = "plan"


def observed_week(
    events: Iterable[Event],
    since: float,
    until: float,
    ranks_per_node: Mapping[str, int],
    before: records.ObservedWeek | None = None,
) -> records.ObservedWeek:
    """Sum up the events between two times, in seconds since the epoch. The events must be in order; other kinds are
    ignored. before: the sum of the time before, with the nodes at its end."""
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
    hours, days = seconds / 3600.0, (until - since) / 86400.0
    ordered = sorted(calls.items(), key=lambda item: (-item[1], item[0]))
    counted = ", ".join(f"{count} {call}" for call, count in ordered)
    reason = (
        f"in {days:.1f} days of observing, acting would have given jobs up to {hours:.1f} more node-hours "
        f"(calls of Slurm not made: {counted or 'none'})"
    )
    return records.ObservedWeek(
        since=since, node_hours=hours, calls=dict(calls), planned=planned, nodes=nodes, reason=reason
    )


def _short(planned: Mapping[str, int], nodes: Mapping[str, int]) -> int:
    """Count the nodes that jobs lack at present."""
    return sum(max(0, want - nodes[job]) for job, want in planned.items() if job in nodes)
