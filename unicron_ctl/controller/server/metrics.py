"""The controller's metrics for Prometheus, at a port of their own: `[controller] metrics`.

What is recorded is counted as it is stored; what is, is read when somebody asks. Both happen in the loop's thread: the
thread that answers HTTP waits for it, for :data:`SCRAPE_SECONDS` at most. Labels are bounded: living jobs, and words of
this program. Names follow https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from unicron.ctl.controller.core.core import Core
from unicron.ctl.controller.log import records
from unicron.ctl.controller.log.records import Event
from unicron.ctl.controller.nodes import isolation
from unicron.ctl.settings.config import host_and_port
from unicron.ctl.system.errors import UserError
from unicron.ctl.system.mailbox import Mailbox

SCRAPE_SECONDS = 5.0
SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
MOST_JOBS = 1000  # with metrics of their own; the totals count all


class Recorded:
    """What is counted from records, as they are stored."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._failures = Counter(
            "unicron_failures", "Failures of jobs, by cause and severity.", ("cause", "severity"), registry=registry
        )
        self._actions = Counter(
            "unicron_slurm_actions",
            "Changes in Slurm: asked, done, failed, or withheld by a partition's mode or a limit.",
            ("action", "outcome"),
            registry=registry,
        )
        self._events = Counter("unicron_events", "Records of the event log, by kind.", ("kind",), registry=registry)
        self._detection, self._next, self._whole = (
            Histogram(f"unicron_{name}_seconds", text, buckets=SECONDS, registry=registry)
            for name, text in (
                ("detection", "From a fault, where its time is known, to its record."),
                ("next_step", "From the record of a failure to the job's next iteration."),
                ("full_strength", "From the record of a failure to an iteration with as many ranks as before."),
            )
        )
        self._hit: dict[str, tuple[float, int]] = {}  # job -> when it failed first, the ranks that it had
        self._waiting: set[str] = set()  # jobs without an iteration since
        self._ranks: dict[str, int] = {}

    def note(self, event: Event) -> None:
        """Count one record."""
        record, job = event.record, event.job
        self._events.labels(event.kind).inc()
        if isinstance(record, records.FailureDetected):
            self._failures.labels(record.cause, str(record.severity)).inc()
            if record.fault_at is not None:
                self._detection.observe(max(0.0, event.time - record.fault_at))
            if job in self._ranks:
                self._hit.setdefault(job, (event.time, self._ranks[job]))
                self._waiting.add(job)
        elif isinstance(record, records.Step):
            self._stepped(job, event.time - record.ago, record.ranks)
        elif isinstance(record, records.JobEnded):
            self._hit.pop(job, None)
            self._ranks.pop(job, None)
            self._waiting.discard(job)
        elif (outcome := OUTCOMES.get(type(record))) is not None:
            self._actions.labels(getattr(record, "action", ""), outcome).inc()

    def _stepped(self, job: str, at: float, ranks: int) -> None:
        since, before = self._hit.get(job, (at, ranks))
        if job in self._waiting and at >= since:
            self._waiting.discard(job)
            self._next.observe(at - since)
        if job in self._hit and at >= since and ranks >= before:
            del self._hit[job]
            self._whole.observe(at - since)
        self._ranks[job] = ranks


OUTCOMES: dict[type[records.Record], str] = {
    records.SlurmAction: "asked",
    records.SlurmDone: "done",
    records.SlurmFailed: "failed",
    records.Observed: "withheld",
    records.TakeWithheld: "withheld",
}


