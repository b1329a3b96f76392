"""Metrics of what is: read from the controller's state when Prometheus asks.

Labels are bounded: living jobs up to :data:`MOST_JOBS`, partitions, and words of this program.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from unicron_ctl.controller.api.job_answers import waf
from unicron_ctl.controller.core.core import Core
from unicron_ctl.controller.model.job_state import JobState, Phase
from unicron_ctl.controller.nodes import bounds, isolation
from unicron_ctl.controller.plan.inputs import weight
from unicron_ctl.shared.system.release import release

MOST_JOBS = 1000  # with metrics of their own, the youngest; `unicron_jobs` and `unicron_waf_flops` count all
SET_ASIDE = "set_aside"
DROPS = ("message", "hint", "rate", "stranger", "send")
VERSION = release()


@dataclass(frozen=True)
class Kept:
    """What the loop knows beside the core. dropped: messages, by why. failed: failures of each living job. log_bytes:
    size of the event log's files."""

    dropped: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    log_bytes: int = 0


def present(core: Core, kept: Kept) -> Iterable[Metric]:
    """What is now."""
    yield InfoMetricFamily("unicron_build", "The release of this controller.", value={"version": VERSION})
    yield from _of_controller(core, kept)
    yield from _of_slurm(core)
    yield from _of_bounds(core)
    yield _by("unicron_nodes", "Nodes, by what Unicron makes of them.", "state", nodes(core))
    yield from _of_jobs(core, kept)


def _of_controller(core: Core, kept: Kept) -> Iterable[Metric]:
    view = core.view
    suspects = view.suspicions.alone_since is not None or view.suspicions.most_since is not None
    yield _gauge("unicron_start_time_seconds", "When this controller started, since the epoch.", view.started_at)
    yield _gauge("unicron_log_bytes", "Size of the event log.", kept.log_bytes)
    yield _gauge("unicron_needs_admin", "Things that need an admin.", len(isolation.attention(view)))
    yield _gauge("unicron_agents", "Agents that are heard.", sum(agent.alive for agent in view.live.agents()))
    yield _gauge("unicron_suspects_itself", "1 while most agents are silent: nothing is taken then.", suspects)
    yield _by("unicron_partition_paused", "Partitions that an admin has paused.", "partition", _paused(core))
    counter = CounterMetricFamily("unicron_messages_dropped", "Messages that were dropped, by why.", labels=["why"])
    for why in sorted({*DROPS, *kept.dropped}):
        counter.add_metric([why], kept.dropped.get(why, 0))
    yield counter


def _of_slurm(core: Core) -> Iterable[Metric]:
    view, slurm = core.view, core.view.slurm
    if slurm.used:
        answered = slurm.seen.asked_at if slurm.seen else view.started_at
        yield _gauge("unicron_slurm_answer_age_seconds", "How old Slurm's last answer is.", view.now - answered)


def _of_bounds(core: Core) -> Iterable[Metric]:
    used, most = Tally[str](), Tally[str]()
    for name, (count, limit) in bounds.standing(core.view).items():
        used[name], most[name] = count, limit
    yield _by("unicron_bound_used", "How much of a limit on actions is used up.", "bound", used)
    yield _by("unicron_bound_limit", "The limit, as configured.", "bound", most)


def nodes(core: Core) -> Tally[str]:
    """How many nodes there are of each state, of those that Slurm shows."""
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


def _of_jobs(core: Core, kept: Kept) -> Iterable[Metric]:
    living = [job for job in core.state.jobs.values() if not job.over]
    states = Tally({phase.value: 0 for phase in Phase if phase is not Phase.ENDED})
    states.update(job.phase.value for job in living)
    states[SET_ASIDE] = sum(bool(job.set_aside) and job.ended is None for job in core.state.jobs.values())
    yield _by("unicron_jobs", "Jobs, by their state.", "state", states)
    counts = {job.job: waf(job, weight(core.view, job)) for job in living}
    yield _gauge("unicron_waf_flops", "Weighted achieved FLOP/s of all jobs.", sum(counts.values()))
    if (report := core.state.plan_report) is not None:
        yield _gauge("unicron_planned_waf_flops", "The same as the last plan expects it.", report.waf)
    yield from _of_each(sorted(living, key=lambda job: -job.since)[:MOST_JOBS], counts, kept)


def _of_each(jobs: list[JobState], waf_of: Mapping[str, float], kept: Kept) -> Iterable[Metric]:
    labels = ["jobid", "name", "user"]  # "job" is what Prometheus itself calls a group of targets
    gauges = {
        name: GaugeMetricFamily(f"unicron_job_{name}", text, labels=labels)
        for name, text in (
            ("nodes", "Nodes that train."),
            ("nodes_wanted", "The most nodes that the job can use."),
            ("waf_flops", "FLOP/s at this number of nodes, weighted."),
            ("goodput_ratio", "The share of the job's time that was not lost."),
        )
    }
    lost = CounterMetricFamily("unicron_job_lost_seconds", "Time that the job has lost by failures.", labels=labels)
    failed = CounterMetricFamily("unicron_job_failures", "Failures of the job.", labels=labels)
    for job in jobs:
        label = [job.job, job.settings.name, job.settings.user]
        gauges["nodes"].add_metric(label, len(job.inside))
        gauges["nodes_wanted"].add_metric(label, job.settings.max_nodes)
        gauges["waf_flops"].add_metric(label, waf_of[job.job])
        if (goodput := job.goodput) is not None:
            gauges["goodput_ratio"].add_metric(label, goodput)
        lost.add_metric(label, job.lost_seconds)
        failed.add_metric(label, kept.failed.get(job.job, 0))
    yield from (*gauges.values(), lost, failed)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=float(value))


def _by(name: str, text: str, label: str, values: Mapping[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for word, value in sorted(values.items()):
        family.add_metric([word], value)
    return family
