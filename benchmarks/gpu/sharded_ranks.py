"""Train tiny_sharded, a module that `fully_shard` has sharded, on the first card of the machine. Environment: its own,
and that of ``device``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch

import unicron
from benchmarks.gpu.device import BACKEND, DEVICE, note_all
from tests.support import tiny_sharded


def use_card() -> None:
    """Compute the micro-batches on the card; `fully_shard` moves the model there."""
    join, forward_step, save = unicron.init_process_group, tiny_sharded.forward_step, tiny_sharded.save

    def on_card(tokens: torch.Tensor, model: torch.nn.Module) -> Any:
        with DEVICE:
            return forward_step(tokens.to(DEVICE), model)

    unicron.init_process_group = lambda backend, **more: join(BACKEND, **more)
    tiny_sharded.forward_step = on_card
    tiny_sharded.save = lambda saved, path: save({name: tensor.cpu() for name, tensor in saved.items()}, path)


if __name__ == "__main__":
    use_card()
    note_all()
    tiny_sharded.main()
