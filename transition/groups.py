"""Process groups of a generation: build, tear down, and re-point Megatron's cached handles to the new ones."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from transition.connecting import interruptible

COLLECTIVE_TIMEOUT = 1800.0  # seconds, torch's default; a hang is found by the detector long before
ENTER_TIMEOUT = 20.0  # seconds for one group to connect
BOUNDARY_TIMEOUT = 24 * 3600.0  # seconds that a newcomer waits for the others to reach an iteration boundary
CONNECT_SECONDS = 0.5


class UnsupportedLayout(RuntimeError):
    """The job's parallel layout cannot be healed by this release."""


def collective_timeout() -> datetime.timedelta:
    """UNICRON_COLLECTIVE_TIMEOUT in seconds, default 30 minutes."""
    return datetime.timedelta(seconds=float(os.environ.get("UNICRON_COLLECTIVE_TIMEOUT", COLLECTIVE_TIMEOUT)))


def connect_store(address: str, prefix: str, lost: Callable[[], bool]) -> Any:
    """The rendezvous store of one generation: keys under `prefix`, at `address` (host:port).

    torch retries a refused connection deaf to everything, so the port is tried first; raises ConnectionError once
    `lost()`, or after ENTER_TIMEOUT.
    """
    import torch.distributed as dist

    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + ENTER_TIMEOUT
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
            break
        except OSError as error:
            if lost() or time.monotonic() > deadline:
                raise ConnectionError(f"the rendezvous store {address} is gone: {error}") from None
            time.sleep(0.05)
    store = dist.TCPStore(host, int(port), None, False, timeout=datetime.timedelta(seconds=ENTER_TIMEOUT))
    return dist.PrefixStore(prefix, store)


def wait_for_members(store: Any) -> None:
    """A newcomer waits here until a member has reached the boundary. Its socket can be shut down to end the wait."""
    store.wait(["open"], datetime.timedelta(seconds=BOUNDARY_TIMEOUT))


def open_to_newcomers(store: Any) -> None:
    """A member is at the boundary: from now on everybody connects, within ENTER_TIMEOUT."""
    store.set("open", "1")


def init_world(backend: str, store: Any, rank: int, size: int) -> None:
    """`init_process_group` on `store`, quick to give up while it connects, patient once it is there."""
    import torch.distributed as dist

    hook = sys.excepthook
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=ENTER_TIMEOUT)
    )
    sys.excepthook = hook  # torch wraps it once more each time: a traceback would get a prefix for every generation


def be_patient() -> None:
    """Give every group of the generation the time-out of training."""
    import torch.distributed as dist

    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(collective_timeout(), group)


def check_layout() -> None:
    """Raises :class:`UnsupportedLayout` unless the job is purely data parallel."""
    from megatron.core import parallel_state

    for name, size in (
        ("tensor", parallel_state.get_tensor_model_parallel_world_size()),
        ("pipeline", parallel_state.get_pipeline_model_parallel_world_size()),
        ("context", parallel_state.get_context_parallel_world_size()),
        ("expert", parallel_state.get_expert_model_parallel_world_size()),
    ):
        if size != 1:
            raise UnsupportedLayout(
                f"unicron heals data-parallel jobs; this one has {name} parallel size {size}: run it with --no-unicron"
            )


def rebuild(backend: str, store: Any, members: Sequence[int], slot: int, lost: Callable[[], bool]) -> None:
    """Build the world and Megatron's groups of a generation whose ranks are `members` in this order; the old ones are
    torn down. Raises ConnectionError or RuntimeError when a member does not connect, at once when `lost()`."""
    from megatron.core import parallel_state

    with interruptible(lost):
        init_world(backend, store, list(members).index(slot), len(members))
        parallel_state.initialize_model_parallel(distributed_timeout_minutes=ENTER_TIMEOUT / 60)
    be_patient()


def tear_down() -> None:
    """End all groups. Errors of connections that are already broken are expected."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    with contextlib.suppress(RuntimeError):
        if dist.is_initialized():
            dist.destroy_process_group()
    # torch counts groups to name their keys in the store, and forgets to start over when the world failed to connect:
    # ranks that failed and ranks that are new would then wait for each other under different names.
    dist.distributed_c10d._world.group_count = 0
    parallel_state.destroy_model_parallel()


def roles() -> dict[str, Any]:
    """Role name -> ProcessGroup: Megatron's module globals and the world."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    found = {
        name: value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and isinstance(value, dist.ProcessGroup)
    }
    return {**found, "WORLD": dist.group.WORLD}


def repoint(holders: Iterable[Any], old: dict[str, Any], new: dict[str, Any]) -> int:
    """Replace the old groups by the new ones of the same role in the attributes of `holders`; returns how many
    attributes changed.

    `old` must have been taken before the tear-down. Raises :class:`UnsupportedLayout` for a group that has no role,
    since a collective on it would hang.
    """
    import torch.distributed as dist
    from megatron.core.process_groups_config import ProcessGroupCollection

    by_identity = {id(group): new.get(name) for name, group in old.items()}
    seen: set[int] = set()
    changed = 0

    def replacement(owner: Any, name: str, group: Any) -> Any:
        if id(group) in by_identity:
            return by_identity[id(group)]
        if any(group is present for present in new.values()):
            return group
        raise UnsupportedLayout(
            f"{type(owner).__name__}.{name} holds a process group that unicron does not know how to rebuild"
        )

    def visit(owner: Any) -> None:
        nonlocal changed
        attributes = getattr(owner, "__dict__", None)
        if attributes is None or id(owner) in seen:
            return
        seen.add(id(owner))
        for name, value in list(attributes.items()):
            if isinstance(value, dist.ProcessGroup):
                attributes[name] = replacement(owner, name, value)
                changed += 1
            elif isinstance(value, ProcessGroupCollection):
                visit(value)
            elif isinstance(value, list) and value and all(isinstance(item, dist.ProcessGroup) for item in value):
                attributes[name] = [replacement(owner, name, item) for item in value]
                changed += len(value)

    for holder in holders:
        visit(holder)
    return changed


def group_holders(model: Sequence[Any], optimizer: Any) -> list[Any]:
    """Every Megatron object that caches process groups: DDP, its modules, buffers, bucket groups, and the
    optimizers."""
    holders: list[Any] = []
    for chunk in model:
        holders += [chunk, *chunk.module.modules(), *buffers(chunk), *bucket_groups(chunk)]
    return [*holders, optimizer, *getattr(optimizer, "chained_optimizers", [])]


def buffers(chunk: Any) -> list[Any]:
    """The gradient buffers of one DDP model chunk."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def bucket_groups(chunk: Any) -> list[Any]:
    """The bucket groups (units of the gradient reduce) of one DDP model chunk."""
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
