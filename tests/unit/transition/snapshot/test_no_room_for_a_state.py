"""A process that gets no memory for what it loads, or cannot read it, removes none of it."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from tests.support.flips import flip
from tests.support.kept import WRITER, beginnings, everything, iterations, kept, same, training
from tests.support.limits import address_space_left
from unicron_transition.snapshot import image_format, parts
from unicron_transition.snapshot.checkpoint import CheckpointError, Checkpoints
from unicron_transition.snapshot.migrate import TrainingState
from unicron_transition.snapshot.parts import HUGE, NewMemory

CPU = torch.device("cpu")


class Full(mmap.mmap):
    """As with `ulimit -v`, or where the kernel promises no more than it has: an image fits, a chunk does not."""

    def __new__(cls, descriptor: int, length: int, *about: int, **more: int) -> Full:
        if descriptor == -1:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return super().__new__(cls, descriptor, length, *about, **more)


class NothingFits(mmap.mmap):
    def __new__(cls, *_: object, **__: object) -> NothingFits:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")


def fresh(seed: int = 1) -> TrainingState:
    state = training(seed)
    state.optimizer.state.clear()
    return state


def no_memory(*_: object, **__: object) -> NoReturn:
    raise MemoryError("2 MiB")


@pytest.mark.parametrize("full", [Full, NothingFits])
def test_a_sound_image_is_loaded_without_a_chunk_and_without_a_mapping(
    full: type[mmap.mmap], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect: it was removed as damaged."""
    state, other = training(), fresh()
    kept(tmp_path, state, 4)
    monkeypatch.setattr(parts, "HUGE", 1)  # else a state as small as this one wants no chunk
    monkeypatch.setattr(mmap, "mmap", full)
    assert beginnings(tmp_path).take_up(other, None) == 4
    assert same(everything(other), everything(state)) and iterations(tmp_path) == [4]


@pytest.mark.parametrize("has_state", [False, True])
def test_a_sound_image_outlives_a_process_that_gets_no_memory_at_all(
    has_state: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(tmp_path, training(), 4)
    begin = beginnings(tmp_path)
    begin.list_again(WRITER, has_state)
    monkeypatch.setattr(image_format.ImagePage, "check_file" if has_state else "fill", no_memory)
    with pytest.raises(CheckpointError, match=r"no memory to load .*, which stays as it is .*: give each rank more"):
        begin.take_up(fresh(), None)
    assert iterations(tmp_path) == [4]


def test_torchs_own_lack_of_memory_is_not_taken_for_another_model(tmp_path: Path) -> None:
    """With the kernel's own limit of the address space."""
    model = torch.nn.Linear(1 << 12, 1 << 12, bias=False)
    state = TrainingState([type("Chunk", (), {"module": model})()], torch.optim.AdamW(model.parameters()), None)
    model.weight.grad = torch.ones_like(model.weight)
    state.optimizer.step()
    kept(tmp_path, state, 4)
    state.optimizer.state.clear()
    with address_space_left(32 << 20), pytest.raises(CheckpointError, match="no memory to load"):
        beginnings(tmp_path).take_up(state, None)
    assert iterations(tmp_path) == [4]


def test_a_checkpoint_that_finds_no_memory_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one needs as much."""
    for iteration in (3, 4):
        Checkpoints(tmp_path).save_last(training(), iteration, WRITER)
    monkeypatch.setattr(image_format.ImagePage, "fill", no_memory)
    with pytest.raises(CheckpointError, match="no memory to load"):
        Checkpoints(tmp_path).load(fresh())


def raises(number: int):
    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


def test_an_error_of_the_system_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path, training(), 4)
    begin = beginnings(tmp_path)
    monkeypatch.setattr(image_format.ImagePage, "fill", raises(errno.EMFILE))
    with pytest.raises(CheckpointError, match=r"Too many open files.*stays as it is"):
        begin.take_up(fresh(), None)
    assert iterations(tmp_path) == [4]


@pytest.mark.parametrize("lost", [errno.EIO, None])
def test_what_is_lost_is_not_offered_again(lost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel answers EIO for a page that it has taken out of use."""
    kept(tmp_path, training(), 4)
    begin = beginnings(tmp_path)
    if lost is None:
        flip(next(image_format.inventory(tmp_path)).path)
    else:
        monkeypatch.setattr(image_format.ImagePage, "fill", raises(lost))
    with pytest.raises(RuntimeError, match="is damaged"):
        begin.take_up(fresh(), None)
    assert iterations(tmp_path) == [] and begin.choices == []


# ------------------------------------------------------------ what is reserved
@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of chunks."""
    sizes: list[int] = []

    class Notes(mmap.mmap):
        def __new__(cls, descriptor: int, length: int, *about: int, **more: int) -> Notes:
            if descriptor == -1:
                sizes.append(length)
            return super().__new__(cls, descriptor, length, *about, **more)

    monkeypatch.setattr(mmap, "mmap", Notes)
    return sizes


def test_a_small_state_reserves_nothing(tmp_path: Path, reserved: list[int]) -> None:
    """Defect: 66 MiB for a state of a KiB."""
    kept(tmp_path, training(), 4)
    assert beginnings(tmp_path).take_up(fresh(), None) == 4
    assert reserved == []


def test_no_more_is_reserved_than_is_expected(reserved: list[int]) -> None:
    memory = NewMemory(5 * HUGE)
    for _ in range(20):
        memory.tensor(torch.Size([HUGE // 4]), torch.uint8, CPU)
    assert reserved == [6 * HUGE], "and a huge page's size to begin with one"
    assert memory.tensor(torch.Size([HUGE // 4]), torch.uint8, CPU).numel() == HUGE // 4, "of more, torch's own"
    assert memory.tensor(torch.Size([3 * HUGE]), torch.uint8, CPU).numel() == 3 * HUGE
    assert reserved == [6 * HUGE, 4 * HUGE]


def test_a_chunk_that_is_refused_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = NewMemory()
    one = memory.tensor(torch.Size([4]), torch.uint8, CPU)
    monkeypatch.setattr(mmap, "mmap", Full)
    assert memory.tensor(torch.Size([2 * parts.CHUNK]), torch.uint8, CPU).numel() == 2 * parts.CHUNK
    assert memory.tensor(torch.Size([4]), torch.uint8, CPU).data_ptr() == one.data_ptr() + image_format.ALIGN
