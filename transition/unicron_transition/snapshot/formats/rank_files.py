"""Reads Megatron-LM's `torch` format: a file for each model-parallel rank, with the state of its modules and optimizer.

The files do not tell how tensor parallelism cuts a tensor, nor which parameter a state belongs to. The cut follows from
the tensor's name, and an unknown name is refused. The optimizer numbers its parameters in the order of the modules,
those without weight decay separately. A distributed optimizer has its buffers in a second file, one bucket after the
other. Main parameters, rounded, must be the model's own (`buckets.prove`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from unicron_transition.snapshot.formats import buckets, dcp
from unicron_transition.snapshot.formats.index import (
    EMBEDDING,
    LAYERS,
    MAINS,
    OUTPUT,
    STATE,
    BadCheckpoint,
    Block,
    Index,
    Place,
    Tensor,
    row_major,
)
from unicron_transition.snapshot.formats.pickles import Archive, TensorReference, archive, plain
from unicron_transition.snapshot.reading import PlainValues, number_in

FORMAT = "torch"
FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(_\d+)?")
NAME, SHARDED = "model_optim_rng.pt", "distrib_optim.pt"
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
INSTEAD = "convert it with Megatron-LM's --ckpt-convert-format torch_dist"
FC1, FC2 = "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"
# Norms that are modules of their own get the names that they have in Transformer Engine's linear layers.
NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "input_layernorm.bias": "self_attention.linear_qkv.layer_norm_bias",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "pre_mlp_layernorm.bias": "mlp.linear_fc1.layer_norm_bias",
}
# The axis of a parameter that tensor parallelism cuts, None if every rank has the whole.
AXES: dict[str, int | None] = {
    EMBEDDING: 0,
    "embedding.position_embeddings.weight": None,
    "self_attention.linear_proj.weight": 1,
    "self_attention.linear_proj.bias": None,
    "self_attention.linear_qkv.weight": 0,
    "self_attention.linear_qkv.bias": 0,
    "self_attention.q_layernorm.weight": None,
    "self_attention.q_layernorm.bias": None,
    "self_attention.k_layernorm.weight": None,
    "self_attention.k_layernorm.bias": None,
    FC1: 0,
    "mlp.linear_fc1.bias": 0,
    FC2: 1,
    "mlp.linear_fc2.bias": None,
    "decoder.final_layernorm.weight": None,
    "decoder.final_layernorm.bias": None,
    OUTPUT: 0,
    "output_layer.bias": 0,
    **dict.fromkeys(NORMS.values()),
}
OF_BOTH_HALVES = (FC1, "mlp.linear_fc1.bias")  # each rank has rows of both halves


@dataclass(frozen=True)
class _Own:
    """A parameter in one rank's file."""

    name: str
    """The name of the whole tensor; in a layer, without the prefix of layers."""
    layer: int | None
    """The number of its layer in the model."""
    rank: int
    file: Archive
    found: TensorReference
    kept: bool
    """Whether it is read here, not from another rank that has it too."""
    alone: bool
    """Whether it has a bucket of its own."""

    @property
    def whole(self) -> str:
        return self.name if self.layer is None else LAYERS + self.name


def is_one(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob(f"mp_rank_*/{NAME}"))


def read(folder: Path) -> Index | None:
    """Return the index of the checkpoint in a folder, None if there is none. Raises BadCheckpoint, OSError."""
    if not is_one(folder):
        return None
    files = _files(folder)
    try:
        return _read(folder, files)
    except (AttributeError, TypeError, KeyError, IndexError, ZeroDivisionError) as error:
        raise BadCheckpoint(f"{folder}: not as Megatron-LM writes it ({error!r})") from None


def _read(folder: Path, files: Mapping[tuple[int, int], Archive]) -> Index:
    first = files[0, 0]
    kept = {key: first.content.get(key) for key in ("args", "iteration", "opt_param_scheduler")}
    state = {key: plain(value, first) for key, value in kept.items()} | {"optimizer": _settings(first)}
    index = Index(FORMAT, int(state["iteration"] or 0), "", {}, dcp.common_of(state))
    index.layout = dcp.layout_of(index.common.facts.arguments)
    model = _Model(folder, files, index.common.facts.arguments)
    model.add_parameters(index)
    if state["optimizer"]:
        try:
            model.add_states(index)
        except BadCheckpoint as error:
            index.without_optimizer(str(error))
    return index


