"""torch's DeviceMesh: meshes whose groups are others in each generation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from unicron_transition.seams import process_groups


def make(device: str, ranks: torch.Tensor, names: Sequence[str]) -> Any:
    """Make a mesh of these ranks. In a world without peers it has groups of its own in each direction."""
    from torch.distributed.device_mesh import DeviceMesh

    if process_groups.without_peers():
        own = tuple(
            (process_groups.PEERLESS, None) for _ in names
        )  # torch would take a group of all ranks for the world
        mesh = DeviceMesh(device, ranks, mesh_dim_names=tuple(names), backend_override=own)
        _slice_without_peers()
        return mesh
    return DeviceMesh(device, ranks, mesh_dim_names=tuple(names))


def names_of(mesh: Any) -> list[str]:
    """Return the names by which a mesh finds its groups, one for each direction."""
    return list(mesh._dim_group_names)


def groups_of(mesh: Any) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Yield (name, group) for each direction of a mesh that is no part of another."""
    return zip(names_of(mesh), mesh.get_all_groups(), strict=True)


def is_on(tensor: Any, mesh: Any) -> bool:
    """Whether a distributed tensor is on this mesh, or on directions of it."""
    return bool(tensor.device_mesh._get_root_mesh() == mesh)


def renew(mesh: Any, ranks: torch.Tensor, groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Give a mesh, and every part of it, these ranks and groups. groups: by the names that the mesh knows.

    A mesh finds its groups by name. It stays equal to what it was, since DTensors are compared by their meshes.
    """
    mesh._rank_map.copy_(ranks.flatten())
    for name, group in groups.items():
        distributed_c10d._register_process_group(distributed_c10d.GroupName(name), group)
        mesh._pg_registry[name] = group


def _slice_without_peers() -> None:
    """In a world without peers let each rank take its part of its own tensor: nobody sends it one."""
    from torch.distributed.tensor import Replicate, Shard

    if hasattr(Shard._shard_tensor, "unicron_original"):
        return
    shard, replicate = Shard._shard_tensor, Replicate._make_replicate_tensor

    def own_shard(self: Any, tensor: Any, mesh: Any, mesh_dim: int, src_data_rank: int | None = 0) -> Any:
        return shard(self, tensor, mesh, mesh_dim, _source(src_data_rank))

    def own_copy(tensor: Any, mesh: Any, mesh_dim: int, src_data_rank: int | None = 0) -> Any:
        return replicate(tensor, mesh, mesh_dim, _source(src_data_rank))

    own_shard.unicron_original = shard  # type: ignore[attr-defined]
    Shard._shard_tensor = own_shard  # type: ignore[method-assign]
    Replicate._make_replicate_tensor = staticmethod(own_copy)  # type: ignore[method-assign]


def _source(rank: int | None) -> int | None:
    return None if process_groups.without_peers() else rank
