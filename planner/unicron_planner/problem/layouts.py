"""Several ways to split one job's model: which can run on how many nodes, and how fast each is.

Measured sizes count as measured. For the others the Megatron cost model gives an estimate, if the model is known: its
scale factors are fitted to the measurements of all ways together. Else each GPU counts as much as in the ways that were
measured. A way that has never run counts for less by the expected error of such an estimate, so that no job restarts
for a gain that may not exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from unicron_planner.problem import megatron_costs
from unicron_planner.problem.megatron_costs import Gpt, Hardware, Parallel
from unicron_planner.problem.throughput import MODEL_ERROR, NOISE, PRIOR, SPREAD, fit_flops, ridge

NodeRates = Mapping[int, float]  # aggregate FLOP/s by node count


@dataclass(frozen=True)
class Split:
    """One way to split the model."""

    name: str
    tp: int = 1
    pp: int = 1
    virtual: int = 1
    """Pipeline stages of a rank."""
    shard: int = 1
    """Ranks over which a replica's parameters are sharded."""

    @property
    def gpus(self) -> int:
        """GPUs of a replica."""
        return self.tp * self.pp * self.shard


def smallest(split: Split, gpus: int) -> int:
    """The fewest nodes of `gpus` GPUs that hold a replica."""
    return -(-split.gpus // gpus)


def parallel(
    split: Split, nodes: int, model: Gpt, hardware: Hardware, micro_batch: int = 1, recompute: bool = False
) -> Parallel | None:
    """The model's form on `nodes` nodes; None if no replica fits, into the GPUs or their memory."""
    dp = min(nodes * hardware.gpus // split.gpus, -(-model.global_batch // (micro_batch * split.shard)))
    if dp < 1 or model.heads % split.tp or model.layers % (split.pp * split.virtual) or model.hidden % split.shard:
        return None
    how = Parallel(split.tp, split.pp, dp, micro_batch, recompute, split.virtual, split.shard)
    return how if megatron_costs.memory(model, how) <= hardware.memory else None


@dataclass(frozen=True)
class JobFacts:
    """Facts about a job."""

    gpus: int
    """GPUs of a node."""
    per_node: float
    """FLOP/s of a node before anything has been measured."""
    model: Gpt | None = None
    """None if unknown."""
    hardware: Hardware = field(default_factory=Hardware)
    micro_batch: int = 1
    recompute: bool = False

    def parallel(self, split: Split, nodes: int) -> Parallel | None:
        """See :func:`parallel`."""
        assert self.model is not None
        return parallel(split, nodes, self.model, self.hardware, self.micro_batch, self.recompute)


def rates(
    splits: Sequence[Split], known: JobFacts, measured: Mapping[str, NodeRates], sizes: Iterable[int]
) -> dict[str, dict[int, float]]:
    """T(t,x) by split and node count, for each split that can run on any of these sizes; 0 at those where it cannot.

    Nodes that complete no replica bring nothing. measured: by the splits' names.
    """
    sizes = sorted(set(sizes))
    guess = _by_model(splits, known, measured, sizes) if known.model else _by_gpus(splits, known, measured, sizes)
    found = {}
    for split in splits:
        seen = {nodes: rate for nodes, rate in measured.get(split.name, {}).items() if rate > 0}
        fits = seen and {nodes: rate for nodes, rate in guess[split.name].items() if rate > 0 or nodes in seen}
        table = _through(seen, fits) if fits else guess[split.name]
        table = {nodes: _whole(split, known, table, nodes) for nodes in sizes}
        if any(table.values()):
            found[split.name] = table
    return found


def _whole(split: Split, known: JobFacts, table: NodeRates, nodes: int) -> float:
    """The throughput of the replicas that `nodes` nodes complete: that of the fewest nodes with as many."""
    replicas = nodes * known.gpus // split.gpus
    least = -(-replicas * split.gpus // known.gpus)
    return table.get(least, table.get(nodes, 0.0)) if replicas else 0.0


def _through(seen: NodeRates, guess: NodeRates) -> dict[int, float]:
    """The measured sizes, and the guess scaled to go through the nearest of them."""
    found = {}
    for nodes, rate in guess.items():
        near = min(seen, key=lambda size: (abs(size - nodes), size))
        base = guess.get(near, 0.0)
        found[nodes] = seen.get(nodes, rate * seen[near] / base if base > 0 else seen[near] * nodes / near)
    return found


def _by_gpus(
    splits: Sequence[Split], known: JobFacts, measured: Mapping[str, NodeRates], sizes: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Takes each node to be as fast as in the measured split; with several measured sizes, fits through them."""
    best: NodeRates = {}
    for split in splits:
        seen = {nodes: rate for nodes, rate in measured.get(split.name, {}).items() if rate > 0}
        if len(seen) > len(best) or (seen and len(seen) == len(best) and max(seen.values()) > max(best.values())):
            best = seen
    if len(best) >= 2:
        usual = fit_flops(best, sizes)
    else:
        per_node = next((rate / nodes for nodes, rate in best.items()), known.per_node)
        usual = {nodes: per_node * nodes for nodes in sizes}
    found = {}
    for split in splits:
        sure = 1.0 if measured.get(split.name) else 1.0 - MODEL_ERROR
        least = smallest(split, known.gpus)
        found[split.name] = {nodes: sure * rate if nodes >= least else 0.0 for nodes, rate in usual.items()}
    return found


def _by_model(
    splits: Sequence[Split], known: JobFacts, measured: Mapping[str, NodeRates], sizes: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Estimates with the cost model, scaled to all measurements."""
    assert known.model is not None
    work = known.model.flops_per_iteration
    by_name = {split.name: split for split in splits}
    features, seconds = [], []
    for name, seen in measured.items():
        for nodes, rate in seen.items():
            how = known.parallel(by_name[name], nodes) if name in by_name and rate > 0 else None
            if how is not None:
                features.append(_features(known, how))
                seconds.append(work / rate)
    factors = PRIOR
    if features:
        factors, _ = ridge(np.array(features), np.array(seconds), PRIOR, SPREAD, NOISE * np.array(seconds))
    found: dict[str, dict[int, float]] = {}
    for split in splits:
        sure = 1.0 if measured.get(split.name) else 1.0 - MODEL_ERROR
        table = found[split.name] = {}
        for nodes in sizes:
            how = known.parallel(split, nodes)
            table[nodes] = sure * work / float(_features(known, how) @ factors) if how is not None else 0.0
    return found


def _features(known: JobFacts, how: Parallel) -> np.ndarray:
    assert known.model is not None
    return np.array([*megatron_costs.parts(known.model, known.hardware, how), 1.0])
