"""An optimizer's state in the order of its buckets: where each parameter's is found, and when it is refused."""

from __future__ import annotations

import itertools
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.support.texts import raises_text
from unicron_transition.snapshot.formats import buckets
from unicron_transition.snapshot.formats.index import BadCheckpoint, Block, Index, Raw, Tensor
from unicron_transition.snapshot.formats.written import cast

HIDDEN, LAYERS = 24, 3
EMBEDDING = "embedding.word_embeddings.weight"
ATTENTION, MLP = "decoder.layers.self_attention.", "decoder.layers.mlp."
# name -> (shape, the axis that tensor parallelism cuts or None, pieces that each rank has of it)
SHAPES = {
    EMBEDDING: ((40, HIDDEN), 0, 1),
    ATTENTION + "linear_qkv.layer_norm_weight": ((LAYERS, HIDDEN), None, 1),
    ATTENTION + "linear_proj.weight": ((LAYERS, HIDDEN, HIDDEN), 2, 1),
    ATTENTION + "linear_qkv.weight": ((LAYERS, 3 * HIDDEN, HIDDEN), 1, 1),
    MLP + "linear_fc1.layer_norm_weight": ((LAYERS, HIDDEN), None, 1),
    MLP + "linear_fc1.weight": ((LAYERS, 4 * HIDDEN, HIDDEN), 1, 2),
    MLP + "linear_fc2.weight": ((LAYERS, HIDDEN, 2 * HIDDEN), 2, 1),
    "decoder.final_layernorm.weight": ((HIDDEN,), None, 1),
}
KEYS = ("param", "exp_avg", "exp_avg_sq")