def present(core: Core, dropped: Tally[str], late: float, log_bytes: int) -> Iterable[Metric]:
    """What is now. late: seconds by which the last tick came too late. log_bytes: of the event log's files."""
    view, state = core.view, core.state
    yield _gauge("unicron_start_time_seconds", "When this controller started, since the epoch.", view.started_at)
    yield _gauge("unicron_loop_late_seconds", "How much later than due the last turn of the loop came.", late)
    yield _gauge("unicron_log_bytes", "Size of the event log.", log_bytes)
    yield _gauge("unicron_needs_admin", "Things that need an admin.", len(isolation.attention(view)))
    yield _gauge("unicron_agents", "Agents that are heard.", sum(agent.alive for agent in view.live.agents()))
    yield _by("unicron_partition_paused", "Partitions that are paused.", "partition", _paused(core))
    counter = CounterMetricFamily("unicron_messages_dropped", "Messages that were dropped.", labels=["why"])
    for why, count in sorted(dropped.items()):
        counter.add_metric([why], count)
    yield counter
    slurm = view.slurm
    if slurm.used:
        answered = slurm.seen.asked_at if slurm.seen else view.started_at
        yield _gauge("unicron_slurm_answer_age_seconds", "How old Slurm's last answer is.", view.now - answered)
    yield _by("unicron_nodes", "Nodes, by what Unicron makes of them.", "state", nodes(core))
    living = [job for job in state.jobs.values() if not job.over]
    yield _by("unicron_jobs", "Jobs, by their state.", "state", Tally(job.phase.value for job in living))
    yield from _of_jobs(living)


def nodes(core: Core) -> Tally[str]:
    """How many nodes there are of each state: of those that Slurm shows, and those that are lost."""
    view, found = core.view, Tally[str]({"good": 0, "asked": 0, "suspect": 0, "unhealthy": 0, "out_of_service": 0})
    asked = view.suspicions.nodes()
    for name, info in (view.slurm.seen.by_name if view.slurm.seen else {}).items():
        known = view.state.nodes.get(name)
        if name in view.state.out_of_service:
            found["out_of_service"] += 1
        elif not info.healthy:
            found["unhealthy"] += 1
        elif name in asked:
            found["asked"] += 1
        else:
            found["suspect" if known is not None and known.suspected_at else "good"] += 1
    return found


def _paused(core: Core) -> Tally[str]:
    names = [name for name in core.state.paused if core.state.is_paused(name, core.now)]
    return Tally({name or "all": 1 for name in names})


def _of_jobs(living: list[Any]) -> Iterable[Metric]:
    labels = ["job", "name", "user"]
    families: dict[str, GaugeMetricFamily] = {}
    for job in sorted(living, key=lambda job: -job.since)[:MOST_JOBS]:
        count = len(job.inside)
        figures = {
            ("unicron_job_nodes", "Nodes that train."): count,
            ("unicron_job_nodes_wanted", "The most nodes that the job can use."): job.settings.max_nodes,
            ("unicron_job_flops", "FLOP/s at this number of nodes."): job.measured.get(count, 0.0),
            ("unicron_job_failures", "Failures that the job has had."): len(job.failures),
            ("unicron_job_goodput_ratio", "The share of the job's time that was not lost."): job.goodput,
            ("unicron_job_lost_seconds", "Time that was lost by failures."): job.lost_seconds,
        }
        for (name, text), value in figures.items():
            if value is not None:
                family = families.setdefault(name, GaugeMetricFamily(name, text, labels=labels))
                family.add_metric([job.job, job.settings.name, job.settings.user], value)
    yield from families.values()


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _by(name: str, text: str, label: str, values: Tally[str]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for word, value in sorted(values.items()):
        family.add_metric([word], value)
    return family


class Exporter:
    """Answers Prometheus. asked: what the loop is to answer, from the thread of an HTTP request.

    Raises UserError where nothing can listen there.
    """

    def __init__(self, place: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.recorded = Recorded(self.registry)
        self.asked: Mailbox[Future[list[Metric]]] = Mailbox()
        self.registry.register(self)
        host, port = host_and_port(place)
        try:
            self._server, self._thread = start_http_server(port, host, self.registry)
        except OSError as error:
            raise UserError(f"[controller] metrics = {place!r}: {error.strerror}: give another address") from None
        self.port: int = self._server.server_port

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry would ask the loop for it before the loop runs."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """What is, as the loop says; called by the thread of a request. Raises TimeoutError where it does not."""
        answer: Future[list[Metric]] = Future()
        self.asked.put(answer)
        return answer.result(SCRAPE_SECONDS)

    def answer(self, made: Callable[[], Iterable[Metric]]) -> None:
        """Called by the loop."""
        for asked in self.asked.take_all():
            try:
                asked.set_result(list(made()))
            except Exception as error:  # a request must not end the controller
                asked.set_exception(error)

    def close(self) -> None:
        """No more requests."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(SCRAPE_SECONDS)
        self.asked.close()
