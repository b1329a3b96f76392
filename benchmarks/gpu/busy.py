"""A busy neighbour: keeps the card at work with matrix products until it is ended, and so limits its clock."""

from __future__ import annotations

import sys

import torch

from benchmarks.gpu.rows import on_card


def main() -> None:
    device = torch.device("cuda" if on_card() else "cpu")
    size, kind = (8192, torch.bfloat16) if on_card() else (256, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    print("busy", flush=True)
    while True:
        for _ in range(20):
            torch.mm(left, right)
        if on_card():
            torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