def _files(folder: Path) -> dict[tuple[int, int], Archive]:
    """Open the files, by tensor rank and stage. Raises BadCheckpoint, OSError."""
    found = {}
    for path in sorted(folder.glob(f"mp_rank_*/{NAME}")):
        match = FOLDER.fullmatch(path.parent.name)
        if match is None or match[3]:
            raise BadCheckpoint(f"{path.parent} is of an expert, in Megatron-LM's torch format: {INSTEAD}")
        found[int(match[1]), int(match[2] or 0)] = opened = archive(path)
        if not isinstance(opened.content, dict):
            raise BadCheckpoint(f"{path}: not as Megatron-LM writes it")
    tensor, stages = (1 + max(place[axis] for place in found) for axis in (0, 1))
    missing = next(((t, p) for t in range(tensor) for p in range(stages) if (t, p) not in found), None)
    if missing is not None:
        raise BadCheckpoint(f"{folder}: the file of tensor rank {missing[0]}, stage {missing[1]} is not there")
    return found


def _settings(file: Archive) -> PlainValues:
    """Return the settings of an optimizer, in Megatron's form. Raises BadCheckpoint."""
    optimizer = file.content.get("optimizer")
    if optimizer is None:
        return {}
    if not isinstance(optimizer, dict):
        raise BadCheckpoint(f"{file.path}: it has several optimizers: {INSTEAD}")
    inner = optimizer.get("optimizer", optimizer)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in inner["param_groups"]]
    found: PlainValues = {"optimizer": {"param_groups": plain(groups, file)}}
    return found | ({"grad_scaler": plain(optimizer["grad_scaler"], file)} if "grad_scaler" in optimizer else {})


