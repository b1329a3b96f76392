"""Nodes and ranks that differ from their peers in several metrics at once (docs/design/paper.md, section 7).

Agents send :class:`wire.Metrics` every few seconds. They are compared round by round, in groups of at most
:data:`GROUP` nodes, one group a tick; symptoms (:mod:`unicron_ctl.controller.sense.symptoms`) sooner. A peer that
stands out for some rounds in a row is an *anomaly*: an event, a mark in `unicronctl status` and `nodes`, and evidence
in the reason of a failure on that node or rank. That a node differs does not show that it harms the job, so alone it
moves nothing. The node is tested once it is idle (:mod:`unicron_ctl.controller.nodes.pair_tests`); if the job has
become slow with it, the node gives its place to a spare (:mod:`unicron_ctl.controller.job.swaps`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median

import numpy.ma  # noqa: F401  (medians, and unicron_detector.iterations.peer_metrics: loaded now, not in a job)

from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.job_state import JobState, Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.sense.symptoms import Symptoms
from unicron_ctl.controller.sense.timing import JobTimes
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import wire
from unicron_detector.health.symptoms import LEAST
from unicron_detector.iterations.peer_metrics import DIRECTIONS, MINIMA, Anomaly, PeerWatch

# Metrics that differ between peers by the job's own layout (a data loader, a log, a checkpoint's writer): only a change
# of a peer's own usual difference counts.
LAYOUT = frozenset(
    {"cpu_busy", "memory_used", "shm_used", "nic_receive", "nic_transmit", "gpu_memory", "gpu_power"}
    | {"gpu_busy", "rank_cpu", "rank_memory"}
)
PHASES = ("data", "forward", "backward", "step")  # of ranks, as shares of the job's mean iteration
RANK_MINIMA = {**MINIMA, **dict.fromkeys(PHASES, 0.15)}
ROUNDS = 3  # in a row, to begin and to end an anomaly
LEARN = 6  # rounds until a peer's usual difference is known
FRESH_PERIODS = 2.5  # age up to which a sample takes part
EVIDENCE_SECONDS = 600.0  # for which a past anomaly still counts as evidence for a failure
GROUP = 64  # nodes that are compared with each other
ONLY_REPORTED = "only reported, for a difference alone harms nobody"
TEST_FOLLOWS = "it moves nothing unless the job is slow, too; the node is tested once it is idle"


@dataclass
class Sample:
    """The last metrics of one agent."""

    at: float  # by the controller's clock
    node: str
    host: str
    values: dict[str, float]
    ranks: dict[int, dict[str, float]]


@dataclass
class Standing:
    """A reported anomaly."""

    peer: str
    nodes: list[str]
    slot: int | None
    metric: str
    reason: str
    since: float
    quiet: int = 0  # rounds without it
    over: float | None = None  # when it ended


@dataclass
class Group:
    """Peers of one kind, nodes or ranks."""

    watch: PeerWatch
    usual: dict[tuple[str, str], deque[float]] = field(default_factory=dict)
    """(peer, metric) -> its last differences from the median of all."""

    def judge_round(self, rows: Mapping[str, Mapping[str, float]], standing: Iterable[str]) -> list[Anomaly]:
        """Judge one round. rows: peer -> metric -> value."""
        adjusted = {peer: dict(values) for peer, values in rows.items()}
        apart: dict[tuple[str, str], float] = {}
        for name in LAYOUT & {name for values in rows.values() for name in values}:
            middle = median(values[name] for values in rows.values() if name in values)
            for peer, values in rows.items():
                if name not in values:
                    continue
                known = self.usual.get((peer, name), ())
                apart[peer, name] = values[name] - middle
                if len(known) < LEARN:
                    del adjusted[peer][name]
                else:
                    adjusted[peer][name] -= median(known)
        found = self.watch.judge(adjusted)
        odd = {anomaly.peer for anomaly in found} | set(standing)
        for (peer, name), difference in apart.items():
            if peer not in odd:
                self.usual.setdefault((peer, name), deque(maxlen=30)).append(difference)
        return found


@dataclass
class Neighbours:
    """Up to :data:`GROUP` nodes of a job and their ranks."""

    nodes: Group = field(default_factory=lambda: Group(PeerWatch(rounds=ROUNDS)))
    ranks: Group = field(default_factory=lambda: Group(PeerWatch(rounds=ROUNDS, minima=RANK_MINIMA)))
    standing: dict[str, Standing] = field(default_factory=dict)


@dataclass
class JobPeers:
    """One job's metrics."""

    samples: dict[int, Sample] = field(default_factory=dict)
    symptoms: Symptoms = field(default_factory=Symptoms)
    ill: dict[str, Standing] = field(default_factory=dict)
    """Nodes that stand out by a symptom."""
    groups: list[Neighbours] = field(default_factory=list)
    past: deque[Standing] = field(default_factory=lambda: deque(maxlen=50))
    generation: int = -1
    members: list[int] = field(default_factory=list)
    """Elements, in the order in which they are grouped."""
    next_group: int = 0
    judged_at: float = -math.inf
    """When the present round began."""

    @property
    def standing(self) -> list[Standing]:
        return [*self.ill.values(), *(item for group in self.groups for item in group.standing.values())]

    def on_metrics(self, agent: AgentView, message: wire.Metrics, now: float) -> None:
        """Take in an agent's sample, without unknown names and senseless values."""
        node = _sound(message.node)
        symptoms = _sound(message.symptoms) or {name: node[name] for name in LEAST if name in node}  # of release 0.2
        self.symptoms.on_metrics(agent.node, message, symptoms, now)
        if not message.whole:
            return
        ranks = {slot: _sound(values) for slot, values in message.ranks.items() if slot in agent.slots}
        compared = {name: value for name, value in node.items() if name not in LEAST}
        self.samples[message.element] = Sample(now, agent.node, message.host[:100], compared, ranks)


