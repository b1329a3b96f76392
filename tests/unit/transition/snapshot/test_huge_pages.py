"""New memory for a state is asked for in huge pages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.kept import kept
from unicron_transition.snapshot import parts
from unicron_transition.snapshot.checkpoint import load_image
from unicron_transition.snapshot.image_format import inventory
from unicron_transition.snapshot.migrate import TrainingState
from unicron_transition.snapshot.parts import HUGE, new_tensor

CPU = torch.device("cpu")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The begin and end of the memory that is asked for."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(parts, "_madvise", lambda begin, size, what: found.append((begin, begin + size)))
    return found


@pytest.mark.parametrize("size", [0, 1, HUGE // 4, HUGE, 5 * HUGE // 2, 9 * HUGE])
def test_only_whole_huge_pages_of_the_tensor_itself_are_asked_for(asked, size):
    made = new_tensor(torch.Size([size]), torch.uint8, CPU)
    assert (made.shape, made.dtype) == ((size,), torch.uint8)
    for begin, end in asked:
        assert begin % HUGE == end % HUGE == 0 and made.data_ptr() <= begin < end <= made.data_ptr() + size
        assert end - begin > size - 2 * HUGE
    assert len(asked) == (size >= 2 * HUGE) or size == HUGE


def test_a_kernel_that_refuses_changes_nothing(monkeypatch):
    monkeypatch.setattr(parts, "_madvise", lambda begin, size, what: -1)
    assert new_tensor(torch.Size([3, HUGE]), torch.float32, CPU).fill_(2.0).sum() == 6 * HUGE


def state_of_large_tensors() -> TrainingState:
    model = torch.nn.Linear(1024, 3 * HUGE // 4096, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    return TrainingState([SimpleNamespace(module=model)], optimizer, None)


def test_a_new_process_fills_its_optimizer_there_and_one_that_has_its_memory_fills_that(tmp_path: Path, asked):
    state, other = state_of_large_tensors(), state_of_large_tensors()
    kept(tmp_path, state, 4)
    (found,) = inventory(tmp_path)
    load_image(other, found.path)
    assert not asked
    other.optimizer.state.clear()
    load_image(other, found.path)
    assert len(asked) == 2, "two moments"
    for mine, its in zip(state.optimizer.state.values(), other.optimizer.state.values(), strict=True):
        assert all(torch.equal(mine[key], its[key]) for key in ("step", "exp_avg", "exp_avg_sq"))
