"""The end of NCCL communicators whose peers are gone."""

from __future__ import annotations

import contextlib


def abort(inside: bool) -> int:
    """Abort the generation's NCCL communicators, those inside the replica only if so; returns how many."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.is_nccl_available()):
        return 0
    aborted = 0
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):
            if dist.get_backend(group) == "nccl":
                group.abort()
                aborted += 1
    return aborted