def aligned(at: int) -> int:
    return -(-at // 64) * 64


class Saved:
    """What a run of `tensor` x `pipeline` x `data` ranks would save; stages: layers of each. room: elements at
    which a bucket is full. behind: the attention's norm comes behind its projection."""

    def __init__(self, folder: Path, tensor: int, stages: tuple[int, ...], data: int, room: int, behind: bool = False):
        self.folder, self.tensor, self.data, self.room = folder, tensor, data, room
        self.numbers = itertools.count()
        generator = np.random.default_rng(1)
        self.mains = {key: {} for key in KEYS}
        self.index = Index("torch_dist", 1, "", {})
        self.flat: list[Tensor] = []
        for name, (shape, axis, pieces) in SHAPES.items():
            for key in KEYS:
                self.mains[key][name] = generator.standard_normal(shape).astype(np.float32)
            rounded = cast(self.mains["param"][name], "float32", "bfloat16")
            for box in self.boxes(name, axis, pieces):
                self.index.add(name, shape, "bfloat16", self.block(rounded, box, "bfloat16"))
        order = [name for name in SHAPES if name.startswith("decoder.layers.")]
        if behind:
            order[0], order[1] = order[1], order[0]
        self.order, begin = order, 0
        for stage, layers in enumerate(stages):
            for rank in range(tensor):
                first, last = stage == 0, stage == len(stages) - 1
                self.save(stage * tensor + rank, rank, range(begin, begin + layers), first, last and not first, last)
            begin += layers

    def boxes(self, name, axis, pieces):
        shape = SHAPES[name][0]
        layers = range(LAYERS) if name.startswith("decoder.layers.") else [None]
        for layer, part in itertools.product(layers, range(1 if axis is None else pieces * self.tensor)):
            offset, extent = [0] * len(shape), list(shape)
            if layer is not None:
                offset[0], extent[0] = layer, 1
            if axis is not None:
                extent[axis] //= pieces * self.tensor
                offset[axis] = part * extent[axis]
            yield tuple(offset), tuple(extent)

    def block(self, whole, box, dtype):
        path = self.folder / f"{next(self.numbers)}.raw"
        part = whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]
        path.write_bytes(np.ascontiguousarray(part).tobytes())
        return Block.of(*box, partial(Raw, path, 0, dtype, box[1]))

    def of_rank(self, name, rank, layer):
        """{key: the rank's own parameter, flat}."""
        _, axis, pieces = SHAPES[name]
        found = {}
        for key in KEYS:
            whole = self.mains[key][name] if layer is None else self.mains[key][name][layer]
            if axis is not None:
                at = axis - (layer is not None)
                parts = np.split(whole, pieces * self.tensor, at)[rank :: self.tensor]
                whole = np.concatenate(parts, at)
            found[key] = np.ascontiguousarray(whole).reshape(-1)
        return found

    def save(self, place, rank, layers, first, copy, last):
        """As Megatron does: the last parameter first, each at a multiple of 64, a bucket full once it has `room`."""
        own = [(EMBEDDING, None)] if first else []
        own += [(name, layer) for layer in layers for name in self.order]
        own += [("decoder.final_layernorm.weight", None)] if last else []
        own += [(EMBEDDING, None)] if copy else []
        filled, at, number = [], 0, 0
        for name, layer in reversed(own):
            alone = name == EMBEDDING and (copy or not last)  # of a first and a last stage that share it
            if filled and (at >= self.room or alone):
                self.save_bucket(place, number, filled, aligned(at) if at < self.room else at)
                filled, at, number = [], 0, number + 1
            filled.append((aligned(at), self.of_rank(name, rank, layer)))
            at = filled[-1][0] + filled[-1][1]["param"].size
        self.save_bucket(place, number, filled, at)

    def save_bucket(self, place, number, filled, end):
        step = -(-end // math.lcm(self.data, 128)) * math.lcm(self.data, 128) // self.data
        edges = {0, end, *(at for at, _ in filled), *(at + each["param"].size for at, each in filled)}
        edges |= {rank * step for rank in range(self.data) if rank * step < end}
        for key in KEYS:
            flat = np.full(end, np.nan, np.float32)
            for at, each in filled:
                flat[at : at + each[key].size] = each[key]
            name = f"optimizer.distributed.dp_group_idx_{place}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"
            tensor = Tensor(f"{name}.bucket_idx_{number}.{key}", (end,), "float32", [])
            for low, high in itertools.pairwise(sorted(edges)):
                tensor.blocks.append(self.block(flat, ((low,), (high - low,)), "float32"))
            self.flat.append(tensor)


def check(saved: Saved) -> None:
    buckets.unpack(saved.index, saved.flat, saved.tensor)
    for key, name in itertools.product(KEYS, SHAPES):
        found = saved.index.tensors[f"optimizer.state.{key}.{name}"]
        assert np.array_equal(found.read(), saved.mains[key][name]), (key, name)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(
    ("tensor", "stages", "data", "room"),
    [(1, (3,), 1, 10**9), (2, (3,), 3, 10**9), (2, (3,), 3, 3000), (2, (2, 1), 2, 10**9), (1, (1, 1, 1), 5, 2000)],
)
def test_each_parameters_state_is_found_whatever_the_layout(tmp_path, tensor, stages, data, room, behind):
    check(Saved(tmp_path, tensor, stages, data, room, behind))


def test_two_parameters_of_one_size_that_are_exchanged_are_found_out_where_they_are_read(tmp_path, snapshot):
    saved = Saved(tmp_path, 1, (3,), 2, 10**9)
    norms = [saved.mains["param"][name] for name in SHAPES if name.endswith("layer_norm_weight")]
    tensors = [saved.index.tensors[name] for name in SHAPES if name.endswith("layer_norm_weight")]
    tensors[0].blocks, tensors[1].blocks = tensors[1].blocks, tensors[0].blocks
    buckets.unpack(saved.index, saved.flat, 1)
    state = saved.index.tensors[f"optimizer.state.param.{tensors[0].name}"]
    assert norms[0].shape == state.shape
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        state.read()
    with pytest.raises(BadCheckpoint, match="is not the model's"):
        state.read((1, 0), (1, HIDDEN))


def test_one_element_that_rounds_to_another_is_found_out(tmp_path):
    saved = Saved(tmp_path, 2, (3,), 2, 10**9)
    buckets.unpack(saved.index, saved.flat, 2)
    name = MLP + "linear_fc1.weight"
    block = saved.index.tensors[name].blocks[3]
    path = block.find().path
    data = bytearray(path.read_bytes())
    data[1] ^= 1
    path.write_bytes(data)
    state = saved.index.tensors[f"optimizer.state.param.{name}"]
    with pytest.raises(BadCheckpoint, match="is not the model's"):
        state.read()
    others = [box for box in state.boxes() if box != block.box]
    assert all(state.read(*box).size for box in others)


def replace_shape(saved: Saved, name: str, shape: tuple[int, ...]) -> None:
    saved.index.tensors[name] = Tensor(name, shape, "bfloat16", [Block.of((0,) * len(shape), shape, None)])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda saved: saved.flat.pop(), "no main parameters|several|lacks"),
        (lambda saved: saved.flat.__delitem__(slice(0, 3)), "do not explain"),
        (lambda saved: replace_shape(saved, "decoder.final_layernorm.weight", (HIDDEN + 1,)), "not those of its model"),
        (lambda saved: replace_shape(saved, "decoder.final_layernorm.bias", (HIDDEN,)), "not those of its model"),
        (lambda saved: replace_shape(saved, "decoder.layers.mlp.router.weight", (3, 4)), "router.weight .* unknown"),
        (lambda saved: saved.index.tensors.pop(EMBEDDING), "not those of its model"),
    ],
)
def test_what_does_not_add_up_is_refused_with_a_line_that_says_what_to_do(tmp_path, change, says):
    saved = Saved(tmp_path, 2, (3,), 2, 10**9)
    change(saved)
    before = set(saved.index.tensors)
    with pytest.raises(BadCheckpoint, match=f"(?s)({says}).*--dist-ckpt-optim-fully-reshardable"):
        buckets.unpack(saved.index, saved.flat, 2)
    assert set(saved.index.tensors) == before


def test_buckets_of_another_tensor_parallelism_are_refused(tmp_path):
    saved = Saved(tmp_path, 2, (3,), 2, 10**9)
    for size in (0, 1, 4):
        with pytest.raises(BadCheckpoint):
            buckets.unpack(saved.index, saved.flat, size)