def _sound(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name in DIRECTIONS and abs(value) < 1e18}


def check_peers(view: View, known: JobView, times: JobTimes, peers: JobPeers) -> Outcome:
    """Compare the next group of the job's nodes; a round over all groups takes `metrics_seconds` (0: no comparison)."""
    out, job, period, now = Outcome(), known.state, view.config.metrics_seconds, view.now
    if not period or job.plan is None or job.phase not in (Phase.RUNNING, Phase.OFFERING):
        return out
    if peers.symptoms.news and (peers.symptoms.ill or peers.ill):
        _check_symptoms(view, job, peers, out)
    if peers.next_group == 0:
        if now - peers.judged_at < period:
            return out
        peers.judged_at = now
        if peers.generation != job.plan.generation:  # this round's metrics are partly of the recovery
            _regroup(job, peers, out, now)
            return out
    if not peers.groups:
        return out
    index = peers.next_group
    peers.next_group = (index + 1) % len(peers.groups)
    elements = peers.members[index * GROUP : (index + 1) * GROUP]
    fresh = {
        element: sample
        for element in elements
        if (sample := peers.samples.get(element)) and now - sample.at <= FRESH_PERIODS * period
    }
    _compare(view, job, peers.groups[index], elements, fresh, times.phases.comparable(), out)
    _end_anomalies(job, peers, peers.groups[index], out, now)
    return out


def _check_symptoms(view: View, job: JobState, peers: JobPeers, out: Outcome) -> None:
    """Compare the nodes' symptoms, all at once: they show only while somebody has one."""
    now = view.now
    found, fresh, rows = peers.symptoms.judge(job.elements(job.members), view.config.symptom_seconds, now)
    seen = {anomaly.peer for anomaly in found}
    for peer, item in list(peers.ill.items()):
        if peer in fresh:
            item.quiet = 0 if peer in seen else item.quiet + 1
        _end_if_over(job, peers, peers.ill, item, out, now)
    for anomaly in found:
        if anomaly.peer not in peers.ill:
            standing = Standing(anomaly.peer, [anomaly.peer], None, anomaly.metric, anomaly.reason, now)
            peers.ill[anomaly.peer] = standing
            out.record(job, _record(view, standing, anomaly, rows[anomaly.peer]))


def _regroup(job: JobState, peers: JobPeers, out: Outcome, now: float) -> None:
    """Forget what was usual, because of other members and other work. Anomalies are remembered."""
    assert job.plan is not None
    peers.generation, peers.members = job.plan.generation, job.elements(job.members)
    standing, count = peers.standing, max(1, math.ceil(len(peers.members) / GROUP))
    same = len(peers.groups) == count
    peers.groups = peers.groups if same else [Neighbours() for _ in range(count)]
    for group in peers.groups:
        group.nodes.usual.clear()
        group.ranks.usual.clear()
    if not same:
        peers.groups[0].standing = {item.peer: item for item in standing}
    for group in peers.groups:
        for item in [item for item in group.standing.values() if _is_gone(job, item)]:
            _over(job, peers, group.standing, item, "is no member any more", out, now)


