"""Numbers in a checkpoint that are not finite: found in every type and format, and judged where they matter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from unicron_transition.snapshot.checkpoint import Checkpoints
from unicron_transition.snapshot.formats import convert, finite, opening
from unicron_transition.snapshot.formats.finite import FLOATS, Count
from unicron_transition.snapshot.image_format import RAW
from unicron_transition.snapshot.migrate import TrainingState

WITHOUT = {"float4_e2m1fn_x2"}  # it has neither NaN nor infinity


@pytest.mark.parametrize("name", FLOATS)
def test_as_many_are_found_as_torch_finds(name):
    """All bit patterns of the small types, and of the others those beside the limits."""
    size = torch.zeros(1, dtype=getattr(torch, name)).element_size()
    if size <= 2:
        data = torch.arange(1 << (8 * size)).to(torch.uint8 if size == 1 else torch.uint16)
    else:
        data = torch.randint(0, 256, (4096, size), dtype=torch.uint8)
        data[::3, -2:] = torch.tensor([0xF0, 0x7F], dtype=torch.uint8)
    numbers = data.view(-1).view(getattr(torch, name))
    wide = numbers.to(torch.complex128) if numbers.is_complex() else numbers.to(torch.float64)
    wide = torch.view_as_real(wide) if wide.is_complex() else wide
    wanted = Count(int(wide.isnan().sum()), int(wide.isposinf().sum()), int(wide.isneginf().sum()))
    found = finite.count(data.view(-1).view(torch.uint8).numpy().view(FLOATS[name].unit), FLOATS[name])
    assert found == wanted and found.all


def test_no_type_of_numbers_is_forgotten():
    floats = {name for name in RAW if getattr(torch, name).is_floating_point or getattr(torch, name).is_complex}
    assert floats - WITHOUT == FLOATS.keys()


class Masked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))


@pytest.fixture
def saved(tmp_path):
    """saved(): the folder of a checkpoint of this model and optimizer, whose state a test changes before."""
    torch.manual_seed(1)
    model = Masked()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.norm(model.inner(torch.rand(6, 5))).square().sum().backward()
    optimizer.step()

    def save(form: str) -> Path:
        Checkpoints(tmp_path / "own").save_last(TrainingState([SimpleNamespace(module=model)], optimizer, None), 7)
        if form != "unicron":
            convert.export(opening.index_of(tmp_path / "own"), tmp_path / form, form, "", None, "", lambda line: None)
        return tmp_path / ("own" if form == "unicron" else form)

    return model, optimizer, save


@pytest.mark.parametrize("form", ["unicron", "dcp"])
def test_what_is_trained_is_judged_and_a_mask_is_only_said(saved, form):
    model, optimizer, save = saved
    model.inner.weight.data[1, 2] = torch.nan
    optimizer.state[model.inner.bias]["exp_avg_sq"][3] = torch.inf
    wrong, notes = finite.examine(opening.index_of(save(form)))
    assert wrong == [
        "inner.weight: 1 of 20 numbers is not finite (1 NaN)",
        "optimizer.state.exp_avg_sq.inner.bias: 1 of 4 numbers is not finite (1 infinite)",
    ]
    assert notes == ["mask: 6 of 16 numbers are not finite (6 infinite): not judged, since a buffer may have them"]


def test_a_running_mean_that_is_no_number_is_no_mask(saved):
    model, _, save = saved
    assert finite.examine(opening.index_of(save("unicron")))[0] == []
    model.norm.running_mean.fill_(torch.nan)
    (wrong,), _ = finite.examine(opening.index_of(save("unicron")))
    assert wrong == "norm.running_mean: 4 of 4 numbers are not finite (4 NaN)"


def test_of_weights_alone_only_what_a_mask_has_is_not_judged(tmp_path):
    tensors = {"low": torch.tensor([0.0, -torch.inf]), "high": torch.tensor([torch.inf]), "count": torch.ones(2).int()}
    save_file(tensors, tmp_path / "model.safetensors")
    wrong, notes = finite.examine(opening.index_of(tmp_path))
    assert [line.split(":")[0] for line in wrong + notes] == ["high", "low"] and len(notes) == 1


def test_of_many_tensors_some_are_named(tmp_path):
    save_file({f"w{number:02d}": torch.tensor([torch.nan]) for number in range(30)}, tmp_path / "model.safetensors")
    wrong, _ = finite.examine(opening.index_of(tmp_path))
    assert len(wrong) == finite.MOST_LINES + 1 and wrong[-1] == "and 10 more tensors"
