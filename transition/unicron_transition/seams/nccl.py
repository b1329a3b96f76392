"""Aborts NCCL communicators whose peers are gone. Observations with a card are in docs/gpu.md."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from unicron_transition.seams import process_groups

ABORT_SECONDS = 0.1  # limit of a call; the aborts go on without it
SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # otherwise torch's watchdog ends the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # otherwise the same for a watchdog that waits for an abort
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",  # so that an unfinished communicator can be aborted
    # After an error the watchdog sleeps four times as long (default 60 s) with a lock that every collective and the end
    # of the group wait for.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
# Seconds to make a communicator, during which torch holds the lock that an abort needs (2.11; its default is 30 min).
MAKING = ("TORCH_NCCL_NONBLOCKING_TIMEOUT", "60")


def keep_torch_from_aborting() -> list[str]:
    """Keep torch from ending the process when a collective fails; to be called before the first group. Returns a line
    for each variable that the site has set to another value, which is overruled; only its time limit for making a
    communicator stays."""
    os.environ.setdefault(*MAKING)
    overruled = []
    for name, value in SETTINGS.items():
        before = os.environ.get(name, value)
        if before != value:
            overruled.append(f"{name}={before} would end healthy ranks, or hold them up: it is {value} here")
        os.environ[name] = value
    return overruled


class _Abort(threading.Thread):
    """The abort of one group's communicator."""

    def __init__(self, group: Any):
        super().__init__(name="unicron-abort", daemon=True)
        self._group = group
        self.had = False  # whether the group had a communicator

    def run(self) -> None:
        self.had = _has_communicator(self._group)
        with contextlib.suppress(RuntimeError):
            self._group.abort()


class Aborter:
    """Aborts communicators together, each once, from one place.

    Each abort has a thread of its own. An abort frees memory of the card, for which CUDA waits until all kernels of
    this process are over, including those of the other communicators (pytorch#119797); and torch runs each abort in a
    thread where no group call of NCCL can join them.

    A group has no communicator before its first collective, and may get one after an abort that found none. So the next
    call tries again, as long as the main thread still waits.
    """

    def __init__(self) -> None:
        self.inside: set[Any] = set()  # the groups inside the replica
        self.begun = False
        """This process has aborted communicators of the generation, so their errors are no news."""
        self._aborted: set[int] = set()
        self._under_way: dict[int, _Abort] = {}
        self._lock = threading.Lock()

    def abort(self, inside: bool) -> int:
        """Abort the generation's communicators, with `inside` also those inside the replica; return how many are
        done."""
        begun = self._start_aborts(inside)
        deadline = time.monotonic() + ABORT_SECONDS
        for abort in begun.values():
            abort.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            over = {key for key, abort in begun.items() if not abort.is_alive() and self._under_way.get(key) is abort}
            for key in over:
                del self._under_way[key]
            had = {key for key in over if begun[key].had}
            self._aborted |= had
        return len(had)

    def _start_aborts(self, inside: bool) -> dict[int, _Abort]:
        """Start the aborts that are due, except those under way already, and return all by group."""
        if not (dist.is_available() and dist.is_initialized() and dist.is_nccl_available()):
            return {}
        with self._lock:
            due = [
                group
                for group in process_groups.names()
                if _is_nccl(group) and id(group) not in self._aborted and (inside or group not in self.inside)
            ]
            for group in due:
                self.begun = True
                if id(group) not in self._under_way:
                    self._under_way[id(group)] = abort = _Abort(group)
                    abort.start()
            return {id(group): self._under_way[id(group)] for group in due}

    def forget_aborted(self) -> None:
        """Forget the aborts: new groups may have the identities of old ones."""
        with self._lock:
            self.begun = False
            self._aborted.clear()
            self._under_way.clear()


def _has_communicator(group: Any) -> bool:
    """Whether the communicator is complete. An unfinished one is aborted twice, which torch ignores."""
    return bool(group._get_backend(torch.device("cuda"))._is_initialized())


def _is_nccl(group: Any) -> bool:
    try:
        return dist.get_backend(group) == "nccl"
    except (RuntimeError, ValueError):  # torn down meanwhile
        return False