class _Model:
    """The parameters in all files."""

    def __init__(self, folder: Path, files: Mapping[tuple[int, int], Archive], args: PlainValues):
        self._folder, self._files, self._args = folder, files, args
        self._tensor, self._stages = (1 + max(place[axis] for place in files) for axis in (0, 1))
        sizes = [args.get(f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline", "expert")]
        if sizes[:2] != [self._tensor, self._stages] or (sizes[2] or 1) != 1:
            raise BadCheckpoint(f"{folder}: its files are not those of the layout that its arguments name: {INSTEAD}")
        # (tensor rank, stage) -> chunk of the model -> its parameters in the order of the modules
        self._owns: dict[tuple[int, int], dict[int, list[_Own]]] = {place: {} for place in files}
        begin = 0
        for number in range(self._chunks() * self._stages):  # in the order of their layers
            chunk, stage = divmod(number, self._stages)
            layers = {len(self._add(stage, rank, chunk, begin)) for rank in range(self._tensor)}
            if len(layers) != 1:
                raise BadCheckpoint(f"{folder}: the tensor ranks of stage {stage} have different layers")
            begin += layers.pop()
        self._layers = begin
        own = {own.name: own.found.shape for own in self._chain((0, self._stages - 1))}
        self._gated = FC1 in own and FC2 in own and own[FC1][0] == 2 * own[FC2][1]

    def _chunks(self) -> int:
        content = self._files[0, 0].content
        return max(1, sum(re.fullmatch(r"model\d+", str(key)) is not None for key in content))

    def _add(self, stage: int, rank: int, chunk: int, begin: int) -> set[int]:
        """Add the parameters of a rank's chunk and return its own numbers of its layers. begin: the first of them."""
        file = self._files[rank, stage]
        content = file.content.get("model", file.content.get(f"model{chunk}"))
        if not isinstance(content, dict):
            raise BadCheckpoint(f"{file.path}: its model is not there")
        tied = self._stages > 1 and not self._args.get("untie_embeddings_and_output_weights")
        fused = any(str(name).endswith(".linear_qkv.layer_norm_weight") for name in content)
        layers = set()
        for name, found in content.items():
            if not isinstance(found, TensorReference) or str(name).endswith("_extra_state"):
                continue
            match = LAYER.fullmatch(name)
            if match is not None:
                layers.add(int(match[1]))
            name, layer = (match[2], begin + int(match[1])) if match else (name, None)
            name = name if fused else NORMS.get(name, name)
            if name not in AXES:
                raise BadCheckpoint(f"{file.path}: how {name} is cut is not known: {INSTEAD}")
            kept = (AXES[name] is not None or rank == 0) and not (tied and name == OUTPUT)
            alone = tied and name in (EMBEDDING, OUTPUT)
            self._owns[rank, stage].setdefault(chunk, []).append(_Own(name, layer, rank, file, found, kept, alone))
        return layers

    def _places(self, own: _Own) -> tuple[Place, list[tuple[Place, Place]]]:
        """Return the shape of the whole tensor, and the boxes of it that this rank has."""
        axis, extent = AXES[own.name], list(own.found.shape)
        shape, pieces = list(extent), 2 if self._gated and own.name in OF_BOTH_HALVES else 1
        stack = () if own.layer is None else (own.layer,)
        ones = (1,) * len(stack)
        front = () if own.layer is None else (self._layers,)
        if axis is None:
            return (*front, *shape), [((*stack, *(0 for _ in shape)), (*ones, *extent))]
        shape[axis] *= self._tensor
        extent[axis] //= pieces
        boxes = []
        for piece in range(pieces):
            offset = [0] * len(shape)
            offset[axis] = (piece * self._tensor + own.rank) * extent[axis]
            boxes.append(((*stack, *offset), (*ones, *extent)))
        return (*front, *shape), boxes

    def _blocks(self, own: _Own, found: TensorReference) -> Iterator[tuple[Place, Block]]:
        """Yield the shape of the whole and each block of a tensor like this parameter."""
        shape, boxes = self._places(own)
        rows = found.shape[0] // len(boxes) if found.shape else 0
        for number, box in enumerate(boxes):
            part = found
            if len(boxes) > 1:
                begin = found.offset + number * rows * found.strides[0]
                part = dataclasses.replace(found, offset=begin, shape=(rows, *found.shape[1:]))
            yield shape, Block.of(*box, partial(own.file.raw, part))

    def add_parameters(self, index: Index) -> None:
        """Add the model's tensors to the index. Raises BadCheckpoint if the ranks' parts do not fit together."""
        for own in (own for place in self._owns for own in self._chain(place) if own.kept):
            for shape, block in self._blocks(own, own.found):
                index.add(own.whole, shape, own.found.storage.dtype, block)
        for tensor in index.parameters():
            boxes = {block.box for block in tensor.blocks}
            if sum(math.prod(extent) for _, extent in boxes) != math.prod(tensor.shape):
                raise BadCheckpoint(f"{self._folder}: {tensor.name} is not in all of its layers: {INSTEAD}")

    def _chain(self, place: tuple[int, int]) -> list[_Own]:
        return [own for _, owns in sorted(self._owns[place].items()) for own in owns]

    # ------------------------------------------------------------ the optimizer
    def add_states(self, index: Index) -> None:
        """Add the optimizer's state to the index. Raises BadCheckpoint if its parameters cannot be identified,
        OSError."""
        steps = set()
        for place, file in self._files.items():
            sharded = file.path.parent / SHARDED
            found = self._in_buckets(place, sharded) if sharded.is_file() else _states(file, self._chain(place))
            for own, kinds in found:
                step = kinds.pop("step", None)
                if isinstance(step, TensorReference):
                    step = own.file.raw(step).array().item()
                if isinstance(step, int | float):
                    steps.add(float(step))
                if own.kept:
                    self._add_state(index, own, kinds)
        index.common.step = max(steps, default=index.common.step)

    def _in_buckets(self, place: tuple[int, int], path: Path) -> Iterator[tuple[_Own, dict[str, object]]]:
        """Yield each parameter of a rank with its state from the second file, by key. Raises BadCheckpoint, OSError."""
        file = archive(path)
        for chunk, owns in self._owns[place].items():
            buffers = file.content.get(chunk) if isinstance(file.content, dict) else None
            flat = next(iter(buffers.values())) if isinstance(buffers, dict) and len(buffers) == 1 else {}
            kinds = {key: found for key, found in flat.items() if isinstance(found, TensorReference)}
            places, end = self._laid_out(owns, self._room() if place[1] == chunk == 0 else math.inf)
            if MAINS[0] not in kinds or any(found.shape != (end,) for found in kinds.values()):
                raise BadCheckpoint(f"{path}: its buffers are not those of its model: {INSTEAD}")
            for own, at in places:
                shape = own.found.shape
                strides = row_major(shape)
                flat = {key: TensorReference(f.storage, f.offset + at, shape, strides) for key, f in kinds.items()}
                yield dataclasses.replace(own, file=file), flat

    def _room(self) -> float:
        """Return the size at which a bucket of the first chunk of the first stage is full, in elements."""
        if not self._args.get("overlap_grad_reduce"):
            return math.inf
        ranks = (number_in(self._args, name) or 1 for name in ("data_parallel_size", "context_parallel_size"))
        return number_in(self._args, "ddp_bucket_size") or max(40_000_000, 1_000_000 * math.prod(ranks))

    @staticmethod
    def _laid_out(owns: Sequence[_Own], room: float) -> tuple[list[tuple[_Own, int]], int]:
        """Return the place of each parameter in the buffer, with its buckets one after the other, and the end."""
        found: list[tuple[_Own, int]] = []
        bucket = at = 0
        for own in reversed(owns):
            at = bucket + buckets.align(at - bucket)
            if own.alone:
                bucket = at
            found.append((own, at))
            at += math.prod(own.found.shape)
            if own.alone or at - bucket >= room:
                bucket = at
        return found, at

    def _add_state(self, index: Index, own: _Own, kinds: Mapping[str, object]) -> None:
        whole = index.tensors[own.whole]
        for key, found in kinds.items():
            if not isinstance(found, TensorReference) or not found.shape:
                continue
            name, dtype = f"{STATE}{key}.{own.whole}", found.storage.dtype
            check = partial(buckets.prove, whole, dtype) if key in MAINS else None
            tensor = index.tensors.setdefault(name, Tensor(name, whole.shape, dtype, [], check))
            tensor.blocks += [block for _, block in self._blocks(own, found)]


def _states(file: Archive, owns: Sequence[_Own]) -> Iterator[tuple[_Own, dict[str, object]]]:
    """Yield each parameter of a file with its optimizer's state, by key. Raises BadCheckpoint."""
    optimizer = file.content.get("optimizer")
    inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else {}
    if not isinstance(inner, dict) or "state" not in inner:
        raise BadCheckpoint(f"{file.path}: its optimizer has no state: {INSTEAD}")
    mains = optimizer.get("fp32_from_fp16_params")
    left = {True: _has_decay(owns, True), False: _has_decay(owns, False)}
    for number, group in enumerate(inner["param_groups"]):
        numbers = group["params"]
        mine = left.pop(group.get("wd_mult") != 0.0, []) if numbers else []
        its = mains[number] if mains is not None else [None] * len(numbers)
        if not len(numbers) == len(mine) == len(its):
            raise BadCheckpoint(f"{file.path}: the groups of its optimizer's parameters are not known: {INSTEAD}")
        for own, identity, main in zip(mine, numbers, its, strict=True):
            kinds = dict(inner["state"].get(int(identity)) or {}) | ({MAINS[0]: main} if main is not None else {})
            shapes = {each.shape for each in kinds.values() if isinstance(each, TensorReference) and each.shape}
            if shapes != {own.found.shape}:
                raise BadCheckpoint(f"{file.path}: its optimizer's state of {own.name} has another shape: {INSTEAD}")
            yield own, kinds
    if any(left.values()):
        raise BadCheckpoint(f"{file.path}: its optimizer does not step all parameters: {INSTEAD}")


def _has_decay(owns: Sequence[_Own], decayed: bool) -> list[_Own]:
    """List the parameters with weight decay, or those without: biases and vectors."""
    return [own for own in owns if (len(own.found.shape) > 1 and not own.name.endswith(".bias")) == decayed]
