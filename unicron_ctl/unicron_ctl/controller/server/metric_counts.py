"""Metrics of what happened: counters and histograms, fed by the loop and by the threads that call Slurm.

Labels are bounded: they are words of this program, and causes up to :data:`MOST_CAUSES`. A counter whose labels are
known begins at 0, because Prometheus sees no increase in a series that begins at 1.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram

from unicron_ctl.controller.model.requests import OF_ELEMENTS, ON_NODES
from unicron_ctl.controller.server import event_lines
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event
from unicron_detector.failures.severity import Severity, default_table

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
LATE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)
MOST_CAUSES = 200  # an admin's [severity] names further ones; what is beyond counts as "other"
MOST_JUDGED = 1000  # failures of which more may be known later
ISOLATE, PLAN = "isolate", "plan"  # a node's leave or take-out, and a plan, as a whole
OUTCOMES: dict[type[records.Record], str] = {
    records.SlurmAction: "asked",
    records.SlurmDone: "done",
    records.SlurmFailed: "refused",
    records.TakeWithheld: "withheld",
    records.IsolationWithheld: "withheld",
    records.Observed: "observed",
}


class Recorded:
    """What is counted as it happens."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._make_counters(registry)
        self._detection, self._next, self._whole = (
            Histogram(f"unicron_{name}_seconds", text, buckets=SECONDS, registry=registry)
            for name, text in (
                ("detection", "From a fault, where its time is known, to its record."),
                ("next_step", "From the record of a failure to the job's next iteration."),
                ("full_strength", "From the record of a failure to an iteration with as many ranks as before."),
            )
        )
        self._slurm = Histogram(
            "unicron_slurm_seconds",
            "How long Slurm took: for a listing, and for each change.",
            ("call",),
            buckets=SECONDS,
            registry=registry,
        )
        self._late = Histogram(
            "unicron_loop_late_seconds",
            "How much later than due a turn of the loop came.",
            buckets=LATE_SECONDS,
            registry=registry,
        )
        self.failed = Tally[str]()  # failures of each living job
        self._causes: set[str] = set()
        self.expect(default_table().causes)
        self._judged: dict[int, tuple[str, int]] = {}  # failure -> cause and severity
        self._hit: dict[str, tuple[float, int]] = {}  # job -> when it failed first, the ranks that it had
        self._waiting: set[str] = set()  # jobs without an iteration since
        self._ranks: dict[str, int] = {}

    def _make_counters(self, registry: CollectorRegistry) -> None:
        of_failure = "cause", "severity"
        self._failures = Counter(
            "unicron_failures", "Failures of jobs, as they were first judged.", of_failure, registry=registry
        )
        self._verdicts = Counter(
            "unicron_failure_verdicts",
            "Failures that were judged anew, as they are since.",
            of_failure,
            registry=registry,
        )
        self._actions = Counter(
            "unicron_slurm_actions",
            "Changes in Slurm: asked, done, refused by Slurm, withheld by a limit, observed for a partition's mode.",
            ("action", "outcome"),
            registry=registry,
        )
        self._events = Counter("unicron_events", "Records of the event log, by kind.", ("kind",), registry=registry)
        for kind in event_lines.LEVELS:
            self._events.labels(str(kind.__struct_config__.tag))
        for call in (*ON_NODES, *OF_ELEMENTS):
            for outcome in set(OUTCOMES.values()):
                self._actions.labels(call, outcome)
        self._actions.labels(ISOLATE, "withheld")
        self._actions.labels(PLAN, "observed")

    def expect(self, causes: Iterable[str]) -> None:
        """Failures of these causes are counted from 0 on, with each severity: an escalation or an admin's rule may give
        any."""
        for cause in map(self._cause, causes):
            for severity in Severity:
                self._failures.labels(cause, str(int(severity)))
                self._verdicts.labels(cause, str(int(severity)))

    # ------------------------------------------------------------ called by the loop and by threads
    def slurm_took(self, call: str, seconds: float) -> None:
        """A listing ("list") or a change took so long; any thread may say so."""
        self._slurm.labels(call).observe(seconds)

    def loop_late(self, seconds: float) -> None:
        """A turn of the loop came later than due."""
        self._late.observe(max(0.0, seconds))

    def note(self, event: Event) -> None:
        """Count one record."""
        record, job = event.record, event.job
        self._events.labels(event.kind).inc()
        if isinstance(record, records.FailureDetected):
            self._note_failure(event, record)
        elif isinstance(record, records.FailureVerdict):
            self._note_verdict(record)
        elif isinstance(record, records.Step):
            self._note_step(job, event.time - record.ago, record.ranks)
        elif isinstance(record, records.JobEnded | records.JobSetAside):
            for known in (self._hit, self._ranks, self.failed):
                known.pop(job, None)
            self._waiting.discard(job)
        elif (outcome := OUTCOMES.get(type(record))) is not None:
            action = getattr(record, "action", ISOLATE)
            if action:  # without one it is a listing that failed
                self._actions.labels(action, outcome).inc()

    def _note_failure(self, event: Event, record: records.FailureDetected) -> None:
        job = event.job
        self._failures.labels(self._cause(record.cause), str(record.severity)).inc()
        self.failed[job] += 1
        self._judged[event.id] = record.cause, record.severity
        if len(self._judged) > MOST_JUDGED:
            del self._judged[next(iter(self._judged))]
        if record.fault_at is not None:
            self._detection.observe(max(0.0, event.time - record.fault_at))
        if job in self._ranks:
            self._hit.setdefault(job, (event.time, self._ranks[job]))
            self._waiting.add(job)

    def _note_verdict(self, record: records.FailureVerdict) -> None:
        known = self._judged.get(record.failure)
        if known is None:
            return
        severity = known[1] if record.severity is None else record.severity
        now = record.cause or known[0], severity
        if now != known:
            self._judged[record.failure] = now
            self._verdicts.labels(self._cause(now[0]), str(now[1])).inc()

    def _cause(self, cause: str) -> str:
        if cause not in self._causes and len(self._causes) >= MOST_CAUSES:
            return "other"
        self._causes.add(cause)
        return cause

    def _note_step(self, job: str, at: float, ranks: int) -> None:
        since, before = self._hit.get(job, (at, ranks))
        if job in self._waiting and at >= since:
            self._waiting.discard(job)
            self._next.observe(at - since)
        if job in self._hit and at >= since and ranks >= before:
            del self._hit[job]
            self._whole.observe(at - since)
        self._ranks[job] = ranks
