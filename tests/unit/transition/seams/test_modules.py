"""The tensors of a module are looked up again only after one of them was replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from unicron_transition.seams.modules import ModuleTree


def build() -> nn.Module:
    """A model with a tied parameter, a module that has two names, and both kinds of buffers."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3)))
    model.again = model[0]
    model[1][1].weight = model[0].weight
    model[1].register_buffer("kept", torch.zeros(2))
    model[1].register_buffer("cache", torch.zeros(2), persistent=False)
    return model


def same(found: list[Any], wanted: list[Any]) -> bool:
    return len(found) == len(wanted) and all(one is other for one, other in zip(found, wanted, strict=True))


def agrees(tree: ModuleTree, model: nn.Module) -> None:
    """The tree has what torch's own walks find."""
    assert same(tree.parameters, list(model.parameters()))
    assert same(tree.buffers, list(model.buffers()))
    caches = {f"{path}.{name}" for path, each in model.named_modules() for name in each._non_persistent_buffers_set}
    wanted = {name: buffer for name, buffer in model.named_buffers() if name not in caches}
    found = dict(tree.persistent_buffers)
    assert found.keys() == wanted.keys() and same(list(found.values()), list(wanted.values()))


def swap_weights(model: Any) -> None:
    model[0].weight, model[1][0].weight = model[1][0].weight, model[0].weight


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda model: None,
    "written in place": lambda model: model[0].bias.data.add_(1.0),
    "a parameter is replaced": lambda model: setattr(model[0], "bias", nn.Parameter(torch.ones(3))),
    "two change places": swap_weights,
    "a parameter is removed": lambda model: model[0].register_parameter("bias", None),
    "a parameter is added": lambda model: model[1].register_parameter("more", nn.Parameter(torch.ones(1))),
    "a module is replaced": lambda model: setattr(model[1], "0", nn.LayerNorm(3)),
    "a module is added": lambda model: model.append(nn.Linear(3, 1)),
    "a module is removed": lambda model: model.__delitem__(1),
    "a buffer is replaced": lambda model: setattr(model[1], "kept", torch.ones(2)),
    "a buffer is added": lambda model: model[0].register_buffer("late", torch.ones(1)),
    "a buffer becomes a cache": lambda model: model[1]._non_persistent_buffers_set.add("kept"),
    "another buffer is the cache": lambda model: (
        model[1]._non_persistent_buffers_set.discard("cache"),
        model[1]._non_persistent_buffers_set.add("kept"),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_has_what_torch_finds_after_each_change(change: str) -> None:
    model = build()
    tree = ModuleTree(model)
    agrees(tree, model)
    for _ in range(2):
        CHANGES[change](model)
        agrees(tree, model)
        if change == "a module is removed":
            break


def test_while_nothing_is_replaced_it_walks_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    tree = ModuleTree(model)
    assert len(tree.parameters) == 5

    def refused(self: nn.Module) -> None:
        raise AssertionError("a walk")

    monkeypatch.setattr(nn.Module, "modules", refused)
    assert len(tree.parameters) == 5 and len(tree.persistent_buffers) == 1
    model[1].kept = torch.ones(2)
    with pytest.raises(AssertionError, match="a walk"):
        tree.persistent_buffers  # noqa: B018
