"""Megatron-LM's `torch` format: a file for each rank, put together, and what cannot be."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import torch

from tests.support.texts import raises_text
from unicron_transition.snapshot import foreign
from unicron_transition.snapshot.formats import opening
from unicron_transition.snapshot.formats.index import BadCheckpoint

HIDDEN, LAYERS, TENSOR, STAGES = 8, 4, 2, 2
TRACKER = "latest_checkpointed_iteration.txt"
FC1, FC2 = "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"
# of a layer -> (shape, axis that is cut, halves)
LAYER = {
    "input_layernorm.weight": ((HIDDEN,), None, 1),
    "self_attention.linear_proj.weight": ((HIDDEN, HIDDEN), 1, 1),
    FC1: ((8 * HIDDEN, HIDDEN), 0, 2),
    FC2: ((HIDDEN, 4 * HIDDEN), 1, 1),
}


def cut(whole: torch.Tensor, axis: int | None, halves: int, rank: int) -> torch.Tensor:
    if axis is None:
        return whole.clone()
    return torch.cat(whole.chunk(TENSOR * halves, axis)[rank::TENSOR], axis).clone()


@pytest.fixture
def saved(tmp_path):
    """(the folder, {name: whole main parameter})."""
    torch.manual_seed(0)
    mains = {
        f"decoder.layers.{layer}.{name}": torch.randn(shape)
        for layer in range(LAYERS)
        for name, (shape, _, _) in LAYER.items()
    }
    mains["embedding.word_embeddings.weight"] = torch.randn(20, HIDDEN)
    for stage in range(STAGES):
        for rank in range(TENSOR):
            save(tmp_path, mains, rank, stage)
    (tmp_path / TRACKER).write_text("3")
    return tmp_path, mains


def rank_file(folder: Path, rank: int, stage: int) -> Path:
    return folder / "iter_0000003" / f"mp_rank_{rank:02d}_{stage:03d}" / "model_optim_rng.pt"


def save(folder: Path, mains: dict[str, torch.Tensor], rank: int, stage: int) -> None:
    own = {}
    embedding = cut(mains["embedding.word_embeddings.weight"], 0, 1, rank)
    if stage == 0:
        own["embedding.word_embeddings.weight"] = embedding
    for layer in range(LAYERS // STAGES):
        for name, (_, axis, halves) in LAYER.items():
            whole = mains[f"decoder.layers.{stage * LAYERS // STAGES + layer}.{name}"]
            own[f"decoder.layers.{layer}.{name}"] = cut(whole, axis, halves, rank)
    if stage == STAGES - 1:
        own["output_layer.weight"] = embedding
    vectors = [name for name, tensor in own.items() if tensor.dim() == 1]
    matrices = [name for name in own if name not in vectors]
    ids = {name: number for number, name in enumerate([*vectors, *matrices])}
    state = {
        ids[name]: {"step": torch.tensor(5.0), "exp_avg": -tensor, "exp_avg_sq": tensor**2}
        for name, tensor in own.items()
    }
    groups = [
        {"params": [ids[name] for name in names], "wd_mult": decay, "lr": 0.5}
        for names, decay in ((vectors, 0.0), (matrices, 1.0))
    ]
    optimizer = {
        "optimizer": {"state": state, "param_groups": groups},
        "fp32_from_fp16_params": [[own[name] for name in names] for names in (vectors, matrices)],
    }
    content = {
        "args": argparse.Namespace(tensor_model_parallel_size=TENSOR, pipeline_model_parallel_size=STAGES),
        "iteration": 3,
        "model": {name: tensor.bfloat16() for name, tensor in own.items()} | {"decoder._extra_state": None},
        "optimizer": optimizer,
        "opt_param_scheduler": {"num_steps": 30},
    }
    path = rank_file(folder, rank, stage)
    path.parent.mkdir(parents=True)
    torch.save(content, path)


def change(folder: Path, rank: int, stage: int, how) -> None:
    path = rank_file(folder, rank, stage)
    content = torch.load(path, weights_only=False)
    how(content)
    torch.save(content, path)


def test_the_ranks_tensors_are_put_together(saved):
    folder, mains = saved
    index = opening.index_of(folder)
    assert (index.format, index.iteration, index.layout, index.common.unread) == ("torch", 3, "TP2 PP2", "")
    assert (index.common.step, index.common.schedule) == (5.0, {"num_steps": 30})
    names = {name: name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_") for name in LAYER}
    wanted = {
        f"decoder.layers.{new}": torch.stack([mains[f"decoder.layers.{layer}.{old}"] for layer in range(LAYERS)])
        for old, new in names.items()
    }
    wanted["embedding.word_embeddings.weight"] = mains["embedding.word_embeddings.weight"]
    assert {tensor.name for tensor in index.parameters()} == set(wanted)
    for name, whole in wanted.items():
        states = {key: torch.from_numpy(state.read()) for key, state in index.states(name).items()}
        assert torch.equal(states["param"], whole)
        assert torch.equal(states["exp_avg"], -whole)
        assert torch.equal(states["exp_avg_sq"], whole**2)
        assert torch.equal(torch.from_numpy(index.tensors[name].read()).view(torch.bfloat16), whole.bfloat16())


def exchange(content) -> None:
    mains = content["optimizer"]["fp32_from_fp16_params"][0]
    mains[0], mains[1] = mains[1], mains[0]


def test_states_that_are_not_their_parameters_are_found_out_where_they_are_read(saved, snapshot):
    change(saved[0], 0, 0, exchange)
    index = opening.index_of(saved[0])
    with raises_text(BadCheckpoint, snapshot):
        index.tensors["optimizer.state.param.decoder.layers.self_attention.linear_qkv.layer_norm_weight"].read()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (lambda c: c["model"].update({"decoder.layers.0.mlp.router.weight": torch.zeros(2)}), "how mlp.router.weight"),
        (lambda c: c["model"].pop(f"decoder.layers.1.{FC2}"), "not in all of its layers"),
        (lambda c: c.pop("model"), "its model is not there"),
        (lambda c: vars(c["args"]).update(tensor_model_parallel_size=4), "not those of the layout"),
        (lambda c: vars(c["args"]).update(expert_model_parallel_size=2), "not those of the layout"),
        (lambda c: c["model"].update({f"decoder.layers.1.{FC2}": torch.zeros(())}), "not as Megatron-LM writes it"),
        (lambda c: c.update(optimizer=[c["optimizer"]] * 2), "several optimizers"),
    ],
)
def test_a_model_that_cannot_be_put_together_is_refused(saved, how, says):
    change(saved[0], 0, 0, how)
    with pytest.raises(BadCheckpoint, match=rf"{re.escape(says)}"):
        opening.index_of(saved[0])


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (lambda c: c["optimizer"]["optimizer"]["param_groups"].pop(), "does not step all parameters"),
        (lambda c: c["optimizer"]["optimizer"]["param_groups"][1]["params"].pop(), "groups of its .* are not known"),
        (lambda c: c["optimizer"]["optimizer"]["param_groups"][1].update(wd_mult=0.0), "are not known"),
        (lambda c: c["optimizer"]["optimizer"]["state"].update({0: {"exp_avg": torch.zeros(3)}}), "another shape"),
        (lambda c: c["optimizer"]["optimizer"].pop("state"), "has no state"),
    ],
)
def test_an_optimizer_whose_states_cannot_be_told_apart_is_left_out_only_if_one_says_so(saved, how, says):
    change(saved[0], 0, 0, how)
    index = opening.index_of(saved[0])
    assert re.search(says, index.common.unread) and not index.has_optimizer()
    with pytest.raises(BadCheckpoint, match=f"{says}.*or give --no-load-optim"):
        foreign.found_in(saved[0], foreign.Selection())
    assert foreign.found_in(saved[0], foreign.Selection(optimizer=False)).iteration == 3


def test_a_file_that_is_missing_or_of_an_expert_is_named(saved, snapshot):
    path = rank_file(saved[0], 1, 1)
    path.rename(path.with_name("away.pt"))
    with raises_text(BadCheckpoint, snapshot, saved[0]):
        opening.index_of(saved[0])
    path.parent.rename(path.parent.with_name("mp_rank_00_000_000"))
    path = path.parent.with_name("mp_rank_00_000_000") / "away.pt"
    path.rename(path.with_name("model_optim_rng.pt"))
    with raises_text(BadCheckpoint, snapshot, saved[0]):
        opening.index_of(saved[0])


def test_a_second_file_whose_buffers_are_not_the_models_is_refused(saved):
    path = rank_file(saved[0], 0, 0).with_name("distrib_optim.pt")
    torch.save({"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): {"param": torch.zeros(64)}}}, path)
    assert "its buffers" in opening.index_of(saved[0]).common.unread
