"""Checkpoints of Megatron's own, written and loaded by megatron-core, and what lies between them here: from one layout
to another, bit for bit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import proof
from tests.support.processes import outside_slurm
from tests.support.rank_harness import Ranks
from tests.support.warm import Script
from unicron_transition.snapshot import foreign
from unicron_transition.snapshot.formats import convert, opening
from unicron_transition.snapshot.formats.index import BadCheckpoint

pytestmark = pytest.mark.process
SUPPORT = Path(__file__).resolve().parents[1] / "support"
SCRIPT = SUPPORT / "megatron_saves.py"
LIMIT = 240.0


def run(ranks: int, what: str, folder: Path, out: Path, **settings: str) -> None:
    """All ranks of one run, to its end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONWARNINGS": "ignore"}
    done = Script(SCRIPT, what, folder, out, environment=outside_slurm() | told | settings).wait(LIMIT)
    assert done.returncode == 0, done.stderr


def whole(out: Path) -> dict[tuple[str, str], torch.Tensor]:
    """(name, kind) -> the whole tensor, of what all ranks hold; and of each optimizer's steps."""
    found: dict[tuple[str, str], torch.Tensor] = {}
    seen: dict[tuple[str, str], torch.Tensor] = {}
    for path in sorted(out.glob("[0-9]*.pt")):
        rank = torch.load(path, weights_only=False)
        found["schedule", "steps"] = torch.tensor(rank["schedule"]["num_steps"])
        for name, parts in rank["held"].items():
            for (_, shape, offset, extent), begin, end, tensors, others in parts:
                at = tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))
                for kind, tensor in tensors.items():
                    for table, value in ((found, tensor), (seen, torch.ones_like(tensor, dtype=torch.bool))):
                        mine = table.setdefault((name, kind), torch.zeros(shape, dtype=value.dtype))[at]
                        flat = mine.reshape(-1).clone()
                        flat[begin:end] = value
                        mine.copy_(flat.view(extent))
                found[name, "step"] = torch.tensor(float(others["step"]))
    assert all(each.all() for each in seen.values())
    return found


def same(one: Path, other: Path) -> None:
    mine, its = whole(one), whole(other)
    assert mine.keys() == its.keys() and len(mine) > 20
    assert [name for name in mine if not torch.equal(mine[name], its[name])] == []


# what Megatron-LM compares, and what it takes with --use-checkpoint-args
ARGUMENTS = {
    **{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 4, "swiglu": False},
    **{"ffn_hidden_size": 256, "max_position_embeddings": 32, "position_embedding_type": "rope", "rotary_base": 10000},
    **{"normalization": "LayerNorm", "add_bias_linear": True, "untie_embeddings_and_output_weights": False},
    **{"hidden_dropout": 0.0, "padded_vocab_size": 128, "apply_layernorm_1p": False},
}
SHARDED = {"TINY_BF16": "1", "TINY_DISTOPT": "1"}


@pytest.mark.parametrize(
    ("settings", "one", "two", "three"),
    [
        pytest.param({}, ("1 1 1", 1), ("2 1 1", 2), ("1 2 1", 2), marks=pytest.mark.wide),
        (SHARDED, ("2 1 1", 4), ("1 2 1", 2), ("1 1 1", 1)),
        pytest.param(SHARDED, ("2 1 1", 4), ("1 2 1", 4), ("1 1 1", 1), marks=pytest.mark.wide),
        pytest.param({"TINY_BF16": "1"}, ("1 2 1", 2), ("2 1 1", 2), ("1 1 1", 2), marks=pytest.mark.wide),
    ],
)
def test_from_megatron_to_a_session_and_back_in_other_layouts(tmp_path, settings, one, two, three):
    run(one[1], "save", tmp_path / "megatron", tmp_path / "first", TINY_LAYOUT=one[0], **settings)
    run(two[1], "begin", tmp_path / "megatron", tmp_path / "second", TINY_LAYOUT=two[0], **settings)
    same(tmp_path / "first", tmp_path / "second")
    convert.export(opening.index_of(tmp_path / "second" / "saves"), tmp_path / "back", "torch_dist")
    told = torch.load(next((tmp_path / "back").glob("iter_*")) / "common.pt", weights_only=False)["args"]
    assert {name: getattr(told, name, "missing") for name in ARGUMENTS} == ARGUMENTS
    run(three[1], "load", tmp_path / "back", tmp_path / "third", TINY_LAYOUT=three[0], **settings)
    same(tmp_path / "first", tmp_path / "third")


BUCKETS, RANKS = {"TINY_DISTOPT": "1", "SAVES_SHARDING": "dp_reshardable"}, {"SAVES_FORMAT": "torch"}
MANY = {"TINY_OVERLAP": "1", "TINY_LAYERS": "4"}  # buckets


