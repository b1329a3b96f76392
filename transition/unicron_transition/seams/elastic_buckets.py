"""Changes the data-parallel size of Megatron's DDP buffers and distributed optimizer in place.

Megatron cuts each bucket of a buffer into one part for each data-parallel rank, and fixes the cut when it is built. A
rebuild would need a second copy of parameters and gradients, and the user's script, the schedule and the autograd hooks
hold the old objects. So buckets get room at their end (:func:`prepare`) for every size up to the one for which they are
built. Parameters never move, and a change of size (:func:`resize`) only changes views, ranges and the shards of the
main parameters. Each size has exactly the shards that Megatron would make for it.

The room is at most 256 elements for each data-parallel rank and bucket: with 48 ranks 0.03 % of a bucket of 40 million
parameters, Megatron's default. With `pad_buckets_for_high_nccl_busbw` it is up to 131072 elements.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from typing import Any

import torch
import torch.distributed as dist

from unicron_transition.seams import megatron_core, table
from unicron_transition.seams.table import CORE, OPTIMIZER, UnsupportedLayout

QUANTUM = 128  # 256 bytes in parameters of two bytes, Megatron's boundaries of buckets
NCCL_QUANTUM = 2**16  # with `pad_buckets_for_high_nccl_busbw`
_PARAMETERS = "unicron_parameters"  # a distributed optimizer's attribute: the model's parameters in each of its groups
_ROOMY = "unicron_roomy"
LAYS_OUT = "_compute_per_buffer_param_layout"  # of the optimizer; before 0.18 the buffer lays itself out


def prepare() -> None:
    """Make Megatron build buffers and distributed optimizers that :func:`resize` can change. Idempotent.

    It must be called before the training script builds its model, in a world of as many replicas as the job may ever
    have.
    """
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer import distrib_optimizer

    table.check("megatron-core", table.MEGATRON_CORE)
    optimizer, buffer = distrib_optimizer.DistributedOptimizer, param_and_grad_buffer._ParamAndGradBuffer
    if not hasattr(buffer, _ROOMY):
        setattr(buffer, _ROOMY, True)
        if hasattr(optimizer, LAYS_OUT):
            setattr(optimizer, LAYS_OUT, staticmethod(_roomy_layout(getattr(optimizer, LAYS_OUT), distrib_optimizer)))
        else:
            buffer.__init__ = _with_room(buffer.__init__, param_and_grad_buffer)
        optimizer.__init__ = _remembering(optimizer.__init__)


def prepare_when_imported() -> None:
    """Call :func:`prepare` as soon as Megatron's optimizer is imported, which takes seconds and may never happen."""
    if OPTIMIZER in sys.modules:
        prepare()
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