def _compare(
    view: View,
    job: JobState,
    group: Neighbours,
    elements: Iterable[int],
    fresh: Mapping[int, Sample],
    phases: Mapping[int, Mapping[str, float]],
    out: Outcome,
) -> None:
    machines, names = node_rows(fresh)
    count = max(1, job.settings.ranks_per_node)
    slots = [slot for e in elements for slot in range(e * count, (e + 1) * count) if slot in job.members]
    by_rank = rank_rows(fresh, slots, phases)
    found: list[tuple[Anomaly, int | None, list[str], Mapping[str, float]]] = []
    for anomaly in group.nodes.judge_round(machines, group.standing):
        found.append((anomaly, None, names[anomaly.peer], machines[anomaly.peer]))
    for anomaly in group.ranks.judge_round(by_rank, group.standing):
        slot = int(anomaly.peer.removeprefix("slot "))
        found.append((anomaly, slot, [job.node(slot)], by_rank[anomaly.peer]))
    seen = {anomaly.peer for anomaly, *_ in found}
    for peer, item in group.standing.items():
        item.quiet = 0 if peer in seen else item.quiet + 1
    for anomaly, rank, nodes, values in found:
        if anomaly.peer not in group.standing:
            standing = Standing(anomaly.peer, nodes, rank, anomaly.metric, anomaly.reason, view.now)
            group.standing[anomaly.peer] = standing
            out.record(job, _record(view, standing, anomaly, values))


def node_rows(samples: Mapping[int, Sample]) -> tuple[dict[str, dict[str, float]], dict[str, list[str]]]:
    """Return (peer -> metrics, peer -> its nodes). Nodes of one machine share its counters, so they are one peer."""
    machines: dict[str, list[Sample]] = {}
    for _, sample in sorted(samples.items()):
        if sample.values:
            machines.setdefault(sample.host or f"node {sample.node}", []).append(sample)
    rows, nodes = {}, {}
    for group in machines.values():
        names = sorted({sample.node for sample in group})
        peer = "+".join(names)
        nodes[peer] = names
        common = {name for sample in group for name in sample.values}
        rows[peer] = {name: median(s.values[name] for s in group if name in s.values) for name in common}
    return rows, nodes


def rank_rows(
    samples: Mapping[int, Sample], members: Iterable[int], phases: Mapping[int, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return peer -> metrics of its process and its phases, as shares of the mean iteration."""
    processes = {slot: values for sample in samples.values() for slot, values in sample.ranks.items()}
    whole = (
        fmean(sum(times.get(name, 0.0) for name in (*PHASES, "reduce")) for times in phases.values()) if phases else 0
    )
    rows = {}
    for slot in members:
        row = dict(processes.get(slot, {}))
        if whole > 0.0 and slot in phases:
            row |= {name: phases[slot].get(name, 0.0) / whole for name in PHASES}
        if row:
            rows[f"slot {slot}"] = row
    return rows


def _record(view: View, standing: Standing, anomaly: Anomaly, values: Mapping[str, float]) -> records.Anomaly:
    then = TEST_FOLLOWS if view.slurm.used and view.config.pair_tests else ONLY_REPORTED
    return records.Anomaly(
        node=standing.nodes[0] if len(standing.nodes) == 1 else "",
        nodes=standing.nodes,
        slot=standing.slot,
        metric=anomaly.metric,
        metrics={name: values[name] for name in anomaly.scores if name in values},
        scores={name: round(score, 1) for name, score in anomaly.scores.items()},
        distance=round(anomaly.distance, 1),
        reason=f"{anomaly.reason}; {then}",
    )


def _is_gone(job: JobState, item: Standing) -> bool:
    if item.slot is not None:
        return item.slot not in job.members
    return not {job.node(slot) for slot in job.members} & set(item.nodes)


def _end_anomalies(job: JobState, peers: JobPeers, group: Neighbours, out: Outcome, now: float) -> None:
    """End anomalies that have not been seen for some rounds, or whose peer is gone."""
    for item in list(group.standing.values()):
        _end_if_over(job, peers, group.standing, item, out, now)


def _end_if_over(
    job: JobState, peers: JobPeers, standing: dict[str, Standing], item: Standing, out: Outcome, now: float
) -> None:
    gone = _is_gone(job, item)
    if gone or item.quiet >= ROUNDS:
        why = "is no member any more" if gone else "no longer stands out"
        _over(job, peers, standing, item, why, out, now)


def _over(
    job: JobState,
    peers: JobPeers,
    standing: dict[str, Standing],
    item: Standing,
    why: str,
    out: Outcome,
    now: float,
) -> None:
    item.over = now
    peers.past.append(standing.pop(item.peer))
    over = records.AnomalyOver(
        node=item.nodes[0] if len(item.nodes) == 1 else "",
        nodes=item.nodes,
        slot=item.slot,
        metric=item.metric,
        seconds=round(now - item.since, 1),
        reason=f"{item.peer} {why} ({item.metric})",
    )
    out.record(job, over)


def evidence(all_peers: Iterable[JobPeers], node: str, now: float) -> str:
    """Return, for a failure's reason, why its node was odd before; empty if it was not."""
    reasons = []
    for peers in all_peers:
        for item in [*peers.standing, *peers.past]:
            if node and node in item.nodes and (item.over is None or now - item.over <= EVIDENCE_SECONDS):
                reasons.append(f"{item.reason}, since {now - item.since:.0f} s")
    return f"; before it stood out among its peers: {'; '.join(reasons[:3])}" if reasons else ""
