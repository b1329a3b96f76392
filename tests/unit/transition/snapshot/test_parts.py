"""Parts of whole tensors: cut by any layout, put together for any other."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.texts import raises_text
from unicron_transition.snapshot import parts
from unicron_transition.snapshot.checkpoint import Checkpoints, Writer
from unicron_transition.snapshot.migrate import TrainingState
from unicron_transition.snapshot.parts import PARAMETER, Box, Missing, Source, assemble


def cut(shape: tuple[int, ...], counts: tuple[int, ...]) -> list[Box]:
    """The blocks of a grid: so many in each direction."""
    boxes = [((), ())]
    for size, count in zip(shape, counts, strict=True):
        edges = [size * number // count for number in range(count + 1)]
        boxes = [
            ((*offset, begin), (*extent, end - begin))
            for offset, extent in boxes
            for begin, end in itertools.pairwise(edges)
        ]
    return [Box("weight", shape, *box) for box in boxes]


def block(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(at, at + size) for at, size in zip(box.offset, box.extent, strict=True))]


def sources(whole: torch.Tensor, boxes: list[Box], shards: int) -> list[Source]:
    """Each block in so many ranges, as data-parallel ranks hold them."""
    found = []
    for box in boxes:
        flat = block(whole, box).reshape(-1)
        edges = [box.numel * number // shards for number in range(shards + 1)]
        for begin, end in itertools.pairwise(edges):
            if begin < end:
                found.append(Source.of(box, begin, end, flat[begin:end]))
    return found


@st.composite
def layouts(draw):
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    grids = st.tuples(*(st.integers(1, size) for size in shape))
    return shape, draw(grids), draw(grids), draw(st.integers(1, 4)), draw(st.randoms(use_true_random=False))


@given(layouts())
def test_any_layout_is_put_together_from_any_other(found):
    shape, its, mine, shards, order = found
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    given_parts = sources(whole, cut(shape, its), shards)
    given_parts += given_parts[: order.randrange(len(given_parts))]  # some are there twice
    order.shuffle(given_parts)
    for box in cut(shape, mine):
        assert torch.equal(assemble(box, PARAMETER, given_parts), block(whole, box))


@given(layouts(), st.data())
def test_what_is_not_there_is_missed_and_never_made_up(found, data):
    shape, its, mine, shards, _ = found
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    given_parts = sources(whole, cut(shape, its), shards)
    lost = given_parts.pop(data.draw(st.integers(0, len(given_parts) - 1)))
    hidden = set(block(whole, lost.box).reshape(-1)[lost.begin : lost.end].tolist())
    for box in cut(shape, mine):
        if hidden & set(block(whole, box).reshape(-1).tolist()):
            with pytest.raises(Missing, match="weight"):
                assemble(box, PARAMETER, given_parts)


def test_another_shape_is_missed_too(snapshot):
    wide = Source.of(Box("weight", (4, 2), (0, 0), (4, 2)), 0, 8, torch.zeros(8))
    with raises_text(Missing, snapshot):
        assemble(Box("weight", (3, 2), (0, 0), (3, 2)), PARAMETER, [wide])


class Gated(torch.nn.Module):
    """A tensor rank's part of a gated layer as Megatron describes it: two halves, each in a place of its own."""

    def __init__(self, rank: int, size: int, rows: int = 4):
        super().__init__()
        self.rank, self.size = rank, size
        whole = torch.arange(2.0 * rows * 3).view(2, rows, 3)
        mine = whole[:, rank * rows // size : (rank + 1) * rows // size]
        self.weight = torch.nn.Parameter(mine.reshape(-1, 3).clone())

    def sharded_state_dict(self) -> dict:
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

        def build(key, tensor, replica_id, flattened_range):
            halves = enumerate(tensor.chunk(2))
            return [
                ShardedTensor.from_rank_offsets(key, half, (0, number * self.size + self.rank, 2 * self.size))
                for number, half in halves
            ]

        factory = ShardedTensorFactory("fc1", self.weight, build, lambda found: torch.cat(found), (0, 0, 0))
        return {"weight": factory}


def held(model: Gated) -> list[Source]:
    optimizer = SimpleNamespace(param_groups=[{"params": [model.weight]}], state={})
    return [
        Source.of(part.box, part.begin, part.end, part.tensors[PARAMETER]) for part in parts.parts([model], optimizer)
    ]


@pytest.mark.parametrize(("its", "mine"), [(1, 2), (2, 1), (2, 4)])
def test_a_gated_layer_is_two_blocks(its, mine):
    found = [source for rank in range(its) for source in held(Gated(rank, its))]
    saved = {"fc1": [parts.SavedState(source.box, (), {}) for source in found]}
    for rank in range(mine):
        model = Gated(rank, mine)
        wanted = model.weight.detach().clone()
        model.weight.data.zero_()
        optimizer = SimpleNamespace(param_groups=[{"params": [model.weight]}], state={})
        parts.restore([model], optimizer, parts.AssembledBlocks({"fc1": found}, saved))
        assert torch.equal(model.weight, wanted)


def test_of_layers_that_are_blocks_of_one_tensor_one_may_be_trained_and_another_not(monkeypatch, tmp_path):
    """As Megatron's layers are; the one that is not trained comes last."""

    def training(value: float) -> TrainingState:
        layers = torch.nn.ModuleList(torch.nn.Linear(4, 1, bias=False) for _ in range(2))
        for parameter in layers.parameters():
            torch.nn.init.constant_(parameter, value)
        layers[1].weight.requires_grad_(False)
        return TrainingState([SimpleNamespace(module=layers)], torch.optim.Adam([layers[0].weight]), None, seed=1)

    def places(model):
        for number, parameter in enumerate(model[0].module.parameters()):
            yield parameter, [parts.Box("layers.weight", (2, 4), (number, 0), (1, 4))], False

    monkeypatch.setattr(parts, "places", places)
    state, other = training(0.5), training(0.1)
    state.model[0].module[0].weight.sum().backward()
    state.optimizer.step()
    state.loss = 1.0
    Checkpoints(tmp_path).save_last(state, 1, Writer())
    assert Checkpoints(tmp_path).load(other) == 1
    wanted, found = (each.optimizer.state[each.model[0].module[0].weight] for each in (state, other))
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[key], found[key]) for key in wanted)
    assert float(other.model[0].module[1].weight.mean()) == 0.5


def test_parts_that_overlap_and_leave_a_hole_are_not_put_together(snapshot):
    """Their sizes add up: nothing else would show it."""
    boxes = [Box("weight", (4,), (at,), (2,)) for at in (0, 1)]
    sources = [Source.of(box, 0, 2, torch.ones(2)) for box in boxes]
    with raises_text(Missing, snapshot):
        assemble(Box("weight", (4,), (0,), (4,)), PARAMETER, sources)
    assert assemble(Box("weight", (4,), (0,), (2,)), PARAMETER, sources).tolist() == [1.0, 1.0]
