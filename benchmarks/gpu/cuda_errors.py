"""Raise a real error of CUDA; without a card, what a program gets instead on a CPU.

    python -m benchmarks.gpu.cuda_errors KIND [catch]

catch: the process catches the error and prints as a JSON line whether it can go on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WRITES = r"""
extern "C" __global__ void writes(unsigned long long address) { *reinterpret_cast<float*>(address) = 1.0f; }
"""


def device_assert() -> None:
    """Use an index out of range in a kernel."""
    table = torch.ones(4, device=DEVICE)
    float(table[torch.tensor([4711], device=DEVICE)].sum())


def illegal_address() -> None:
    """Write to an address without memory in a kernel."""
    if DEVICE == "cpu":
        raise RuntimeError("no card: CUDA error: an illegal memory access was encountered [not real]")
    kernel = torch.cuda._compile_kernel(WRITES, "writes")
    kernel((1, 1, 1), (1, 1, 1), (0x10,))
    torch.cuda.synchronize()


def out_of_memory() -> None:
    """Allocate more memory than there is."""
    torch.empty(1 << 60, dtype=torch.uint8, device=DEVICE)


KINDS: dict[str, Callable[[], None]] = {
    "assert": device_assert,
    "illegal": illegal_address,
    "oom": out_of_memory,
}


def can_go_on() -> str:
    """Return "yes", or the error of the next operation on the device."""
    try:
        assert float(torch.ones(8, device=DEVICE).sum()) == 8.0
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "yes"


def main() -> None:
    kind, catch = sys.argv[1], len(sys.argv) > 2
    torch.ones(1, device=DEVICE)
    if not catch:
        KINDS[kind]()
        return
    try:
        KINDS[kind]()
        print(json.dumps({"type": "", "text": "no error", "then": can_go_on()}))
    except Exception as error:
        print(json.dumps({"type": type(error).__name__, "text": str(error)[:600], "then": can_go_on()}), flush=True)


if __name__ == "__main__":
    main()
