"""Defines all metrics, by the names that Prometheus shows (docs/metrics.md).

:class:`Counts` counts events as they happen; :func:`gauges` reads the controller's present state for a request. Labels
are bounded: words of this program, partitions, causes up to :data:`MOST_CAUSES`, living jobs up to :data:`MOST_JOBS`. A
counter with known labels begins at 0, because Prometheus sees no increase in a series that begins at 1. Names follow
https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from unicron_ctl.controller.api.job_answers import waf
from unicron_ctl.controller.core.core import Core
from unicron_ctl.controller.model.job_state import JobState, Phase
from unicron_ctl.controller.model.requests import OF_ELEMENTS, ON_NODES
from unicron_ctl.controller.nodes import bounds, isolation
from unicron_ctl.controller.server import event_lines
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.system.release import release
from unicron_detector.failures.severity import Severity, default_table

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
LATE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)
MOST_CAUSES = 200  # including those of an admin's [severity]; further ones count as "other"
MOST_JUDGED = 1000  # failures that may still be judged anew
MOST_JOBS = 1000  # the youngest, with metrics of their own; `unicron_jobs` and `unicron_waf_flops` count all
ISOLATE, PLAN = "isolate", "plan"  # labels for taking a node out of service, and for a plan as a whole
OUTCOMES: dict[type[records.Record], str] = {
    records.SlurmAction: "asked",
    records.SlurmDone: "done",
    records.SlurmFailed: "refused",
    records.TakeWithheld: "withheld",
    records.IsolationWithheld: "withheld",
    records.ActionObserved: "observed",
}
SET_ASIDE = "set_aside"
DROPS = ("message", "hint", "rate", "stranger", "send")
VERSION = release()


class Counts:
    """Counters and histograms, fed by the loop and by the threads that call Slurm."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        self._failures = counter(
            "unicron_failures_total", "Failures of jobs, as they were first judged.", "cause", "severity"
        )
        self._verdicts = counter(
            "unicron_failure_verdicts_total", "Failures that were judged anew, as they are since.", "cause", "severity"
        )
        self._actions = counter(
            "unicron_slurm_actions_total",
            "Changes in Slurm: asked, done, refused by Slurm, withheld by a limit, observed for a partition's mode.",
            *("action", "outcome"),
        )
        self._events = counter("unicron_events_total", "Records of the event log, by kind.", "kind")
        self._detection = histogram(
            "unicron_detection_seconds", "From a fault, where its time is known, to its record."
        )
        self._next_step = histogram(
            "unicron_next_step_seconds", "From the record of a failure to the job's next iteration."
        )
        self._full_strength = histogram(
            "unicron_full_strength_seconds",
            "From the record of a failure to an iteration with as many ranks as before.",
        )
        self._slurm = histogram(
            "unicron_slurm_seconds", "How long Slurm took: for a listing, and for each change.", "call"
        )
        self._late = histogram(
            "unicron_loop_late_seconds", "How much later than due a turn of the loop came.", buckets=LATE_SECONDS
        )
        self.failed = Tally[str]()
        """Failures of each living job."""
        self._causes: set[str] = set()
        self._judged: dict[int, tuple[str, int]] = {}  # failure -> cause and severity
        self._hit: dict[str, tuple[float, int]] = {}  # job -> time of its first failure, its ranks before
        self._waiting: set[str] = set()  # jobs without an iteration since their failure
        self._ranks: dict[str, int] = {}
        self.expect(default_table().causes)
        for kind in event_lines.LEVELS:
            self._events.labels(str(kind.__struct_config__.tag))
        for call in (*ON_NODES, *OF_ELEMENTS):
            for outcome in set(OUTCOMES.values()):
                self._actions.labels(call, outcome)
        self._actions.labels(ISOLATE, "withheld")
        self._actions.labels(PLAN, "observed")

    def expect(self, causes: Iterable[str]) -> None:
        """Begin to count failures of these causes at 0, with each severity: an escalation or an admin's rule may set
        any."""
        for cause in map(self._cause, causes):
            for severity in Severity:
                self._failures.labels(cause, str(int(severity)))
                self._verdicts.labels(cause, str(int(severity)))

    def slurm_took(self, call: str, seconds: float) -> None:
        """Note how long a listing ("list") or a change took. Any thread may call this."""
        self._slurm.labels(call).observe(seconds)

    def loop_late(self, seconds: float) -> None:
        """Note how much later than due a turn of the loop came."""
        self._late.observe(max(0.0, seconds))

    def note(self, event: Event) -> None:
        """Count one record."""
        record, job = event.record, event.job
        self._events.labels(event.kind).inc()
        if isinstance(record, records.FailureDetected):
            self._note_failure(event, record)
        elif isinstance(record, records.FailureVerdict):
            self._note_verdict(event, record)
        elif isinstance(record, records.Step):
            self._note_step(job, event.time - record.ago, record.ranks)
        elif isinstance(record, records.JobEnded | records.JobSetAside):
            for known in (self._hit, self._ranks, self.failed):
                known.pop(job, None)
            self._waiting.discard(job)
        elif (outcome := OUTCOMES.get(type(record))) is not None:
            action = getattr(record, "action", ISOLATE)
            if action:  # else a listing has failed
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

    def _note_verdict(self, event: Event, record: records.FailureVerdict) -> None:
        if record.slots:  # a part of the failure is one of its own from now on
            self.failed[event.job] += 1
        before = self._judged.get(record.failure)
        if before is None:
            return
        severity = before[1] if record.severity is None else record.severity
        now = record.cause or before[0], severity
        if now != before:
            self._judged[event.id if record.slots else record.failure] = now
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
            self._next_step.observe(at - since)
        if job in self._hit and at >= since and ranks >= before:
            del self._hit[job]
            self._full_strength.observe(at - since)
        self._ranks[job] = ranks


