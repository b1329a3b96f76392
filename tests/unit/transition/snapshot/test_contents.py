"""What is gathered of a state, copied again and again, and read back."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest
import torch

from tests.support.kept import step, training
from unicron_transition.snapshot import contents, image_format, parts
from unicron_transition.snapshot.checkpoint_file import Head
from unicron_transition.snapshot.contents import (
    SMALL,
    Contents,
    Copier,
    Gatherer,
    copy_flat,
    fill,
    gather,
    head_of,
    lay_out,
    open_image,
    raw,
)
from unicron_transition.snapshot.image_format import ALIGN, STEP, Image, ImagePage, Key, read_page
from unicron_transition.snapshot.migrate import TrainingState


def test_a_repeated_copy_is_of_the_present_values_and_leaves_zeros_between_them() -> None:
    large = torch.rand(SMALL)
    odd = torch.arange(ALIGN + 5, dtype=torch.uint8)
    strided = torch.rand(6, 4).t()[1]
    moving = torch.rand(3)
    found = Contents([large, odd, torch.empty(0), strided, torch.tensor([True]), moving], [5], b"")
    into, once = (torch.full((found.size,), 255, dtype=torch.uint8) for _ in range(2))
    copier = Copier(found.tensors, found.offsets, into, found.moving)
    for turn in range(3):
        large += turn
        odd += 1
        strided -= turn
        moving *= 2.0
        still = found.still()
        moving.zero_()  # its copy counts
        copier.copy(still)
        fill(still, found.offsets, once)
        assert torch.equal(into, once)
        moving += still[5]


def test_behind_each_tensor_is_nothing_but_zeros_wherever_it_stands() -> None:
    for tensors in ([torch.full((3,), 7, dtype=torch.uint8)], [torch.ones(5), torch.rand(SMALL + 1), torch.ones(2)]):
        offsets, size = lay_out(tensors)
        into = torch.full((size,), 255, dtype=torch.uint8)
        fill(tensors, offsets, into)
        for tensor, begin, end in zip(tensors, offsets, [*offsets[1:], size], strict=True):
            data = tensor.view(torch.uint8)
            assert torch.equal(into[begin : begin + data.numel()], data) and not into[begin + data.numel() : end].any()


def test_each_tensor_begins_at_a_multiple_of_the_alignment() -> None:
    sizes = [1, ALIGN, ALIGN + 1, 0, 3]
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    assert lay_out(tensors) == ([0, ALIGN, 2 * ALIGN, 4 * ALIGN, 4 * ALIGN], 5 * ALIGN)


# ------------------------------------------------------------ gathering
def test_a_state_whose_tensors_stay_is_looked_up_once() -> None:
    state = training()
    gatherer = Gatherer(state)
    first = gatherer.contents()
    step(state)
    assert gatherer.contents() is first
    weight = state.model[0].module[0].weight
    weight.data = weight.data.clone()
    second = gatherer.contents()
    assert second is not first and gatherer.contents() is second
    state.sharded = True
    assert gatherer.contents() is not second


def test_what_is_a_number_or_a_copy_is_gathered_anew_each_time() -> None:
    state = training()
    parameter = state.model[0].module[0].bias
    state.optimizer.state[parameter]["step"] = 1
    gatherer = Gatherer(state)
    assert gatherer.contents() is not gatherer.contents(), "the number is in no tensor"
    state = training()
    weight = state.model[0].module[0].weight
    weight.data = weight.data.t().contiguous().t()
    gatherer = Gatherer(state)
    assert gatherer.contents() is not gatherer.contents(), "flat, this one is a copy"


def test_what_another_rank_of_the_replica_has_too_is_left_out_unless_the_rank_is_to_go_on_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = training()
    every = list(parts.parts(state.model, state.optimizer))
    every[0].duplicate = True
    monkeypatch.setattr(parts, "parts", lambda model, optimizer: iter(every))
    whole, lasting = gather(state, alone=True)
    part, _ = gather(state)
    assert lasting and len(whole.tensors) - len(part.tensors) == len(every[0].tensors) + len(every[0].others)
    assert len(Gatherer(state).contents().tensors) == len(whole.tensors), "what is kept in memory is for going on alone"
    frozen = [place for place, one in enumerate(every) if not one.stepped]
    assert len(whole.moving) == len(frozen) > 0
    assert [whole.tensors[number].data_ptr() for number in whole.moving] == [
        next(iter(every[place].tensors.values())).data_ptr() for place in frozen
    ]


# ------------------------------------------------------------ reading
def image(folder: Path, head: bytes, data: torch.Tensor) -> ImagePage:
    made = Image(folder / "a.image", len(head), data.nbytes)
    copy_flat(data, made)
    made.mark_whole(Key("state", 0, 1), head, data.nbytes)
    return read_page(made.path)


def saved(folder: Path, state: TrainingState) -> tuple[Contents, ImagePage]:
    found, _ = gather(state, alone=True)
    data = torch.zeros(found.size, dtype=torch.uint8)
    fill(found.tensors, found.offsets, data)
    return found, image(folder, head_of(state, found.about, 7, "TP1"), data)


def test_what_was_gathered_is_read_back_with_its_settings(tmp_path: Path) -> None:
    """Also where a schedule or the optimizer keeps a table by numbers."""
    state = training()
    state.scheduler = torch.optim.lr_scheduler.MultiStepLR(state.optimizer, [30, 80])
    parameter = state.model[0].module[0].bias
    state.optimizer.state[parameter]["history"] = {3: 0.5}
    found, written = saved(tmp_path, state)
    told = open_image(written)
    assert (told.head.iteration, told.head.layout, told.head.step) == (7, "TP1", 0.0)
    assert told.head.scheduler is not None and 30 in told.head.scheduler["milestones"]
    for number, tensor in enumerate(found.tensors):
        assert torch.equal(told.tensor(number), tensor)
    for part, (*_, keys, _) in zip(parts.parts(state.model, state.optimizer), told.index(), strict=True):
        assert keys.keys() == part.tensors.keys()
        assert all(torch.equal(told.tensor(number), part.tensors[key]) for key, number in keys.items())
    others = [others for *_, others in told.index()]
    assert {"history": {3: 0.5}}.items() <= next(one for one in others if "history" in one).items()
    assert all(torch.equal(one["step"], torch.tensor(1.0)) for one in others if "step" in one)


def test_data_are_checked_once_and_before_any_of_them_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, written = saved(tmp_path, training())
    checks, check = [], ImagePage.check_file
    monkeypatch.setattr(ImagePage, "check_file", lambda self, threads=1: checks.append(self) or check(self))
    told = open_image(written)
    assert not checks
    told.tensor(0)
    told.tensor(1)
    assert len(checks) == 1


def test_tensors_stand_one_behind_the_other_or_where_the_head_says_so(tmp_path: Path) -> None:
    values = torch.arange(64, dtype=torch.float32)
    kinds = [("float32", 2), ("float32", 3, 128), ("float32", 2, STEP), ("uint8", 4), ("float32", 1)]
    about = msgpack.packb({"index": [], "tensors": kinds})
    head = Head(1, "TP1", [], None, [], 0, None, 9.0, "", about)
    told = open_image(image(tmp_path, head.pack(), values))
    assert [told._read(number).tolist() for number in range(len(kinds))] == [
        [0.0, 1.0],
        [32.0, 33.0, 34.0],
        [9.0, 9.0],
        list(values[32:33].view(torch.uint8)),
        [48.0],
    ]
    assert raw(memoryview(b"")).numel() == 0 and raw(memoryview(bytearray(b"ab"))).tolist() == [97, 98]
    assert contents.read(told.found)[1].numel() == values.nbytes


def test_a_tensor_is_read_where_it_is_wanted_if_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, written = saved(tmp_path, training())
    told, number = open_image(written), 0
    while found.tensors[number].numel() < 2:
        number += 1
    wanted = found.tensors[number]
    place = torch.zeros_like(wanted)
    assert told.lend(number, lambda dtype: place) is place
    assert told.lend(number, lambda dtype: torch.zeros_like(wanted)) is None, "only one place is filled"
    others = [torch.zeros(wanted.numel(), dtype=torch.float64), torch.zeros(1), torch.zeros(2 * wanted.numel())[::2]]
    for other in others:  # another type, another size, with gaps
        assert open_image(written).lend(number, lambda dtype, other=other: other) is None
    told.fill()
    assert torch.equal(place, wanted)


def test_a_rank_reads_with_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_format.os, "sched_getaffinity", lambda process: set(range(24)))
    ranks = {"": 8, "1": 8, "8": 3, "24": 1, "99": 1, "x": 1, "0": 8}
    for text, wanted in ranks.items():
        assert image_format.reading_threads({"LOCAL_WORLD_SIZE": text}) == wanted
    assert image_format.reading_threads({}) == 8
