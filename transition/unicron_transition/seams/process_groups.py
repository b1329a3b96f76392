"""torch's registry of process groups, so that groups are built by their own ranks alone and outlive the world."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from unicron_transition.seams import table

PEERLESS = "fake"  # torch's backend without peers, whose collectives return at once
_world: Any = distributed_c10d._world


def init_without_peers(rank: int, size: int) -> None:
    """Initialize torch.distributed as this rank of a world without peers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    _make_groups_without_peers()
    dist.init_process_group(PEERLESS, store=FakeStore(), rank=rank, world_size=size)


def without_peers() -> bool:
    """Whether this rank is in a world without peers."""
    return dist.is_initialized() and dist.get_backend() == PEERLESS


def _make_groups_without_peers() -> None:
    """In such a world make gloo groups without peers, too: Megatron asks for gloo by name."""
    original = dist.new_group
    if hasattr(original, "unicron_original"):
        return

    def new_group(*arguments: Any, **keywords: Any) -> Any:
        if without_peers():
            arguments, keywords = arguments[:2], {**keywords, "backend": PEERLESS}
        return original(*arguments, **keywords)

    new_group.unicron_original = original  # type: ignore[attr-defined]
    dist.new_group = new_group


def connect(name: str, backend: str, ranks: Sequence[int], me: int, limit: timedelta) -> Any:
    """Build a group of these ranks of the world, with a name of its own: torch's names count how many groups each rank
    has made, and only the ranks of a group make it."""
    named = distributed_c10d.GroupName(f"{name}.{'.'.join(map(str, ranks[:8]))}")
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks), ranks.index(me), list(ranks), distributed_c10d.Backend(backend), _store(), named, timeout=limit
    )
    _world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return group


def _store() -> Any:
    return _world.pg_map[distributed_c10d._get_default_group()][1]


def register(group: Any, backend: str, numbers: Mapping[int, int]) -> None:
    """Tell torch about a group that outlived its world. numbers: rank in the world -> rank in the group."""
    _world.pg_map[group] = (backend, _store())
    # cannot clash with torch's names of later groups
    _world.pg_names[group] = distributed_c10d.GroupName(f"kept.{id(group)}")
    _world.pg_backend_config[group] = str(distributed_c10d.BackendConfig(distributed_c10d.Backend(backend)))
    _world.pg_group_ranks[group] = dict(sorted(numbers.items(), key=lambda item: item[1]))


def forget(kept: Collection[Any]) -> None:
    """Remove these groups from the registry, so that the end of the world does not end them."""
    identities = set(map(id, kept))
    for group in [group for group in _world.pg_map if id(group) in identities]:
        for registry in (_world.pg_map, _world.pg_names, _world.pg_group_ranks, _world.pg_backend_config):
            registry.pop(group, None)


def names() -> dict[Any, str]:
    """Return group -> name of all groups that torch knows."""
    return dict(distributed_c10d._world.pg_names)


def set_timeouts(limit: timedelta) -> None:
    """Give every group this time-out."""
    for group in list(_world.pg_map):
        distributed_c10d._set_pg_timeout(limit, group)


def tear_down() -> None:
    """End all groups that torch knows. Errors of broken connections are expected."""
    with contextlib.suppress(RuntimeError):
        if dist.is_initialized():
            dist.destroy_process_group()
    # torch counts groups to name their keys in the store, and does not start over when the world failed to connect.
    _world.group_count = 0


def init_world(backend: str, store: Any, rank: int, size: int, limit: timedelta) -> None:
    """Call `init_process_group`, which gives up after `limit`."""
    hook = sys.excepthook
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    sys.excepthook = hook  # torch wraps it again in each generation, and each wrapper adds a prefix


def check_torch(peers: bool) -> None:
    """Compare torch with the table. peers: the rank begins in a world with others."""
    table.check("torch", table.TORCH, () if peers else (table.PEERLESS,))
