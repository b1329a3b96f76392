"""What GPUs can do at most, by their type in Slurm's GRES: no job is faster than its nodes, whatever it says.

Dense bf16 (fp16 for GPUs without bf16) FLOP/s from the vendors' data sheets, without sparsity.
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
            count = int(words[-1]) if words[-1].isdigit() else 1
            total += count * peak(words[1] if len(words) > 1 and not words[1].isdigit() else "")
    return total or BEST