def gauges(core: Core, failed: Mapping[str, int], dropped: Mapping[str, int], log_bytes: int) -> Iterable[Metric]:
    """Read the present state. failed: failures of each living job. dropped: messages by reason. log_bytes: the size of
    the event log's files."""
    view = core.view
    text = "The release of this controller."
    yield InfoMetricFamily("unicron_build", text, value={"version": VERSION})  # unicron_build_info
    suspects = view.suspicions.alone_since is not None or view.suspicions.most_since is not None
    yield _gauge("unicron_start_time_seconds", "When this controller started, since the epoch.", view.started_at)
    yield _gauge("unicron_log_bytes", "Size of the event log.", log_bytes)
    yield _gauge("unicron_needs_admin", "Things that need an admin.", len(isolation.attention(view)))
    yield _gauge("unicron_agents", "Agents that are heard.", sum(agent.alive for agent in view.live.agents()))
    yield _gauge("unicron_suspects_itself", "1 while most agents are silent: nothing is taken then.", suspects)
    paused = {name or "all": 1 for name in core.state.paused if core.state.is_paused(name, core.now)}
    yield _by("unicron_partition_paused", "Partitions that an admin has paused.", "partition", paused)
    counter = CounterMetricFamily(
        "unicron_messages_dropped_total", "Messages that were dropped, by why.", labels=["why"]
    )
    for why in sorted({*DROPS, *dropped}):
        counter.add_metric([why], dropped.get(why, 0))
    yield counter
    if view.slurm.used:
        answered = view.slurm.seen.asked_at if view.slurm.seen else view.started_at
        yield _gauge("unicron_slurm_answer_age_seconds", "How old Slurm's last answer is.", view.now - answered)
    limits = bounds.standing(view)
    used = {name: count for name, (count, _) in limits.items()}
    yield _by("unicron_bound_used", "How much of a limit on actions is used up.", "bound", used)
    most = {name: limit for name, (_, limit) in limits.items()}
    yield _by("unicron_bound_limit", "The limit, as configured.", "bound", most)
    yield _by("unicron_nodes", "Nodes, by what Unicron makes of them.", "state", nodes(core))
    yield from _of_jobs(core, failed)


def nodes(core: Core) -> Tally[str]:
    """Return the number of nodes in each state, of those that Slurm shows."""
    view, counts = core.view, Tally[str]({"good": 0, "asked": 0, "suspect": 0, "unhealthy": 0, "out_of_service": 0})
    asked = view.suspicions.nodes()
    for name, info in (view.slurm.seen.by_name if view.slurm.seen else {}).items():
        state = view.state.nodes.get(name)
        if name in view.state.out_of_service:
            counts["out_of_service"] += 1
        elif not info.healthy:
            counts["unhealthy"] += 1
        elif name in asked:
            counts["asked"] += 1
        else:
            counts["suspect" if state is not None and state.suspected_at else "good"] += 1
    return counts


def _of_jobs(core: Core, failed: Mapping[str, int]) -> Iterable[Metric]:
    living = [job for job in core.state.jobs.values() if not job.over]
    states = Tally({phase.value: 0 for phase in Phase if phase is not Phase.ENDED})
    states.update(job.phase.value for job in living)
    states[SET_ASIDE] = sum(bool(job.set_aside) and job.ended is None for job in core.state.jobs.values())
    yield _by("unicron_jobs", "Jobs, by their state.", "state", states)
    waf_of = {job.job: waf(core, job) for job in living}
    yield _gauge("unicron_waf_flops", "Weighted achieved FLOP/s of all jobs.", sum(waf_of.values()))
    if (report := core.state.plan_report) is not None:
        yield _gauge("unicron_planned_waf_flops", "The same as the last plan expects it.", report.waf)
    yield from _of_each(sorted(living, key=lambda job: -job.since)[:MOST_JOBS], waf_of, failed)


def _of_each(jobs: list[JobState], waf_of: Mapping[str, float], failed: Mapping[str, int]) -> Iterable[Metric]:
    labels = ["jobid", "name", "user"]  # "job" is what Prometheus itself calls a group of targets
    train = GaugeMetricFamily("unicron_job_nodes", "Nodes that train.", labels=labels)
    wanted = GaugeMetricFamily("unicron_job_nodes_wanted", "The most nodes that the job can use.", labels=labels)
    rate = GaugeMetricFamily("unicron_job_waf_flops", "FLOP/s at this number of nodes, weighted.", labels=labels)
    share = GaugeMetricFamily(
        "unicron_job_goodput_ratio", "The share of the job's time that was not lost.", labels=labels
    )
    lost = CounterMetricFamily(
        "unicron_job_lost_seconds_total", "Time that the job has lost by failures.", labels=labels
    )
    failures = CounterMetricFamily("unicron_job_failures_total", "Failures of the job.", labels=labels)
    for job in jobs:
        label = [job.job, job.settings.name, job.settings.user]
        train.add_metric(label, len(job.inside))
        wanted.add_metric(label, job.settings.max_nodes)
        rate.add_metric(label, waf_of[job.job])
        if job.goodput is not None:
            share.add_metric(label, job.goodput)
        lost.add_metric(label, job.all_lost_seconds)
        failures.add_metric(label, failed.get(job.job, 0))
    yield from (train, wanted, rate, share, lost, failures)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=float(value))


def _by(name: str, text: str, label: str, values: Mapping[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for word, value in sorted(values.items()):
        family.add_metric([word], value)
    return family
