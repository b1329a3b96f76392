"""Where scripts put their optimizer's state and their count in a checkpoint of torch's: both are found there."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from unicron_transition.snapshot.formats import convert, opening
from unicron_transition.snapshot.formats.index import BadCheckpoint, Index

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
DONE = torch.tensor(7, dtype=torch.int32)


def trained(model: torch.nn.Module, make: Callable[..., torch.optim.Optimizer], **more: Any) -> torch.optim.Optimizer:
    optimizer = make(model.parameters(), **more)
    for _ in range(3):
        model(torch.rand(4, 4)).sum().backward()
        optimizer.step()
    return optimizer


def states(optimizer: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(the model's, the optimizer's, the same flat), as torch gives them."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
    more = {"SGD": {"lr": 0.1, "momentum": 0.9}, "plain SGD": {"lr": 0.1}}.get(optimizer, {})
    found = trained(model, getattr(torch.optim, optimizer.split()[-1]), **more)
    return (
        get_model_state_dict(model),
        get_optimizer_state_dict(model, found),
        get_optimizer_state_dict(model, found, options=FLAT),
    )


def saved(folder: Path, content: dict[str, Any]) -> Index:
    dcp.save(content, checkpoint_id=str(folder), no_dist=True)
    return opening.index_of(folder)


def read(index: Index) -> dict[str, Any]:
    return {name: tensor.read() for name, tensor in index.tensors.items()}


PLACES: dict[str, Callable[[Any, Any, Any], dict[str, Any]]] = {
    "flat at the top": lambda model, nested, flat: {**model, **flat},
    "nested at the top": lambda model, nested, flat: {**model, **nested},
    "flat beside a model": lambda model, nested, flat: {"model": model, **flat},
    "flat in an app": lambda model, nested, flat: {"app": {**model, **flat}},
    "flat under another name": lambda model, nested, flat: {"model": model, "opt": flat},
    "nested under another name": lambda model, nested, flat: {"model": model, "my": {"opt": nested}},
    "torchtitan": lambda model, nested, flat: {**model, "optimizer": flat, "train_state": {"step": DONE}},
}


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "plain SGD", "Adafactor"])
@pytest.mark.parametrize("place", PLACES)
def test_an_optimizers_state_is_found_wherever_it_is_put(tmp_path, place, optimizer):
    """Defect: at the top, or under a name of its own, it became tensors of the model."""
    model, nested, flat = states(optimizer)
    wanted = saved(tmp_path / "known", {"model": model, "optim": nested})
    index = saved(tmp_path / "other", PLACES[place](model, nested, flat))
    short = {name.replace("app.", "").replace("model.", ""): array for name, array in read(index).items()}
    known = {name.replace("model.", ""): array for name, array in read(wanted).items()}
    assert short.keys() == known.keys()
    for name, array in known.items():
        np.testing.assert_array_equal(short[name], array, err_msg=name)
    assert index.common.groups == wanted.common.groups and index.common.groups
    assert index.common.step == wanted.common.step and index.common.losses() == []
    again = opening.index_of(convert.import_(index, tmp_path / "imported"))
    assert read(again).keys() == read(index).keys() and again.common.groups == index.common.groups


def test_a_models_module_called_state_is_no_optimizers(tmp_path):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state = torch.nn.Linear(4, 4)
            self.register_buffer("step", torch.tensor(5))

        def forward(self, data: torch.Tensor) -> torch.Tensor:
            return self.state(data)  # type: ignore[no-any-return]

    model = Model()
    optimizer = trained(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    names = ["state.bias", "state.weight", "step"]
    plain = saved(tmp_path / "plain", get_model_state_dict(model))
    assert sorted(plain.tensors) == names and plain.iteration == 0, "its own buffer says nothing of iterations"
    flat = saved(
        tmp_path / "flat", get_model_state_dict(model) | get_optimizer_state_dict(model, optimizer, options=FLAT)
    )
    assert sorted(tensor.name for tensor in flat.parameters()) == names
    assert list(flat.states("state.weight")) == ["momentum_buffer"]


def test_of_several_optimizers_none_is_taken_and_it_is_said(tmp_path, snapshot):
    model, nested, flat = states("AdamW")
    index = saved(tmp_path, {"model": model, "opt_g": nested, "opt_d": flat})
    assert sorted(index.tensors) == sorted(f"model.{name}" for name in model)
    assert index.common.losses() == snapshot


def test_an_optimizer_without_a_model_is_refused(tmp_path):
    _, nested, flat = states("AdamW")
    for number, content in enumerate((flat, nested, {"optim": nested}, {"step": 3})):
        with pytest.raises(BadCheckpoint, match="has no tensor of"):
            saved(tmp_path / str(number), content)


# ------------------------------------------------------------ how far it is
LOSSES = io.BytesIO(b"no tensor")
COUNTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "torchtitan": ({"train_state": {"step": DONE, "ntokens_seen": torch.tensor(99)}}, ["train_state"]),
    "torchtitan before": ({"train_state": {"step": DONE, "log_steps": LOSSES}}, ["train_state"]),
    "a number": ({"train_state": {"step": 7}}, []),
    "a tensor beside": ({"step": DONE}, []),
    "another name": ({"iteration": DONE}, []),
}


@pytest.mark.parametrize(
    ("count", "top"), [*((each, False) for each in COUNTS), *((each, True) for each in COUNTS if "titan" in each)]
)
def test_the_iteration_is_found_in_a_tensor(tmp_path, count, top):
    """Defect: it was 0, and the counts became tensors of the model. A tensor beside a model's at the top may be its
    buffer."""
    model, _, flat = states("AdamW")
    told, left = COUNTS[count]
    index = saved(tmp_path, {**(model if top else {"model": model}), "optimizer": flat, **told})
    assert index.iteration == 7
    assert [tensor.name for tensor in index.parameters()] == [name if top else f"model.{name}" for name in model]
    assert index.common.left == left and index.common.step == 3


@pytest.mark.parametrize("wrong", [torch.tensor(7.5), torch.tensor([7]), torch.tensor(-7), "seven"])
def test_what_is_no_number_of_iterations_is_none(tmp_path, wrong):
    model, nested, _ = states("AdamW")
    assert saved(tmp_path, {"model": model, "optimizer": nested, "train_state": {"step": wrong}}).iteration == 0
