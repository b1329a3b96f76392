"""Bounds of FLOP/s by GRES."""

from __future__ import annotations

import pytest

from unicron_planner.problem.gpus import BEST, gpu_memory, gpu_peak, node_peak


@pytest.mark.parametrize(
    ("gres", "flops"),
    [
        ("gpu:a100:8", 8 * 312e12),
        ("gpu:nvidia_a100-sxm4-80gb:4,nic:2", 4 * 312e12),
        ("gpu:NVIDIA_H100_80GB_HBM3:8", 8 * 989.4e12),
        ("gpu:2", 2 * BEST),
        ("gpu:unheardof:2", 2 * BEST),
        ("gpu", BEST),
        ("", BEST),
        ("gpu:a100:2,gpu:t4:1", 2 * 312e12 + 65e12),
    ],
)
def test_a_node_is_bounded_by_its_gpus(gres: str, flops: float) -> None:
    assert node_peak(gres) == pytest.approx(flops)


def test_one_gpu_and_its_memory():
    assert gpu_peak("gpu:a100:8,nic:2") == 312e12 and gpu_peak("gpu:8") is None
    assert gpu_memory("gpu:nvidia_a100-sxm4-80gb:4") == 80e9
    assert gpu_memory("gpu:a100:8") == 40e9, "of a type that is sold with several sizes the smallest"
    assert gpu_memory("gpu:1") == gpu_memory("") == float("inf")
