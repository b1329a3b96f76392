"""TEE in the running system (PAPER section 7): several metrics at once, of each node and rank, against the job's peers.

Agents send :class:`wire.Metrics` every few seconds; here they are compared round by round. Whoever stands out for some
rounds in a row is an *anomaly*: an event, a mark in `unicronctl status` and `nodes`, and evidence in the reason of a
failure on that node or rank. Nothing is done because of it: that a node differs does not show that it harms the job.
What harms it shows in its iterations, and those are judged by themselves. What is known here is soft state.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy  # noqa: F401  (what `detector.metrics` reckons with: loaded at the start, not in the midst of a failure)

from detector.metrics import DIRECTIONS, MINIMA, Anomaly, PeerWatch
from unicron_ctl.controller.machine import State
from unicron_ctl.controller.state import JobState
from unicron_ctl.protocol import wire

if TYPE_CHECKING:
    from unicron_ctl.controller.engine import Engine

# What differs between peers by the job's own layout (a data loader, a log, a checkpoint's writer): only a change of a
# peer's own usual difference counts.
LAYOUT = frozenset(
    {"cpu_busy", "memory_used", "shm_used", "nic_receive", "nic_transmit", "gpu_memory", "gpu_power"}
    | {"gpu_busy", "rank_cpu", "rank_memory"}
)
PHASES = ("data", "forward", "backward", "step")  # of ranks, as shares of the job's mean iteration
RANK_MINIMA = {**MINIMA, **dict.fromkeys(PHASES, 0.15)}
ROUNDS = 3  # in a row, to be an anomaly and to be none any more
LEARN = 6  # rounds until a peer's usual difference is known
FRESH_PERIODS = 2.5  # a sample that is older takes no part
EVIDENCE_SECONDS = 600.0  # so long an anomaly that is over still belongs to a failure's story
ONLY_REPORTED = "only reported, for a difference alone harms nobody"


@dataclass
class Sample:
    """What one agent sent last. Times on the controller's clock."""

    at: float
    node: str
    host: str
    values: dict[str, float]
    ranks: dict[int, dict[str, float]]


@dataclass
class Standing:
    """An anomaly that was reported. quiet: rounds without it. over: when it ended."""

    peer: str
    nodes: list[str]
    slot: int | None
    metric: str
    reason: str
    since: float
    quiet: int = 0
    over: float | None = None

    def told(self) -> dict[str, Any]:
        """For `unicronctl`."""
        return {
            "peer": self.peer,
            "nodes": self.nodes,
            "slot": self.slot,
            "metric": self.metric,
            "since": self.since,
            "reason": self.reason,
        }


@dataclass
class Group:
    """Peers of one kind, nodes or ranks. usual: (peer, metric) -> its last differences from the peers' median."""

    watch: PeerWatch
    usual: dict[tuple[str, str], deque[float]] = field(default_factory=dict)

    def judge(self, rows: Mapping[str, Mapping[str, float]], standing: Iterable[str]) -> list[Anomaly]:
        """One round: peer -> metric -> value."""
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

    def forget(self) -> None:
        """Other members, other work: what was usual no longer is."""
        self.usual.clear()


@dataclass
class JobPeers:
    """One job's metrics."""

    samples: dict[int, Sample] = field(default_factory=dict)
    nodes: Group = field(default_factory=lambda: Group(PeerWatch(rounds=ROUNDS)))
    ranks: Group = field(default_factory=lambda: Group(PeerWatch(rounds=ROUNDS, minima=RANK_MINIMA)))
    standing: dict[str, Standing] = field(default_factory=dict)
    past: deque[Standing] = field(default_factory=lambda: deque(maxlen=50))
    generation: int = -1
    judged_at: float = -math.inf
    rounds: int = 0


def take(engine: Engine, route: tuple[bytes, ...], message: wire.Metrics) -> None:
    """A message of an agent of the job; names that nobody knows and values that make no sense are left out."""
    view = engine.agents.get((message.job, message.element))
    if view is None or view.route != route or view.agent != message.agent:
        return
    ranks = {slot: _sound(values) for slot, values in message.ranks.items() if slot in view.slots}
    peers = engine.peers.setdefault(message.job, JobPeers())
    peers.samples[message.element] = Sample(engine.now, view.node, message.host[:100], _sound(message.node), ranks)


def _sound(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name in DIRECTIONS and abs(value) < 1e18}


