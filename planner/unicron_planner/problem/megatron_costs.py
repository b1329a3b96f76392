"""An analytic cost model of Megatron training: how long one iteration takes with (TP, PP, DP) and whether it fits.

FLOP formula: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(arXiv 2104.04473), eq. 3 without activation recomputation: 72 B s l h^2 (1 + s/(6h) + V/(12 l h)) per iteration.
Parameters: the same paper, eq. 2. Pipeline bubble: (p - 1) / m, section 2.2.1, and (p - 1) / (v m) where each rank has
v virtual stages, section 2.2.2, which sends v times as much and holds (1 + (p - 1) / (p v)) times the activations
(arXiv 2205.05198, section 4.2.3). Activation memory: Korthikanti et al. 2022
(arXiv 2205.05198), eq. 2 with tensor and sequence parallelism, and 2 s b h per layer with full recomputation. Sharded
parameters: Rajbhandari et al. 2019 (arXiv 1910.02054), section 7.2.2: each micro-batch gathers them twice and scatters
the gradients once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from unicron_planner.problem.objective import PlanError


@dataclass(frozen=True)
class Gpt:
    """A GPT model and its batch."""

    layers: int
    hidden: int
    heads: int
    seq_length: int = 2048  # tokens
    vocab: int = 51200
    global_batch: int = 512  # sequences

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "seq_length", "vocab", "global_batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PlanError(f"the model's {name} must be a whole number of 1 or more, not {value!r}")

    @property
    def parameters(self) -> float:
        """Number of parameters (arXiv 2104.04473, eq. 2)."""
        h, layers = self.hidden, self.layers
        return 12 * layers * h**2 * (1 + 13 / (12 * h) + (self.vocab + self.seq_length) / (12 * layers * h))

    @property
    def flops_per_token(self) -> float:
        """FLOP of forward and backward for one token, without recomputation (arXiv 2104.04473, eq. 3)."""
        h, layers = self.hidden, self.layers
        return 72 * layers * h**2 * (1 + self.seq_length / (6 * h) + self.vocab / (12 * layers * h))

    @property
    def flops_per_iteration(self) -> float:
        """FLOP of one optimizer step over the global batch."""
        return self.flops_per_token * self.seq_length * self.global_batch


@dataclass(frozen=True)
class Hardware:
    """One kind of node."""

    gpus: int = 8
    peak: float = 312e12
    """FLOP/s of a GPU in 16 bits."""
    memory: float = 80e9
    """Bytes of a GPU."""
    nvlink: float = 200e9
    """Bytes/s per GPU, one way; so is `network`."""
    network: float = 20e9
    efficiency: float = 0.55
    """The part of the peak that matrix products reach (a start value; calibration scales it)."""


A100 = Hardware()  # A100/A800 80 GB: 312 TFLOP/s dense bf16 (NVIDIA's data sheet), 8 x 200 Gbit/s network per node
A800 = A100


@dataclass(frozen=True)
class Parallel:
    """One way to split a model. Replicas may span nodes; GPUs beyond tp x pp x shard x dp idle; micro-batches may split
    unevenly."""

    tp: int
    pp: int
    dp: int
    micro_batch: int = 1
    """Sequences per micro-batch."""
    recompute: bool = False
    """Full activation recomputation."""
    virtual: int = 1
    """Virtual pipeline stages of a rank."""
    shard: int = 1
    """Ranks of a replica over which the parameters are sharded, each with micro-batches of its own."""

    @property
    def lanes(self) -> int:
        """Micro-batches that are computed at the same time."""
        return self.dp * self.shard


def parts(model: Gpt, hardware: Hardware, how: Parallel) -> tuple[float, float, float]:
    """Seconds of one iteration spent in (compute, traffic of tensors and shards, network traffic), bubbles included."""
    per_replica = math.ceil(model.global_batch / how.micro_batch / how.lanes)
    slots = per_replica + (how.pp - 1) / how.virtual
    tokens = how.micro_batch * model.seq_length
    work = model.flops_per_token * tokens * (4 / 3 if how.recompute else 1.0)
    compute = slots * work / (how.tp * how.pp) / (hardware.peak * hardware.efficiency)
    activation = 2.0 * tokens * model.hidden  # bytes of one activation in 16 bits
    reduces = 6 if how.recompute else 4  # all-reduces per layer: two forward, two backward, two again when recomputing
    per_slot = reduces * math.ceil(model.layers / how.pp) * activation
    link = hardware.nvlink if how.tp <= hardware.gpus else hardware.network
    tensor = slots * per_slot * 2 * (how.tp - 1) / how.tp / link
    send = 0.0 if how.pp == 1 else slots * how.virtual * 2 * activation / how.tp / hardware.network
    weights = model.parameters / (how.tp * how.pp)
    link = hardware.nvlink if how.tp * how.shard <= hardware.gpus else hardware.network
    gather = per_replica * (2 * 2.0 + 4.0) * weights * (how.shard - 1) / how.shard / link  # weights in 16 bits
    reduce = 4.0 * weights / how.shard * 2 * (how.dp - 1) / how.dp / hardware.network
    return compute, tensor + gather, send + reduce


def memory(model: Gpt, how: Parallel) -> float:
    """Bytes per GPU: weights and gradients (6 B a parameter) whole, optimizer state (12 B) spread over the data
    parallel ranks (distributed optimizer), and the activations of as many micro-batches as the first stage holds. With
    sharded parameters all of the state is spread over the shards, and one layer is whole while it is computed."""
    weights = model.parameters / (how.tp * how.pp)
    s, b, h = model.seq_length, how.micro_batch, model.hidden
    layers = math.ceil(model.layers / how.pp)
    state = weights * (6 + 12 / how.dp) if how.shard == 1 else weights * (18 / how.shard + 6 / layers)
    held = min(how.pp, math.ceil(model.global_batch / how.micro_batch / how.lanes))
    layer = s * b * h * (34 + 5 * model.heads * s / h) / how.tp
    activations = (held * layers * 2 * s * b * h / how.tp + layer) if how.recompute else held * layers * layer
    if how.virtual > 1:
        activations *= 1 + (how.pp - 1) / (how.pp * how.virtual)
    logits = 4.0 * s * b * model.vocab / how.tp
    return state + activations + logits


def ways(model: Gpt, hardware: Hardware, nodes: int) -> Iterator[Parallel]:
    """All splits that fit into memory on `nodes` nodes."""
    total = nodes * hardware.gpus
    tps = [t for t in (1, 2, 4, 8) if t <= hardware.gpus and model.heads % t == 0]
    pps = [p for p in range(1, model.layers + 1) if model.layers % p == 0]
    for t in tps:
        for p in pps:
            dp = min(total // (t * p), model.global_batch)
            if dp < 1:
                continue
            for micro_batch in (1, 2, 4, 8):
                if micro_batch * dp > model.global_batch:
                    break
                for recompute in (False, True):
                    how = Parallel(t, p, dp, micro_batch, recompute)
                    if memory(model, how) <= hardware.memory:
                        yield how
                        break