@pytest.mark.wide
@pytest.mark.parametrize(
    ("settings", "one", "two"),
    [
        (BUCKETS | MANY | {"TINY_BF16": "1"}, ("2 2 1", 4), ("1 1 1", 1)),
        (BUCKETS | MANY | {"TINY_BF16": "1", "TINY_GATED": "1"}, ("2 1 1", 4), ("1 2 1", 2)),
        (BUCKETS | {"TINY_FP16": "1024"}, ("1 1 1", 3), ("2 1 1", 2)),
        (BUCKETS | {"TINY_LAYERS": "4"}, ("1 2 2", 2), ("1 1 1", 2)),
        (RANKS | {"TINY_BF16": "1", "TINY_GATED": "1"}, ("2 2 1", 4), ("1 1 1", 1)),
        (RANKS | {"TINY_LAYERS": "4"}, ("1 2 2", 2), ("2 1 1", 2)),
        (RANKS | MANY | {"TINY_BF16": "1", "TINY_DISTOPT": "1"}, ("1 2 1", 4), ("2 1 1", 2)),
    ],
)
def test_what_megatron_saves_by_buckets_or_by_ranks_is_read_in_any_layout(tmp_path, settings, one, two):
    run(one[1], "save", tmp_path / "megatron", tmp_path / "first", TINY_LAYOUT=one[0], **settings)
    assert opening.verify(tmp_path / "megatron")[1] == []
    run(two[1], "begin", tmp_path / "megatron", tmp_path / "second", TINY_LAYOUT=two[0], **settings)
    same(tmp_path / "first", tmp_path / "second")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("settings", "one", "two"),
    [
        (BUCKETS, ("2 1 1", 4), ("1 2 1", 2)),
        (RANKS, ("1 2 1", 4), ("2 1 1", 2)),
        (RANKS | {"TINY_DISTOPT": "1"}, ("1 1 1", 2), ("1 1 1", 2)),
    ],
)
def test_a_session_that_begins_there_has_the_losses_of_megatron_going_on_by_itself(tmp_path, settings, one, two):
    """fp32: another layout sums in another order."""
    run(one[1], "save", tmp_path / "megatron", tmp_path / "first", TINY_LAYOUT=one[0], SAVES_MORE="3", **settings)
    kept = [torch.load(path, weights_only=False)["losses"] for path in sorted((tmp_path / "first").glob("[0-9]*.pt"))]
    theirs = [[loss for rank in kept for loss in rank[number]] for number in range(3)]
    tensor, pipeline, _ = map(int, two[0].split())
    told = {"TINY_LAYOUT": two[0], "TINY_ITERATIONS": "5", "TINY_BEGIN": str(tmp_path / "megatron")}
    told["TINY_CHECKPOINTS"] = str(tmp_path / "saves")
    (out := tmp_path / "session").mkdir()
    Ranks(out, two[1], [], fork=True, replica=tensor * pipeline, **settings | told).drive()
    found = proof.losses(out)
    assert sorted(found) == [2, 3, 4]
    for number, losses in enumerate(theirs):
        (mine,) = found[2 + number]  # all ranks say one
        assert mine == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.mark.wide
def test_buckets_that_hold_experts_are_left_out_only_if_one_says_so(tmp_path):
    settings = SHARDED | {"TINY_EXPERTS": "aux_loss", "SAVES_SHARDING": "dp_reshardable"}
    run(1, "save", tmp_path / "megatron", tmp_path / "first", **settings)
    index = opening.index_of(tmp_path / "megatron")
    assert "--dist-ckpt-optim-fully-reshardable" in index.common.unread and not index.has_optimizer()
    with pytest.raises(BadCheckpoint, match="or give --no-load-optim"):
        foreign.found_in(tmp_path / "megatron", foreign.Selection())
    assert foreign.found_in(tmp_path / "megatron", foreign.Selection(optimizer=False)).iteration == index.iteration


@pytest.mark.wide
def test_a_model_of_hugging_faces_has_the_same_logits_here_and_the_same_bytes_when_it_goes_out(tmp_path):
    told = os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(SUPPORT / "llama.py"), str(tmp_path)]
    done = subprocess.run(words, env=told, timeout=LIMIT, check=True, capture_output=True, text=True)
    assert "config.json" not in done.stderr, "it says what is so here"
    logits = torch.load(tmp_path / "logits.pt")
    assert logits["theirs"].abs().max() > 1
    assert (logits["mine"] - logits["theirs"]).abs().max() < 1e-5
    config = tmp_path / "theirs" / "config.json"
    convert.export(opening.index_of(tmp_path / "saves"), tmp_path / "back", "safetensors", "llama", config)
    theirs, back = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "back"))
    assert theirs.keys() == back.keys() and len(theirs) > 30
    assert [name for name in theirs if not torch.equal(theirs[name], back[name])] == []
    assert config.read_bytes() == (tmp_path / "back" / "config.json").read_bytes()
