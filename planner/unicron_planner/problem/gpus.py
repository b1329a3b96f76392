"""Peak FLOP/s and memory of GPUs by their type in Slurm's GRES: no job is faster than its nodes, whatever it says.

Dense bf16 (fp16 for GPUs without bf16) FLOP/s and memory from the vendors' data sheets, without sparsity.
"""

from __future__ import annotations

import re

PEAK: dict[str, float] = {
    "t4": 65e12,
    "v100": 125e12,
    "a10": 125e12,
    "a30": 165e12,
    "a40": 149.7e12,
    "a6000": 154.8e12,
    "a100": 312e12,
    "a800": 312e12,
    "l4": 121e12,
    "l40": 181e12,
    "l40s": 362e12,
    "h20": 148e12,
    "h800": 989.4e12,
    "h100": 989.4e12,
    "h200": 989.4e12,
    "gh200": 989.4e12,
    "b100": 1750e12,
    "b200": 2250e12,
    "gb200": 2500e12,
    "b300": 2500e12,
    "gb300": 2500e12,
    "mi100": 184.6e12,
    "mi210": 181e12,
    "mi250": 362.1e12,
    "mi250x": 383e12,
    "mi300a": 980.6e12,
    "mi300x": 1307.4e12,
    "mi325x": 1307.4e12,
    "mi355x": 2516.6e12,
}
BEST = max(PEAK.values())
MEMORY: dict[str, float] = {  # bytes; of types that are sold with several sizes the smallest
    "t4": 16e9,
    "v100": 16e9,
    "a10": 24e9,
    "a30": 24e9,
    "a40": 48e9,
    "a6000": 48e9,
    "a100": 40e9,
    "a800": 40e9,
    "l4": 24e9,
    "l40": 48e9,
    "l40s": 48e9,
    "h20": 96e9,
    "h800": 80e9,
    "h100": 80e9,
    "h200": 141e9,
    "gh200": 96e9,
    "b200": 180e9,
    "gb200": 186e9,
    "b300": 270e9,
    "gb300": 279e9,
    "mi100": 32e9,
    "mi210": 64e9,
    "mi250": 128e9,
    "mi250x": 128e9,
    "mi300a": 128e9,
    "mi300x": 192e9,
    "mi325x": 256e9,
    "mi355x": 288e9,
}


def peak(kind: str) -> float:
    """FLOP/s of one GPU of this type: "a100", "nvidia_a100-sxm4-80gb". The best that is known for others."""
    words = re.split(r"[^a-z0-9]+", kind.lower())
    known = [PEAK[word] for word in words if word in PEAK]
    return max(known, default=BEST)


def node_peak(gres: str) -> float:
    """FLOP/s of a node by its GRES, as "gpu:a100:8,nic:2"; of one of the best GPUs where it lists none: what a node
    without GPUs does is less."""
    total = 0.0
    for item in gres.split(","):
        words = item.strip().split(":")
        if words[0] == "gpu":
            count = int(words[-1]) if words[-1].isdecimal() else 1
            total += count * peak(words[1] if len(words) > 1 and not words[1].isdecimal() else "")
    return total or BEST


def gpu_peak(gres: str) -> float | None:
    """FLOP/s of one GPU of a node by its GRES; None for a type that is not known."""
    return max((PEAK[word] for word in _words(gres) if word in PEAK), default=None)


def gpu_memory(gres: str) -> float:
    """Bytes of one GPU of a node by its GRES ("gpu:a100:8", "gpu:nvidia_a100-sxm4-80gb:8"); endless for a type that is
    not known."""
    words = _words(gres)
    said = [float(word.removesuffix("gb")) * 1e9 for word in words if re.fullmatch(r"\d+gb", word)]
    return min(said or [MEMORY[word] for word in words if word in MEMORY], default=float("inf"))


def _words(gres: str) -> list[str]:
    """The words in the types of a node's GPUs."""
    items = [item.strip().split(":") for item in gres.lower().split(",")]
    return [word for item in items if item[0] == "gpu" for word in re.split(r"[^a-z0-9]+", ":".join(item[1:]))]