class _Waiting(MetaPathFinder):
    """Waits until both modules are imported. Until 0.17 the optimizer comes later; from 0.18 on the package imports it
    in the middle of its own import, when its release is not known yet."""

    def __init__(self) -> None:
        self._unseen = {name for name in (CORE, OPTIMIZER) if name not in sys.modules}
        self._missing = set(self._unseen)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self._unseen:
            return None
        self._unseen.remove(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                try:
                    run(module)
                except BaseException:
                    self._unseen.add(name)  # the import may be tried again
                    raise
                self._missing.discard(name)
                if not self._missing:
                    sys.meta_path.remove(self)
                    prepare()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _roomy_layout(compute: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """Wrap Megatron's layout of a buffer so that the end of each bucket is padded with room."""

    @functools.wraps(compute)
    def _compute_per_buffer_param_layout(*arguments: Any, **keywords: Any) -> Any:
        ends, original = [0], module.pad_bucket_end

        def pad_bucket_end(end: int, size: int, high_busbw: bool) -> int:
            room = capacity(end - ends[-1], size, NCCL_QUANTUM if high_busbw else QUANTUM)
            ends.append(ends[-1] + room)
            return ends[-1]

        module.pad_bucket_end = pad_bucket_end
        try:
            return compute(*arguments, **keywords)
        finally:
            module.pad_bucket_end = original

    return _compute_per_buffer_param_layout


def _with_room(build: Callable[..., None], module: Any) -> Callable[..., None]:
    @functools.wraps(build)
    def __init__(self: Any, ddp_config: Any, *arguments: Any, **keywords: Any) -> None:
        if ddp_config.use_distributed_optimizer:
            module.math = _Layout()
        try:
            build(self, ddp_config, *arguments, **keywords)
        finally:
            module.math = math

    return __init__


def _remembering(build: Callable[..., None]) -> Callable[..., None]:
    """Make a distributed optimizer remember the model's parameters: later its groups hold only this rank's shards."""

    @functools.wraps(build)
    def __init__(self: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> None:
        parameters = [list(group["params"]) for group in optimizer.param_groups] if optimizer is not None else []
        build(self, optimizer, *arguments, **keywords)
        setattr(self, _PARAMETERS, parameters)

    return __init__


class _Layout:
    """Replaces the module `math` while one buffer is laid out.

    Before 0.18 Megatron pads the end of a bucket by `math.ceil(end / divisor) * divisor`, with a divisor from
    `math.lcm`, which it uses for nothing else: once for each bucket to lay out the buffer, once more to cut the buckets
    from it.
    """

    def __init__(self) -> None:
        self._ends: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(math, name)

    def lcm(self, size: int, *quanta: int) -> int:
        return _Divisor(math.lcm(size, *quanta), lambda end: self._end(end, size, math.lcm(*quanta)))

    def _end(self, end: int, size: int, quantum: int) -> int:
        """Return the end, including room, of the bucket with parameters up to `end`, or of the one that ends there."""
        if end not in self._ends:
            start = max((previous for previous in self._ends if previous < end), default=0)
            self._ends.append(start + capacity(end - start, size, quantum))
            return self._ends[-1]
        return end


class _Divisor(int):
    def __new__(cls, value: int, pad: Callable[[int], int]) -> _Divisor:
        divisor = super().__new__(cls, value)
        divisor.pad = pad
        return divisor

    pad: Callable[[int], int]

    def __rtruediv__(self, end: float) -> Any:
        return _PaddedEnd(self.pad(int(end)))


class _PaddedEnd(int):
    """An end that was divided by a :class:`_Divisor`, and will be multiplied by it."""

    def __ceil__(self) -> _PaddedEnd:
        return self

    def __mul__(self, divisor: int) -> int:
        return int(self)


# ---------------------------------------------------------------- sizes, in elements
def padded_size(elements: int, count: int, quantum: int = QUANTUM) -> int:
    """Return the size of a bucket that is cut into `count` parts, by Megatron's own rule."""
    divisor = math.lcm(count, quantum)
    return -(-elements // divisor) * divisor


def capacity(elements: int, most: int, quantum: int = QUANTUM) -> int:
    """Return the room that a bucket needs so that it can be cut into any number of parts up to `most`.

    It is at most 2 * `most` * `quantum` larger than `elements`, and a multiple of what Megatron requires for `most`
    parts.
    """
    return padded_size(max(padded_size(elements, count, quantum) for count in range(1, most + 1)), most, quantum)


# ---------------------------------------------------------------- reading
def distributed_optimizers(optimizer: Any) -> list[Any]:
    """Return Megatron's distributed optimizers in the script's optimizer, except those without parameters."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return [
        each
        for each in getattr(optimizer, "chained_optimizers", [optimizer])
        if isinstance(each, DistributedOptimizer) and not each.is_stub_optimizer
    ]


def check(model: Sequence[Any], optimizer: Any) -> None:
    """Raise :class:`UnsupportedLayout` for a distributed optimizer that cannot be healed."""
    for chunk in model:
        _refuse(
            (chunk.ddp_config.use_megatron_fsdp, "Megatron-FSDP"),
            (chunk.ddp_config.num_distributed_optimizer_instances > 1, "num_distributed_optimizer_instances > 1"),
            (chunk.ddp_config.reuse_grad_buf_for_mxfp8_param_ag, "reuse_grad_buf_for_mxfp8_param_ag"),
            (chunk.ddp_config.nccl_ub, "nccl_ub"),
            (any(buffer.param_dtype == torch.uint8 for buffer in megatron_core.buffers(chunk)), "fp8 parameters"),
            (lanes([chunk]) == 0, "experts that ranks share across those that share the dense layers"),
        )
    for each in distributed_optimizers(optimizer):
        _refuse(
            (each.config.use_precision_aware_optimizer, "use_precision_aware_optimizer"),
            (each.config.optimizer_cpu_offload, "optimizer_cpu_offload"),
            (each.config.overlap_param_gather_with_optimizer_step, "overlap_param_gather_with_optimizer_step"),
        )
        if not hasattr(each, _PARAMETERS):
            raise UnsupportedLayout(
                "the distributed optimizer was not built as a session needs it: import megatron.core, call "
                "unicron.init_process_group, and build the model after that"
            )
        for buffer in each.buffers:
            _check_room(buffer)


def lanes(model: Sequence[Any]) -> int:
    """Return how many data-parallel ranks share their experts, next to each other; 0 if they do so in another order."""
    if not any(chunk.expert_parallel_buffers for chunk in model):
        return 1
    dense, experts = (
        dist.get_process_group_ranks(group) for group in (model[0].intra_dp_cp_group, model[0].intra_expt_dp_group)
    )
    count = len(dense) // len(experts)  # 0 if tensor-parallel ranks share experts among less than all of them
    return count if count and dense[dense.index(dist.get_rank()) % count :: count] == experts else 0


def _refuse(*settings: tuple[bool, str]) -> None:
    for on, what in settings:
        if on:
            raise UnsupportedLayout(f"unicron can't heal a distributed optimizer with {what}: unset it")


def _check_room(buffer: Any) -> None:
    """Refuse, before the first resize, a release that lays buffers out in another way than the one replaced here."""
    size, unit = buffer.data_parallel_group.size(), quantum(buffer.ddp_config)
    starts = [bucket.offset for bucket in buffer.buckets]
    for bucket, end in zip(buffer.buckets, [*starts[1:], buffer.numel], strict=True):
        if end - bucket.offset < capacity(bucket.numel_unpadded, size, unit):
            table.refuse_release(
                "megatron-core", "its buffers were laid out without room for other numbers of replicas"
            )


def quantum(ddp_config: Any) -> int:
    """Return the unit of bucket sizes, in elements."""
    return NCCL_QUANTUM if ddp_config.pad_buckets_for_high_nccl_busbw else QUANTUM


def own_part(bucket: Any, group: Any) -> torch.Tensor:
    """Return a view of the part of a bucket's gradients that this rank reduces. `group`: its bucket group."""
    size = bucket.grad_data.numel() // group.intra_distributed_optimizer_instance_size
    part: torch.Tensor = bucket.grad_data.narrow(0, group.intra_distributed_optimizer_instance_rank * size, size)
    return part


def optimizer_buckets(optimizer: Any) -> Iterator[tuple[Any, int, Any, Any]]:
    """Yield (optimizer, number of the buffer, buffer, bucket) of all sharded optimizers in a fixed order."""
    for each in distributed_optimizers(optimizer):
        for number, buffer in enumerate(each.buffers):
            for bucket in buffer.buckets:
                yield each, number, buffer, bucket


def bucket_sizes(optimizer: Any) -> tuple[tuple[int, ...], int]:
    """Return (elements of each of those buckets, unit of the cuts), whatever the data-parallel size."""
    buckets = list(optimizer_buckets(optimizer))
    unit = quantum(buckets[0][2].ddp_config) if buckets else QUANTUM
    return tuple(bucket.numel_unpadded for *_, bucket in buckets), unit


def own_range(optimizer: Any, parameter: Any) -> tuple[int, int]:
    """Return the range of a parameter's elements that this rank's optimizer steps."""
    span = optimizer._get_model_param_range_map(parameter)["param"]
    return span.start, span.end


def own_state(optimizer: Any, parameter: Any) -> dict[str, torch.Tensor]:
    """Return this rank's part of a parameter: main parameter and Adam's state, `param`, `exp_avg`, `exp_avg_sq`."""
    state: dict[str, torch.Tensor] = optimizer._get_main_param_and_optimizer_states(parameter)
    return state


def drain(model: Sequence[Any]) -> None:
    """Wait for pending reduces and parameter gathers of a generation that is over, and forget them.

    One that ended later would write into restored buffers. Their connections must be broken, so that they end with an
    error. It waits without polling: gloo's sharded collectives copy their result, and become complete, only in `wait`.
    """
    for chunk in model:
        for group in megatron_core.bucket_groups(chunk):
            for handle in (group.grad_reduce_handle, group.param_gather_handle):
                for work in getattr(handle, "works", ()):
                    with contextlib.suppress(RuntimeError):
                        work.wait()
            group.grad_reduce_handle = group.param_gather_handle = None


# ---------------------------------------------------------------- changing
def resize(model: Sequence[Any], optimizer: Any) -> None:
    """Give buffers, bucket groups and optimizers the size and rank of the process groups that they now hold.

    Afterwards the optimizer has this rank's shard of the new size in Adam's initial state: main parameters equal to the
    model's, moments zero. Adopt the real state, unless training begins. With the same size and rank as before nothing
    is lost. Unreduced gradients, parameters and all objects stay. Raises :class:`UnsupportedLayout` if the new size
    exceeds the one for which the buffers were built.
    """
    for chunk in model:
        for buffer in megatron_core.buffers(chunk):
            _resize_buffer(buffer)
        for group in megatron_core.bucket_groups(chunk):
            _resize_bucket_group(group)
    for each in distributed_optimizers(optimizer):
        if _shard(each) != getattr(each, "unicron_shard", None):
            _resize_optimizer(each)
            each.unicron_shard = _shard(each)


def _shard(optimizer: Any) -> tuple[int, int]:
    return optimizer.data_parallel_group.size(), optimizer.data_parallel_group.rank()


def _resize_buffer(buffer: Any) -> None:
    buffer.data_parallel_world_size = size = buffer.data_parallel_group.size()
    if getattr(buffer, "num_optimizer_shards", None) is not None:  # from 0.19 on
        buffer.num_optimizer_shards = size
    starts = [bucket.offset for bucket in buffer.buckets]
    for number, (bucket, room) in enumerate(zip(buffer.buckets, [*starts[1:], buffer.numel], strict=True)):
        end = bucket.offset + padded_size(bucket.numel_unpadded, size, quantum(buffer.ddp_config))
        if end > room:
            raise UnsupportedLayout(f"{size} replicas are more than the job's buffers were built for")
        buffer.bucket_indices[number] = (bucket.offset, end)
        bucket.grad_data = buffer.grad_data[bucket.offset : end]
        if buffer.param_data is not None:
            bucket.param_data = buffer.param_data[bucket.offset : end]


def _resize_bucket_group(group: Any) -> None:
    members = group.intra_distributed_optimizer_instance_group
    group.intra_distributed_optimizer_instance_size = members.size()
    group.intra_distributed_optimizer_instance_rank = members.rank()
    group.cached_grad_buffer_shard_list = [None] * len(group.buckets)
    group.cached_param_buffer_shard_list = [None] * len(group.buckets)
    group.param_gather_handle, group.param_gather_dispatched = None, False


@torch.enable_grad()
def _resize_optimizer(optimizer: Any) -> None:
    """Do what Megatron's constructor does, with the existing objects. Gradients are on as in the constructor: its
    shards of fp32 parameters are views, and torch 2.15 lets no view that was made without gradients take one once its
    base has changed."""
    inner, parameters = optimizer.optimizer, getattr(optimizer, _PARAMETERS)
    _let_go(optimizer, parameters)
    optimizer.per_bucket_numel = [
        {(buffer.param_dtype, buffer.grad_dtype): [bucket.grad_data.numel() for bucket in buffer.buckets]}
        for buffer in optimizer.buffers
    ]
    optimizer.gbuf_ranges = [optimizer._build_gbuf_range_map(buffer) for buffer in optimizer.buffers]
    optimizer.model_param_gbuf_map = optimizer._build_model_param_gbuf_map(optimizer.gbuf_ranges)
    whole = [{"params": group} for group in parameters]  # Megatron puts the shards in here
    optimizer.model_param_group_index_map, optimizer.opt_group_ranges = optimizer._build_optimizer_group_ranges(
        whole, optimizer.gbuf_ranges
    )
    (
        optimizer.model_float16_groups,
        optimizer.model_fp32_groups,
        optimizer.shard_float16_groups,
        optimizer.shard_fp32_groups,
        optimizer.shard_fp32_from_float16_groups,
    ) = optimizer._build_model_and_main_param_groups(
        optimizer.gbuf_ranges, optimizer.model_param_gbuf_map, optimizer.opt_group_ranges, optimizer.config
    )
    for group, shards, ranges in zip(inner.param_groups, whole, optimizer.opt_group_ranges, strict=True):
        group["params"] = shards["params"]
        ranges["orig_group"] = ranges["orig_group_idx"] = group
        for parameter in group["params"]:
            inner.state[parameter] = _initial_state(inner, group, parameter)


def _let_go(optimizer: Any, parameters: Sequence[Sequence[torch.Tensor]]) -> None:
    """Free the old shards before there are new ones."""
    optimizer.per_model_bucket_groups.clear()  # unused after the constructor, and it holds the old groups
    optimizer.optimizer.state.clear()
    for group in optimizer.optimizer.param_groups:
        group["params"] = []
    optimizer.opt_group_ranges = optimizer.shard_fp32_from_float16_groups = optimizer.shard_fp32_groups = []
    for group in parameters:
        for parameter in group:
            if hasattr(parameter, "main_param"):
                parameter.main_param = None


def _initial_state(inner: Any, group: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Make Adam's state before the first step, so that it can be copied and moved from the start."""
    state = {"exp_avg": torch.zeros_like(parameter.data), "exp_avg_sq": torch.zeros_like(parameter.data)}
    if isinstance(inner, torch.optim.Adam):  # Apex and Transformer Engine count steps in the group
        on_device = group.get("capturable") or group.get("fused")
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
    return state


# ---------------------------------------------------------------- parameters
def rebuild_parameters(model: Sequence[Any], optimizer: Any) -> None:
    """Rebuild all parameters of the model from the main parameters' shards; collective over the data-parallel group.

    It is synchronous even with `overlap_param_gather`: the next forward pass then gathers nothing.
    """
    for each in distributed_optimizers(optimizer):
        each._copy_main_params_to_model_params()
    for chunk in model:
        chunk.start_param_sync(force_sync=True)


def gather_without_forward(model: Sequence[Any]) -> None:
    """Gather, in a rank without micro-batches, like a forward pass with `overlap_param_gather`."""
    for chunk in model:
        for group in reversed(megatron_core.bucket_groups(chunk)):
            group.finish_param_sync()