def look(engine: Engine, job: JobState) -> None:
    """Compares the job's peers, once per period. Called at every tick."""
    period, peers = engine.config.metrics_seconds, engine.peers.get(job.job)
    if peers is None:
        return
    if not period:
        engine.peers.pop(job.job)
        return
    if engine.now - peers.judged_at < period or job.phase not in (State.RUNNING, State.OFFERING) or job.plan is None:
        return
    peers.judged_at = engine.now
    if peers.generation != job.plan.generation:  # this round's metrics are partly of the recovery
        peers.generation = job.plan.generation
        peers.nodes.forget()
        peers.ranks.forget()
        return
    peers.rounds += 1
    fresh = {
        element: sample
        for element in job.elements(job.members)
        if (sample := peers.samples.get(element)) and engine.now - sample.at <= FRESH_PERIODS * period
    }
    machines, names = node_rows(fresh)
    found = [(anomaly, None) for anomaly in peers.nodes.judge(machines, peers.standing)]
    by_rank = rank_rows(fresh, job.members, engine.watch(job).comparable())
    found += [(anomaly, slot) for anomaly in peers.ranks.judge(by_rank, peers.standing) for slot in _slot(anomaly.peer)]
    for anomaly, slot in found:
        nodes = names[anomaly.peer] if slot is None else [job.node(slot)]
        values = machines[anomaly.peer] if slot is None else by_rank[anomaly.peer]
        _stands_out(engine, job, peers, anomaly, slot, nodes, values)
    _calm_down(engine, job, peers, {anomaly.peer for anomaly, _ in found})


def node_rows(samples: Mapping[int, Sample]) -> tuple[dict[str, dict[str, float]], dict[str, list[str]]]:
    """(peer -> metrics, peer -> its nodes). Nodes of one machine share its counters, so together they are one peer."""
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
    """peer -> metrics of its process and its phases, as shares of the mean iteration."""
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
            rows[_peer(slot)] = row
    return rows


def _peer(slot: int) -> str:
    return f"slot {slot}"


def _slot(peer: str) -> list[int]:
    return [int(peer.removeprefix("slot "))]


def _stands_out(
    engine: Engine,
    job: JobState,
    peers: JobPeers,
    anomaly: Anomaly,
    slot: int | None,
    nodes: list[str],
    values: Mapping[str, float],
) -> None:
    known = peers.standing.get(anomaly.peer)
    if known is not None:
        known.quiet = 0
        return
    peers.standing[anomaly.peer] = Standing(anomaly.peer, nodes, slot, anomaly.metric, anomaly.reason, engine.now)
    engine.emit(
        "anomaly",
        job.job,
        job.generation,
        node=nodes[0] if len(nodes) == 1 else "",
        nodes=nodes,
        slot=slot,
        metric=anomaly.metric,
        metrics={name: values[name] for name in anomaly.scores if name in values},
        scores={name: round(score, 1) for name, score in anomaly.scores.items()},
        distance=round(anomaly.distance, 1),
        reason=f"{anomaly.reason}; {ONLY_REPORTED}",
    )


def _calm_down(engine: Engine, job: JobState, peers: JobPeers, found: set[str]) -> None:
    """Anomalies that have not been seen for some rounds, or whose peer is gone, are over."""
    nodes = {job.node(slot) for slot in job.members}
    for peer, standing in list(peers.standing.items()):
        gone = standing.slot not in job.members if standing.slot is not None else not nodes & set(standing.nodes)
        standing.quiet += peer not in found
        if standing.quiet < ROUNDS and not gone:
            continue
        standing.over = engine.now
        peers.past.append(peers.standing.pop(peer))
        why = "is no member any more" if gone else "no longer stands out"
        engine.emit(
            "anomaly_over",
            job.job,
            job.generation,
            node=standing.nodes[0] if len(standing.nodes) == 1 else "",
            nodes=standing.nodes,
            slot=standing.slot,
            metric=standing.metric,
            seconds=round(engine.now - standing.since, 1),
            reason=f"{peer} {why} ({standing.metric})",
        )


def standing(engine: Engine, job: str) -> list[dict[str, Any]]:
    """The job's present anomalies."""
    peers = engine.peers.get(job)
    return [item.told() for item in peers.standing.values()] if peers else []


def of_node(engine: Engine, node: str) -> list[dict[str, Any]]:
    """The present anomalies of a node and of ranks on it, in all jobs."""
    return [item for job in engine.peers for item in standing(engine, job) if node in item["nodes"]]


def of_machine(engine: Engine, job: str, element: int) -> dict[str, float]:
    """What the element's agent measured last on its node."""
    peers = engine.peers.get(job)
    sample = peers.samples.get(element) if peers else None
    return sample.values if sample else {}


def evidence(engine: Engine, node: str) -> str:
    """What was odd with the node before a failure on it, for the failure's reason; empty when nothing was."""
    said = []
    for peers in engine.peers.values():
        for item in [*peers.standing.values(), *peers.past]:
            if node and node in item.nodes and (item.over is None or engine.now - item.over <= EVIDENCE_SECONDS):
                said.append(f"{item.reason}, since {engine.now - item.since:.0f} s")
    return f"; before it stood out among its peers: {'; '.join(said[:3])}" if said else ""
