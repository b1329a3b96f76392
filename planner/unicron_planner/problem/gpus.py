"""Peak FLOP/s and memory of GPUs by their type in Slurm's GRES: no job is faster than its nodes, whatever it claims.

Dense bf16 (fp16 for GPUs without bf16) FLOP/s and memory from the vendors' data sheets, without sparsity.
"""

from __future__ import annotations

import re

UNKNOWN = float("inf")
GPUS: dict[str, tuple[float, float]] = {  # FLOP/s and bytes; of types that are sold with several sizes the smallest
    "t4": (65e12, 16e9),
    "v100": (125e12, 16e9),
    "a10": (125e12, 24e9),
    "a30": (165e12, 24e9),
    "a40": (149.7e12, 48e9),
    "a6000": (154.8e12, 48e9),
    "a100": (312e12, 40e9),
    "a800": (312e12, 40e9),
    "l4": (121e12, 24e9),
    "l40": (181e12, 48e9),
    "l40s": (362e12, 48e9),
    "h20": (148e12, 96e9),
    "h800": (989.4e12, 80e9),
    "h100": (989.4e12, 80e9),
    "h200": (989.4e12, 141e9),
    "gh200": (989.4e12, 96e9),
    "b100": (1750e12, UNKNOWN),
    "b200": (2250e12, 180e9),
    "gb200": (2500e12, 186e9),
    "b300": (2500e12, 270e9),
    "gb300": (2500e12, 279e9),
    "mi100": (184.6e12, 32e9),
    "mi210": (181e12, 64e9),
    "mi250": (362.1e12, 128e9),
    "mi250x": (383e12, 128e9),
    "mi300a": (980.6e12, 128e9),
    "mi300x": (1307.4e12, 192e9),
    "mi325x": (1307.4e12, 256e9),
    "mi355x": (2516.6e12, 288e9),
}
BEST = max(flops for flops, _ in GPUS.values())


def peak(kind: str) -> float:
    """FLOP/s of one GPU of this type ("a100", "nvidia_a100-sxm4-80gb"); of the best known GPU for an unknown type."""
    words = re.split(r"[^a-z0-9]+", kind.lower())
    known = [GPUS[word][0] for word in words if word in GPUS]
    return max(known, default=BEST)


def node_peak(gres: str) -> float:
    """FLOP/s of a node by its GRES ("gpu:a100:8,nic:2"). A node without GPUs counts as one of the best GPUs."""
    total = 0.0
    for item in gres.split(","):
        words = item.strip().split(":")
        if words[0] == "gpu":
            count = int(words[-1]) if words[-1].isdecimal() else 1
            total += count * peak(words[1] if len(words) > 1 and not words[1].isdecimal() else "")
    return total or BEST


def gpu_peak(gres: str) -> float | None:
    """FLOP/s of one GPU of a node by its GRES; None for an unknown type."""
    return max((GPUS[word][0] for word in _words(gres) if word in GPUS), default=None)


def gpu_memory(gres: str) -> float:
    """Bytes of one GPU of a node by its GRES ("gpu:nvidia_a100-sxm4-80gb:8"); infinite for an unknown type."""
    words = _words(gres)
    stated = [float(word.removesuffix("gb")) * 1e9 for word in words if re.fullmatch(r"\d+gb", word)]
    return min(stated or [GPUS[word][1] for word in words if word in GPUS], default=UNKNOWN)


def _words(gres: str) -> list[str]:
    """The words in the types of a node's GPUs."""
    items = [item.strip().split(":") for item in gres.lower().split(",")]
    return [word for item in items if item[0] == "gpu" for word in re.split(r"[^a-z0-9]+", ":".join(item[1:]))]
