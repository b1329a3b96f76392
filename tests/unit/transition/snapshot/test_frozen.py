"""What of a model is not trained, in images of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from unicron_transition.snapshot.cuts import CutOrder, Cuts
from unicron_transition.snapshot.frozen import UntrainedTensors
from unicron_transition.snapshot.image_format import UNTRAINED_KIND, inventory, read_page
from unicron_transition.snapshot.migrate import TrainingState


def state(frozen: bool = True) -> TrainingState:
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1, bias=False))
    module[1].weight.requires_grad_(not frozen)
    if frozen:
        module.register_buffer("seen", torch.arange(7) % 2 == 1)
    return TrainingState([SimpleNamespace(module=module)], torch.optim.Adam(module.parameters()), None)


@pytest.fixture
def said() -> list[str]:
    return []


def untrained(of: TrainingState, folder, said: list[str], slot: int = 0, place: int = 0) -> UntrainedTensors:
    return UntrainedTensors(of, folder, slot, place, 2, said.append)


def fill(of: TrainingState, number: float) -> None:
    with torch.no_grad():
        of.model[0].module[1].weight.fill_(number)
        of.model[0].module.seen.fill_(bool(number % 2))


def test_the_next_process_has_what_it_lacks_and_nothing_else(tmp_path, said):
    first = state()
    fill(first, 5.0)
    mark = untrained(first, tmp_path, said).update_image(7)
    other = state()
    trained = other.model[0].module[0].weight.clone()
    assert untrained(other, tmp_path, said, slot=4).restore(mark), "whoever of the place has written it"
    assert torch.equal(other.model[0].module[1].weight, first.model[0].module[1].weight)
    assert torch.equal(other.model[0].module.seen, first.model[0].module.seen)
    assert torch.equal(other.model[0].module[0].weight, trained)


def test_the_last_ones_are_kept_and_what_has_not_changed_is_not_written(tmp_path, said):
    mine = state()
    store = untrained(mine, tmp_path, said)
    marks = []
    for number in (1.0, 2.0, 2.0, 3.0, 4.0):
        fill(mine, number)
        marks.append(store.update_image(7))
        written = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
        assert store.update_image(7) == marks[-1]
        assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written
    assert marks[1] == marks[2] and len(set(marks)) == 4
    again = state()
    kept = [untrained(again, tmp_path, said).restore(mark) for mark in marks]
    assert kept == [False, True, True, True, True] and len(list(tmp_path.iterdir())) == 3
    assert float(again.model[0].module[1].weight.mean()) == 4.0 and said == []


def test_a_spoiled_one_is_seen_and_nothing_taken_from_it(tmp_path, said):
    mine = state()
    fill(mine, 5.0)
    mark = untrained(mine, tmp_path, said).update_image(7)
    (found,) = inventory(tmp_path)
    data = bytearray(found.path.read_bytes())
    data[found.offset] ^= 1
    found.path.write_bytes(data)
    fill(mine, 1.0)
    assert not untrained(mine, tmp_path, said).restore(mark)
    assert float(mine.model[0].module[1].weight.mean()) == 1.0 and "checksum" in said[0]


def test_another_places_is_none_of_ours(tmp_path, said):
    mark = untrained(state(), tmp_path, said).update_image(7)
    assert not untrained(state(), tmp_path, said, place=1).restore(mark)


def test_where_all_is_trained_there_is_nothing(tmp_path, said):
    everything = untrained(state(frozen=False), tmp_path, said)
    assert everything.update_image(7) == "" and everything.bytes == 0 and not list(tmp_path.iterdir())


def test_without_memory_nothing_is_written(said):
    mine = untrained(state(), None, said)
    assert mine.update_image(7) == "" and not mine.restore("00")


def test_where_there_is_no_room_training_goes_on_and_it_is_said_once(tmp_path, said):
    mine = state()
    store = untrained(mine, tmp_path / "missing", said)
    for number in (1.0, 2.0):
        fill(mine, number)
        assert store.update_image(7) and store.image is None
    assert len(said) == 1 and "no room for" in said[0]


def test_where_somebody_has_removed_it_it_is_written_again(tmp_path, said):
    store = untrained(state(), tmp_path, said)
    mark = store.update_image(7)
    assert store.image is not None
    store.image.unlink()
    assert store.update_image(7) == mark and store.image.exists() and not said
    assert untrained(state(), tmp_path, said).restore(mark)


def test_each_lies_where_it_says(tmp_path, said):
    mine = state()
    fill(mine, 5.0)
    store = untrained(mine, tmp_path, said)
    store.update_image(7)
    found = read_page(store.image)
    data, offsets = found.read()[1], store.offsets()
    module = mine.model[0].module
    for tensor in (module[1].weight, module.seen):
        at = offsets[tensor.data_ptr()]
        there = torch.frombuffer(data, dtype=tensor.dtype, offset=at, count=tensor.numel())
        assert torch.equal(there, tensor.detach().view(-1))
    assert len(offsets) == 2


def test_what_goes_with_a_cut_stays_and_is_written_again_by_whoever_begins_with_it(tmp_path, said):
    first, cuts = state(), Cuts(tmp_path, 0, said.append)
    fill(first, 5.0)
    its = untrained(first, tmp_path, said)
    mark = its.update_image(7)
    cuts.wanted = CutOrder(8)
    assert cuts.is_due(8) and not cuts.is_due(9) and its.keep_cut(cuts, 8)
    (cut,) = [each for each in inventory(tmp_path) if each.path.name.startswith("cut-")]
    assert (cut.key.kind, cut.key.iteration, cut.key.mark, cut.key.size) == (UNTRAINED_KIND, 8, mark, 2)
    for path in tmp_path.glob("untrained-*"):
        path.unlink()
    other = state()
    again = untrained(other, tmp_path, said)
    assert again.restore(mark) and float(other.model[0].module[1].weight.mean()) == 5.0
    again.update_image(7)
    assert len(list(tmp_path.glob("untrained-0-*"))) == 1, "the cut's file is written over later"
    assert not said


def test_without_room_there_is_no_cut_and_it_is_said_once(tmp_path, said):
    first, cuts = state(), Cuts(tmp_path / "nothing", 0, said.append)
    its = untrained(first, tmp_path, said)
    its.update_image(7)
    assert not its.keep_cut(cuts, 1) and not its.keep_cut(cuts, 2)
    assert len(said) == 1 and "the training goes on" in said[0]
