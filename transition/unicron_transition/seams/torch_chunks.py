"""The private class with which torch.distributed.checkpoint pickles where the bytes of a chunk are."""

from __future__ import annotations

from typing import Any

from unicron_transition.seams import table


def storage_info() -> Any:
    """The class, of (file, offset, length). Raises ImportError where there is no torch, and
    :class:`~unicron_transition.seams.table.UnsupportedLayout` for a release in which it is another."""
    import torch
    from torch.distributed.checkpoint import filesystem

    if (found := table.difference(table.TORCH_CHECKPOINTS, torch.__version__)) is not None:
        table.refuse_release("torch", found)
    return filesystem._StorageInfo
