"""The state of a module that `fully_shard` has sharded: each rank has its parts, and ranks of any other layout find
theirs in what these save. The ranks are one after the other in a world without peers, so nothing can communicate."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Partial, _StridedShard

from tests.support import kept, sharded_module
from tests.support.sharded_cells import ITERATION, check_part, each_rank, made, save, whole
from tests.support.sharded_module import Model, step_alone, without_peers
from tests.support.texts import raises_text
from unicron_transition.seams import dtensors
from unicron_transition.seams.dtensors import blocks_at
from unicron_transition.snapshot import contents, parts
from unicron_transition.snapshot.checkpoint import CheckpointError, Checkpoints
from unicron_transition.snapshot.contents import Gatherer
from unicron_transition.snapshot.frozen import UntrainedTensors
from unicron_transition.snapshot.keeper import Keeper
from unicron_transition.snapshot.migrate import StateMismatch, TrainingState
from unicron_transition.snapshot.whole_state import Beginnings

# ------------------------------------------------------------ from any layout to any other
CELLS = [
    *(((2, 1), (4, 1)), ((4, 1), (2, 1)), ((2, 1), (1, 1)), ((1, 1), (2, 1)), ((2, 1), (2, 1))),
    *(((2, 2), (2, 1)), ((2, 1), (2, 2)), ((2, 2), (1, 1)), ((4, 2), (2, 2))),
]


@pytest.mark.parametrize(
    ("its", "mine", "tied"), [*((*cells, False) for cells in CELLS), *((*cells, True) for cells in CELLS[1:4])]
)
def test_a_checkpoint_is_loaded_in_any_layout(tmp_path, its, mine, tied):
    saves = save(tmp_path / "saves", its, tied)
    wanted = whole(made((1, 1), 1, 2, tied))
    for state, _ in each_rank(mine, 2, 1, tied):
        assert Checkpoints(saves).load(state) == ITERATION
        model = state.model[0].module
        assert model.blocks[0].up.weight.shape == (32, 8)  # as a distributed tensor says it
        for name, tensor in model.state_dict(keep_vars=True).items():
            check_part(tensor, wanted[name])
            for key, value in state.optimizer.state.get(tensor, {}).items():
                assert isinstance(value, DTensor) == (isinstance(tensor, DTensor) and key != "step")
                check_part(value, wanted[f"{name} {key}"])
        step_alone(state)  # what torch's optimizer finds is what it makes itself


def test_no_rank_reads_more_of_a_parameter_than_it_has(tmp_path, monkeypatch):
    """Defect: from a checkpoint of fewer ranks each rank read all of every parameter."""
    saves, sizes, read = save(tmp_path, (1, 1)), [], contents.ImageContent._read

    def note(self, number, *span):
        sizes.append((found := read(self, number, *span)).numel())
        return found

    monkeypatch.setattr(contents.ImageContent, "_read", note)
    for state, _ in each_rank((4, 1), 2):
        Checkpoints(saves).load(state)
        assert max(sizes) == max(tensor.numel() for tensor in state.tensors())


@pytest.mark.parametrize("differs", [False, True])
def test_tensors_that_are_tied_here_alone_are_compared_whole(tmp_path, differs):
    """Defect: of a tensor in several blocks only the first one was compared."""
    for state, writer in each_rank((2, 1), 1):
        model = state.model[0].module
        with torch.no_grad():
            dtensors.local(model.out.weight).copy_(dtensors.local(model.words.weight))
            if differs and writer.place == 1:
                dtensors.local(model.out.weight)[-1, -1] += 1
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(state, ITERATION, writer)
        checkpoints.wait_written()
    tied = made((1, 1), 2, tied=True)
    if differs:
        with pytest.raises(CheckpointError, match="are one tensor here and two there"):
            Checkpoints(tmp_path).load(tied)
    else:
        assert Checkpoints(tmp_path).load(tied) == ITERATION


def test_a_part_that_is_not_saved_is_missed(tmp_path, snapshot):
    saves = save(tmp_path, (2, 1))
    one = min(saves.rglob("*place-1-of-2*"))
    one.unlink()
    assert not Checkpoints(saves).whole_ones()
    for state, _ in itertools.islice(each_rank((1, 1), 1), 1):
        boxes = {boxes[0].name: boxes[0] for _, boxes, _ in parts.places(state.model)}
    halves = [part for state, _ in itertools.islice(each_rank((2, 1), 1), 1) for part in _parts(state)]
    with raises_text(parts.Missing, snapshot):
        parts.assemble(
            boxes["0.blocks.0.up.weight"],
            parts.PARAMETER,
            [parts.Source.of(part.box, part.begin, part.end, part.tensors[parts.PARAMETER]) for part in halves],
        )


def _parts(state: TrainingState) -> list[parts.Part]:
    return [each for each in parts.parts(state.model, state.optimizer) if each.box.name == "0.blocks.0.up.weight"]


# ------------------------------------------------------------ which blocks
@pytest.mark.parametrize(
    ("size", "placements"),
    [
        ((2,), [Shard(0)]),
        ((4,), [Shard(1)]),
        ((2, 2), [Shard(0), Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 4), [Replicate(), Shard(0)]),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        ((2, 4), [_StridedShard(0, split_factor=4), Shard(0)]),
        ((4, 2), [_StridedShard(1, split_factor=2), Shard(1)]),
        ((2, 2, 2), [_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)]),
    ],
)
def test_a_rank_has_the_block_that_torch_gives_it(size, placements):
    shape, ranks = (16, 8), list(itertools.product(*map(range, size)))
    found = []
    for rank, place in enumerate(ranks):
        with without_peers(rank, len(ranks)):
            mesh = init_device_mesh("cpu", size)
            extent, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        found += blocks_at(shape, size, place, placements)
        assert found[-1] == (tuple(offset), tuple(extent))
    assert len(found) == len(ranks)


def test_rows_that_are_apart_are_blocks_of_their_own():
    """As of a strided shard without the shard that its factor counts."""
    placements = [_StridedShard(0, split_factor=2)]
    assert blocks_at((8, 3), (2,), (1,), placements) == [((2, 0), (2, 3)), ((6, 0), (2, 3))]
    with pytest.raises(dtensors.Uneven, match="not in one piece"):
        blocks_at((3, 8), (2,), (1,), [_StridedShard(1, split_factor=2)])


@pytest.mark.parametrize("placement", [Partial(), Shard(0)])
def test_another_cut_is_refused(placement, snapshot):
    with without_peers(0, 3):
        mesh = init_device_mesh("cpu", (3,))
        model = torch.nn.Linear(4, 4, bias=False)
        cut = DTensor.from_local(torch.ones(2, 4), mesh, [placement], shape=torch.Size((4, 4)), stride=(4, 1))
        model.weight = torch.nn.Parameter(cut)
        with raises_text(parts.Missing, snapshot):
            list(parts.places([model]))


def test_of_copies_one_rank_saves():
    """The layer norm of tensor ranks is in each of them."""
    saved = [
        [part.box.name for part in parts.parts(state.model, state.optimizer) if not part.duplicate]
        for state, _ in each_rank((2, 2), 1)
    ]
    assert ["0.blocks.0.norm.weight" in names for names in saved] == [True, False, True, False]
    assert all("0.blocks.0.up.weight" in names for names in saved)


# ------------------------------------------------------------ from rank to rank, and in memory
def test_a_newcomer_makes_room_for_its_parts_alone():
    """Defect: `shape`, `nbytes` and `data_ptr()` of a distributed tensor are not those of its part."""
    for state, _ in each_rank((2, 1), 1, 2):
        header, sent = state.header(ITERATION), [tensor.clone() for tensor in state.tensors()]
        other = made((2, 1), 2)
        assert other.adopt(header) == ITERATION
        room = list(other.tensors())
        assert [each.shape for each in room] == [each.shape for each in sent]
        for into, tensor in zip(room, sent, strict=True):
            into.copy_(tensor)
        assert kept.same(list(other.tensors()), sent)
        moments = other.optimizer.state[other.model[0].module.words.weight]
        assert moments["exp_avg"].shape == (16, 8) and dtensors.local(moments["exp_avg"]).shape == (8, 8)
        assert not isinstance(moments["step"], DTensor)
        addresses = other.addresses()
        assert 0 not in addresses and set(map(torch.Tensor.data_ptr, other.tensors())) == set(addresses)
        step_alone(other)
        assert other.addresses() == addresses


def test_a_state_that_is_cut_otherwise_is_refused(snapshot):
    for state, _ in itertools.islice(each_rank((2, 1), 1, 1), 1):
        parameter = state.model[0].module.words.weight
        values = state.optimizer.state[parameter]
        mesh = values["exp_avg"].device_mesh
        values["exp_avg"] = DTensor.from_local(torch.ones(16, 8), mesh, [Replicate()])
        with raises_text(StateMismatch, snapshot):
            state.header(1)
        with pytest.raises(parts.Missing, match="exp_avg is cut otherwise"):
            list(parts.parts(state.model, state.optimizer))


def test_after_an_evaluation_the_parts_are_there_again():
    """torch leaves the root's parameters whole after a forward pass without a backward pass."""
    for state, _ in itertools.islice(each_rank((2, 1), 1), 1):
        before = state.addresses()
        model = state.model[0].module
        with torch.no_grad():
            model(torch.arange(4))
        assert not isinstance(model.words.weight, DTensor)
        assert state.addresses() == before and isinstance(model.words.weight, DTensor)
        with torch.no_grad():
            model(torch.arange(4))
        assert {each.data_ptr() for each in state.trained_tensors()} < set(before)


