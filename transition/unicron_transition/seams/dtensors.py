"""torch's distributed tensors, of which a rank holds a part: the parameters of a module that `fully_shard` has sharded,
and what an optimizer keeps for them.

Nothing here communicates, since the other ranks might be gone. Neither `data_ptr()` nor `nbytes` of a distributed
tensor is about this rank's part (docs/behaviour/distributed-tensors.md).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from itertools import chain, product
from typing import Any, cast

import torch

from unicron_transition.seams import table

Range = tuple[int, int]  # [begin, end)
Block = tuple[tuple[int, ...], tuple[int, ...]]  # offset and extent


class Uneven(ValueError):
    """A distributed tensor is cut in a way that is not supported."""


def is_distributed(tensor: Any) -> bool:
    """Whether this is a distributed tensor."""
    found = sys.modules.get("torch.distributed.tensor")  # its import takes long
    return found is not None and isinstance(tensor, found.DTensor)


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a distributed tensor, in the same memory; any other tensor itself."""
    if not is_distributed(tensor):
        return cast(torch.Tensor, tensor)
    return cast(torch.Tensor, tensor._local_tensor)


def wrap(part: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a distributed tensor that is cut as `like`, of which this rank holds `part`; `part` itself if `like` is an
    ordinary tensor."""
    if not is_distributed(like):
        return part
    with torch.no_grad():
        made: torch.Tensor = type(like.data).from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    return made


def cut_alike(one: Any, other: Any) -> bool:
    """Whether two tensors of one shape have the same elements in this rank: both are ordinary, or cut in the same
    way."""
    if not is_distributed(one) or not is_distributed(other):
        return is_distributed(one) == is_distributed(other)
    return bool((one.device_mesh, one.placements) == (other.device_mesh, other.placements))


def blocks(tensor: Any) -> list[Block]:
    """Return the blocks of the whole tensor that this rank holds, in the order of its elements. Raises :class:`Uneven`
    for another cut than `fully_shard` and tensor parallelism make."""
    shape = tuple(tensor.shape)
    if not is_distributed(tensor):
        return [((0,) * len(shape), shape)]
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        raise Uneven("this rank is not in its mesh")
    found = blocks_at(shape, tuple(tensor.device_mesh.shape), tuple(place), tensor.placements)
    if sum(math.prod(extent) for _, extent in found) != local(tensor).numel():
        raise Uneven(f"its part here is {list(local(tensor).shape)}")
    return found


def blocks_at(
    shape: tuple[int, ...], size: Sequence[int], place: Sequence[int], placements: Iterable[Any]
) -> list[Block]:
    """Return such blocks of a tensor of this shape for the rank at `place` of a mesh of this size. Raises
    :class:`Uneven`."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    kept: list[list[Range]] = [[(0, extent)] for extent in shape]  # of each axis, in order
    for count, number, placement in zip(size, place, placements, strict=True):
        if isinstance(placement, _StridedShard):  # every count-th of smaller chunks
            factor = int(placement.split_factor)
            chunks = _chunks(kept[placement.dim], factor * count, placement)
            kept[placement.dim] = _merge(chunks[number::count])
        elif isinstance(placement, Shard):
            kept[placement.dim] = _chunks(kept[placement.dim], count, placement)[number]
        elif not isinstance(placement, Replicate):
            raise Uneven(f"it is {placement}")
    if any(len(ranges) > 1 for ranges in kept[1:]):
        raise Uneven("its part here is not in one piece")
    return [(tuple(begin for begin, _ in axes), tuple(end - begin for begin, end in axes)) for axes in product(*kept)]


def is_copy(tensor: Any) -> bool:
    """Whether another rank of the tensor's mesh has the same part and comes first."""
    if not is_distributed(tensor):
        return False
    where = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    return any(number and placement.is_replicate() for number, placement in where)


def parts_of(tensor: Any) -> int:
    """Return into how many parts a tensor is cut."""
    if not is_distributed(tensor):
        return 1
    cuts = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in cuts if not placement.is_replicate())


def is_cut_over(tensor: Any, direction: str) -> bool:
    """Whether the ranks of a mesh's direction have different parts of the tensor."""
    if not is_distributed(tensor):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    return any(
        name == direction and not placement.is_replicate()
        for name, placement in zip(names, tensor.placements, strict=True)
    )


def _chunks(ranges: Sequence[Range], count: int, placement: Any) -> list[list[Range]]:
    """Cut the places in these ranges of an axis into `count` chunks of the same size."""
    total = sum(end - begin for begin, end in ranges)
    size, rest = divmod(total, count)
    if rest:
        raise Uneven(f"{placement} cuts {total} elements into {count}")
    return [_part(ranges, number * size, (number + 1) * size) for number in range(count)]


def _part(ranges: Sequence[Range], begin: int, end: int) -> list[Range]:
    """Return the places number `begin` to `end` of those in the ranges."""
    found, at = list[Range](), 0
    for first, last in ranges:
        low, high = max(begin - at, 0), min(end - at, last - first)
        if low < high:
            found.append((first + low, first + high))
        at += last - first
    return found or [(0, 0)]


def _merge(chunks: Iterable[Iterable[Range]]) -> list[Range]:
    """Join neighbours."""
    found: list[Range] = []
    for begin, end in chain.from_iterable(chunks):
        if found and found[-1][1] == begin:
            found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return found


def sharding_modules(module: torch.nn.Module) -> list[Any]:
    """Return the modules in it that `fully_shard` was applied to. After a forward pass without a backward pass one can
    have whole parameters, until its `reshard()` is called."""
    found = sys.modules.get("torch.distributed.fsdp")
    return [] if found is None else [each for each in module.modules() if isinstance(each, found.FSDPModule)]


def check_torch() -> None:
    """Compare the private names of torch's distributed tensors with the table. Raises
    :class:`~unicron_transition.seams.table.UnsupportedLayout`."""
    table.check("torch", table.TORCH_DTENSORS)
