"""Layouts and kinds of training in which recovery is tried: what one run of them is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import proof
from tests.support.rank_harness import Ranks
from unicron_transition.megatron import limits

ITERATIONS = 4
OVERFLOWS = str(2.0**22)  # a scale that is too large in the first two iterations, or three
LAYOUTS = {  # TP PP VPP, replicas
    "dp": ("1 1 1", 4),
    "tp": ("2 1 1", 2),
    "pp": ("1 2 1", 2),
    "vpp": ("1 2 2", 2),
    "tp-pp": ("2 2 1", 2),
}
SHARED_EXPERTS = {  # TP PP VPP EP ETP, replicas
    "ep": ("1 1 1 2 1", 2),
    "ep-tp": ("2 1 1 2 1", 2),  # the experts are shared by the tensor-parallel ranks alone
    "ep-etp": ("2 1 1 2 2", 2),
    "ep-pp": ("1 2 1 2 1", 2),
    "ep-vpp": ("1 2 2 2 1", 2),
    "ep-alone": ("2 1 1 2 2", 1),
    "ep-half": ("4 1 1 2 1", 2),  # two of a replica's tensor-parallel ranks have the same experts
    "ep-across": ("2 1 1 3 1", 2),  # neither divides the other: a block has them twice
}
EIGHT = {"TINY_EXPERTS": "aux_loss", "TINY_EXPERT_COUNT": "8", "TINY_DISPATCHER": "alltoall"}
KINDS: dict[str, dict[str, str]] = {
    "plain": {},
    "overlap": {"TINY_OVERLAP": "1"},
    "dropout": {"TINY_DROPOUT": "0.1"},
    "tokens": {"TINY_TOKENS": "1"},
    "bf16": {"TINY_BF16": "1"},
    "host": {"UNICRON_SNAPSHOT": "host"},
    "no-copies": {"UNICRON_SNAPSHOT": "none", "TINY_OVERLAP": "1"},
    "sharded": {"TINY_DISTOPT": "1"},
    "sharded-overlap": {"TINY_DISTOPT": "1", "TINY_OVERLAP": "1", "TINY_GATHER": "1"},
    "sharded-bf16": {"TINY_DISTOPT": "1", "TINY_BF16": "1", "TINY_DROPOUT": "0.1"},
    "sharded-host": {"TINY_DISTOPT": "1", "UNICRON_SNAPSHOT": "host"},
    "sharded-no-copies": {"TINY_DISTOPT": "1", "UNICRON_SNAPSHOT": "none"},
    "fp16": {"TINY_FP16": str(2.0**18)},  # doubled after two iterations
    "fp16-overflow": {"TINY_FP16": OVERFLOWS},
    "sharded-fp16": {"TINY_DISTOPT": "1", "TINY_OVERLAP": "1", "TINY_GATHER": "1", "TINY_FP16": OVERFLOWS},
    "experts": {"TINY_EXPERTS": "aux_loss", "TINY_TOKENS": "1"},
    "experts-bias": {"TINY_EXPERTS": "bias", "TINY_FP16": str(2.0**19)},  # too large in the first and the last
    "experts-sequence": {"TINY_EXPERTS": "seq_aux_loss", "TINY_OVERLAP": "1", "TINY_BF16": "1"},
    "sharded-experts": {"TINY_EXPERTS": "bias", "TINY_DISTOPT": "1", "TINY_OVERLAP": "1"},
    "eight": EIGHT,
    "eight-allgather": EIGHT | {"TINY_DISPATCHER": "allgather", "TINY_TOKENS": "1"},
    "eight-bias": EIGHT | {"TINY_EXPERTS": "bias", "TINY_BF16": "1"},
    "eight-fp16": EIGHT | {"TINY_FP16": str(2.0**19)},
    "eight-overlap": EIGHT | {"TINY_OVERLAP": "1", "TINY_MTP": "1"},
    "six": EIGHT | {"TINY_EXPERT_COUNT": "6"},
    "eight-sharded": EIGHT | {"TINY_DISTOPT": "1"},
    "eight-sharded-overlap": EIGHT | {"TINY_DISTOPT": "1", "TINY_OVERLAP": "1", "TINY_GATHER": "1"},
    "mtp": {"TINY_MTP": "1"},
    "sharded-mtp": {"TINY_MTP": "2", "TINY_EXPERTS": "aux_loss", "TINY_DISTOPT": "1", "TINY_TOKENS": "1"},
}


def size_of(layout: str) -> int:
    """Ranks of a replica, by a shape of :data:`LAYOUTS`."""
    tensor, pipeline, _, *shared = map(int, layout.split())
    return tensor * pipeline * lanes_of(layout) if shared else tensor * pipeline


def lanes_of(layout: str) -> int:
    """Data-parallel ranks that share experts."""
    tensor, _, _, *shared = map(int, layout.split())
    return limits.lanes_of(tensor, *shared) if shared else 1


def train(out: Path, layout: str, settings: dict[str, str], faults: list[dict], **keywords: Any) -> Ranks:
    """One run to its end, its ledgers proven. layout: a name of :data:`LAYOUTS`."""
    shape, replicas = (LAYOUTS | SHARED_EXPERTS)[layout]
    size = size_of(shape)
    environment = {"TINY_LAYOUT": shape, "TINY_ITERATIONS": str(ITERATIONS), **settings}
    ranks = Ranks(out, replicas * size, faults, fork=True, replica=size, **keywords, **environment)
    ranks.drive()
    proof.exactly_once(ranks, ITERATIONS, lanes_of(shape))
    return ranks