def test_each_place_keeps_its_own_image(tmp_path):
    wanted = []
    for state, writer in each_rank((2, 1), 1, 2):
        wanted.append(kept.everything(state))
        keeper = Keeper(tmp_path, writer.place, 1)
        keeper.copy(Gatherer(state), ITERATION, 1, writer)
        keeper.close()
    for state, writer in each_rank((2, 1), 2):
        assert Beginnings(tmp_path, None, 0, writer).take_up(state, None) == ITERATION
        assert kept.same(list(state.tensors()), wanted[writer.place])


def test_what_is_not_trained_is_the_parts_of_it(tmp_path):
    for state, writer in itertools.islice(each_rank((2, 1), 1), 1):
        untrained = UntrainedTensors(state, tmp_path, 0, writer.place, writer.size, print)
        model = state.model[0].module
        frozen = [dtensors.local(block.frozen.weight) for block in model.blocks]
        assert list(untrained.offsets()) == [each.data_ptr() for each in (*frozen, model.scale)]
        assert untrained.bytes == sum(each.nbytes for each in frozen) + 16


def test_an_image_is_as_large_as_the_parts(tmp_path):
    sizes = [Gatherer(state).contents().size for state, _ in each_rank((2, 1), 1, 1)]
    alone = Gatherer(made((1, 1), 1, 1)).contents().size
    steps = 64 * sum(len(group["params"]) for group in sharded_module.optimizer_of(Model()).param_groups)
    assert max(sizes) <= alone / 2 + steps + 4096
