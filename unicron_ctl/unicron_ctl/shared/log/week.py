"""Reports on a span of time: failures, their cost, and what healing saved. A pure function over the log."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.protocol.answer_schema import CauseSum, JobSum, NodeSum, Report

HOUR = 3600.0
KINDS = (
    records.FailureDetected,
    records.FailureVerdict,
    records.JobHealed,
    records.NodeLost,
    records.NodeIsolated,
    records.NeedsAdmin,
    records.JobEnded,
)
"""The kinds of records that count."""
MOST_NODES = 100  # in a report: those with the most failures


class _Sums:
    """Counts events."""

    def __init__(self, spared: float) -> None:
        self.spared = spared  # seconds that a failure would cost without healing
        self.failures: dict[int, tuple[str, int, str, str]] = {}  # cause, severity, node, job
        self.jobs: dict[str, JobSum] = {}
        self.nodes: dict[str, Counter[str]] = defaultdict(Counter)
        self.needed_admin = 0

    def add(self, event: Event) -> None:
        record = event.record
        match record:
            case records.FailureDetected():
                self.failures[event.id] = record.cause, record.severity, record.node, event.job
                self._count(record.node, event.job)
            case records.FailureVerdict() if record.failure in self.failures:
                cause, severity, node, job = self.failures[record.failure]
                number = record.failure
                if record.slots:  # a part of it is a failure of its own from now on
                    number = event.id
                    self._count(node, job)
                self.failures[number] = record.cause or cause, record.severity or severity, node, job
            case records.JobHealed():
                self._add_healing(self._job(event.job), record)
            case records.NodeLost():
                self.nodes[record.node]["lost"] += 1
            case records.NodeIsolated():
                self.nodes[record.node]["out"] += 1
            case records.NeedsAdmin() if not record.over:
                self.needed_admin += 1
            case records.JobEnded() if record.code and event.job in self.jobs:
                self.jobs[event.job].ended_with = record.code
            case _:
                pass

    def _count(self, node: str, job: str) -> None:
        self._job(job).failures += 1
        if node:
            self.nodes[node]["failures"] += 1

    def _add_healing(self, job: JobSum, record: records.JobHealed) -> None:
        lost = record.lost_seconds * record.nodes / HOUR
        job.healed += 1
        job.lost_node_hours += lost
        job.saved_node_hours += max(0.0, self.spared * record.nodes / HOUR - lost)

    def _job(self, name: str) -> JobSum:
        return self.jobs.setdefault(name, JobSum(job=name))


def week(events: Iterable[Event], since: float, until: float, spared: float) -> Report:
    """Sum up the events from `since` to `until`, in seconds since the epoch; they must be in order. spared: seconds
    that a job would lose on all its nodes if it were requeued after a failure and began from its last checkpoint."""
    sums = _Sums(spared)
    for event in events:
        if since <= event.time <= until:
            sums.add(event)
    grouped: dict[tuple[str, int], list[tuple[str, str]]] = defaultdict(list)
    for cause, severity, node, job in sums.failures.values():
        grouped[cause, severity].append((node, job))
    causes = [
        CauseSum(
            cause=cause,
            severity=severity,
            failures=len(places),
            jobs=len({job for _, job in places}),
            nodes=len({node for node, _ in places if node}),
        )
        for (cause, severity), places in sorted(grouped.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    nodes = [
        NodeSum(node=name, failures=count["failures"], lost=count["lost"], out_of_service=count["out"])
        for name, count in sorted(sums.nodes.items(), key=lambda item: (-item[1].total(), item[0]))
    ]
    jobs = sorted(sums.jobs.values(), key=lambda job: (-job.lost_node_hours, job.job))
    return Report(
        since=since,
        until=until,
        causes=causes,
        jobs=jobs,
        nodes=nodes[:MOST_NODES],
        healed=sum(job.healed for job in jobs),
        lost_node_hours=sum(job.lost_node_hours for job in jobs),
        saved_node_hours=sum(job.saved_node_hours for job in jobs),
        spared_seconds=spared,
        needed_admin=sums.needed_admin,
    )
