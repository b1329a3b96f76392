"""Abort NCCL communicators whose peers are gone."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist

from unicron.transition.seams import process_groups

SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else torch's own watchdog ends the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # else the same for a watchdog that waits for an abort
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",  # a communicator that is being made can be aborted
}


def keep_torch_from_aborting() -> list[str]:
    """Keep torch from ending the process when a collective fails. Call it before the first group. Returns a line for
    each variable that the site has set otherwise; these are overruled."""
    overruled = []
    for name, value in SETTINGS.items():
        before = os.environ.get(name, value)
        if before != value:
            overruled.append(f"{name}={before} would end healthy ranks: it is {value} here")
        os.environ[name] = value
    return overruled


class Aborter:
    """Aborts communicators all together, each once, from one place. `inside`: the groups inside the replica.

    A group has no communicator before its first collective, and may get one after an abort that found none: the next
    call tries it again, as long as somebody still waits.
    """

    def __init__(self) -> None:
        self.inside: set[Any] = set()
        self._aborted: set[int] = set()

    def abort(self, inside: bool) -> int:
        """Abort the generation's communicators, those inside the replica only if so; returns how many."""
        if not (dist.is_available() and dist.is_initialized() and dist.is_nccl_available()):
            return 0
        names = process_groups.names()
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

    def forget_aborted(self) -> None:
        """New groups may have the identities of old ones."""
        self._aborted.clear()


def _has_communicator(group: Any) -> bool:
    """Whether the communicator is wholly made. One in the making does not say so, and is aborted twice; torch leaves
    the second abort out."""
    return bool(group._get_backend(torch.device("cuda"))._is_initialized())


def _is_nccl(group: Any) -> bool:
    try:
        return dist.get_backend(group) == "nccl"
    except (RuntimeError, ValueError):  # torn down meanwhile
        return False
