"""The private class with which torch.distributed.checkpoint pickles the place of a chunk."""

from __future__ import annotations

from typing import Any

from unicron_transition.seams import table


def storage_info() -> Any:
    """Return the class, of (file, offset, length). Raises ImportError without torch, and
    :class:`~unicron_transition.seams.table.UnsupportedLayout` for a release that differs."""
    import torch
    from torch.distributed.checkpoint import filesystem

    if (found := table.difference(table.TORCH_CHECKPOINTS, torch.__version__)) is not None:
        table.refuse_release("torch", found)
    return filesystem._StorageInfo
