"""The end of NCCL communicators whose peers are gone. Not yet run on a GPU."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else torch's own watchdog ends the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # the same, for a watchdog that waits for an abort
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",  # a communicator that is being made can be aborted
}


def settle(backend: str) -> None:
    """Before the first group: what torch must not do by itself when a collective fails. A site that sets it otherwise
    is overruled, and told."""
    if backend != "nccl":
        return
    for name, value in SETTINGS.items():
        before = os.environ.get(name, value)
        if before != value:
            print(f"unicron: {name}={before} would end healthy ranks: it is {value} here", file=sys.stderr, flush=True)
        os.environ[name] = value


class Aborter:
    """Aborts communicators all together, each once, from one place. `inside`: the groups inside the replica.

    A group has no communicator before its first collective, and may get one after an abort that found none: it is
    tried again with the next call, as long as somebody still waits.
    """

    def __init__(self) -> None:
        self.inside: set[Any] = set()
        self._aborted: set[int] = set()

    def __call__(self, inside: bool) -> int:
        """Abort the generation's communicators, those inside the replica only if so; returns how many."""
        import torch
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized() and dist.is_nccl_available()):
            return 0
        names = dict(dist.distributed_c10d._world.pg_names)
        due = [
            group
            for group in sorted(names, key=lambda group: str(names[group]), reverse=True)
            if _is_nccl(group) and id(group) not in self._aborted and (inside or group not in self.inside)
        ]
        if not due:
            return 0
        had = {id(group) for group in due if _has_communicator(group)}
        # One group call, else the aborts of several communicators wait for each other (pytorch#119797).
        backend: Any = due[0]._get_backend(torch.device("cuda"))
        backend._group_start()
        try:
            for group in due:
                with contextlib.suppress(RuntimeError):
                    group.abort()
        finally:
            backend._group_end()
        self._aborted |= had
        return len(had)

    def forget(self) -> None:
        """New groups may have the identities of old ones."""
        self._aborted.clear()


def _has_communicator(group: Any) -> bool:
    """Made, or being made: only one that is wholly there says so, hence a second abort of the same, which torch
    leaves out."""
    import torch

    return bool(group._get_backend(torch.device("cuda"))._is_initialized())


def _is_nccl(group: Any) -> bool:
    import torch.distributed as dist

    try:
        return dist.get_backend(group) == "nccl"
    except (RuntimeError, ValueError):  # torn down meanwhile
        return False
