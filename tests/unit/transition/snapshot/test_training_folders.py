"""Folders and files as training libraries leave them, and what stands where weights should be. What each library
writes is in docs/behaviour/checkpoint-layouts.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from tests.support.texts import masked, raises_text
from unicron_transition.snapshot.checkpoint import CheckpointError, Checkpoints
from unicron_transition.snapshot.formats import beside, convert, opening
from unicron_transition.snapshot.formats.index import BadCheckpoint, some
from unicron_transition.snapshot.migrate import TrainingState

WEIGHTS = {"weight": torch.arange(4.0).reshape(2, 2), "bias": torch.ones(2)}
STATES = "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state_0.pth", "rng_state_1.pth", "training_args.bin"


def trainer(folder: Path, step: object = 1000, names: tuple[str, ...] = STATES) -> Path:
    """As transformers' Trainer writes it."""
    folder.mkdir(parents=True)
    save_file(WEIGHTS, folder / "model.safetensors", metadata={"format": "pt"})
    for name in names:
        torch.save({"state": {}}, folder / name)
    history = [{"epoch": 0.5, "global_step": 7, "step": 1}]
    told = {"best_global_step": 500, "epoch": 1.0, "global_step": step, "log_history": history}
    (folder / "trainer_state.json").write_text(json.dumps(told, indent=2, sort_keys=True))
    return folder


def fresh() -> TrainingState:
    model = torch.nn.Linear(2, 2)
    return TrainingState([model], torch.optim.AdamW(model.parameters()), None)


def test_a_trainers_folder_has_its_iteration_and_says_what_is_not_read(tmp_path):
    """Defect: iteration 0, and no word of the optimizer's state."""
    folder = trainer(tmp_path / "checkpoint-1000")
    (folder / "global_step1000").mkdir()
    (folder / "pytorch_model_fsdp_0").mkdir()
    (folder / "optimizer_0").mkdir()
    index = opening.index_of(folder)
    assert (index.format, index.iteration, len(index.tensors)) == ("safetensors", 1000, 2)
    line = next(line for line in index.common.losses() if line.startswith("left out"))
    names = "global_step1000 optimizer.pt optimizer_0 pytorch_model_fsdp_0 rng_state_*.pth scaler.pt scheduler.pt"
    assert all(name in line for name in names.split()) and "2 of them" in line and "training_args" not in line
    assert opening.index_of(folder / "model.safetensors").iteration == 1000


def test_a_training_does_not_begin_without_the_optimizers_state_unless_it_is_told_to(tmp_path, snapshot):
    folder = trainer(tmp_path / "checkpoint-1000")
    with raises_text(CheckpointError, snapshot, tmp_path):
        Checkpoints(tmp_path / "new", begin_from=folder).load(fresh())
    state = fresh()
    assert Checkpoints(tmp_path / "new", begin_from=folder, begin_with="model").load(state) == 0
    assert torch.equal(state.model[0].weight.data, WEIGHTS["weight"])


def test_a_model_without_states_has_no_line(tmp_path):
    folder = trainer(tmp_path / "model", names=("training_args.bin", "pytorch_model.bin"))
    (folder / "trainer_state.json").unlink()
    index = opening.index_of(folder)
    assert (index.iteration, index.common.losses()) == (0, [])


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", '{"global_step": 5', "[]", '{"epoch": 1.0}', '{"global_step": "5"}', "\0" * 9),
        *(json.dumps({"global_step": step}) for step in (-1, True, None, 1.5, 10**16, {"global_step": 5})),
    ],
)
def test_a_damaged_state_or_one_without_an_iteration_is_a_line(tmp_path, text):
    folder = trainer(tmp_path / "checkpoint-5")
    (folder / "trainer_state.json").write_text(text)
    index = opening.index_of(folder)
    assert index.iteration == 0 and len(index.tensors) == 2
    assert sum("trainer_state.json is damaged" in line for line in index.common.losses()) == 1


def test_a_state_that_cannot_be_read_is_a_line(tmp_path, snapshot):
    folder = trainer(tmp_path / "checkpoint-5")
    (folder / "trainer_state.json").write_text(LFS)
    assert masked(opening.index_of(folder).common.doubt, tmp_path) == snapshot


def test_a_long_history_is_not_read(tmp_path):
    folder = trainer(tmp_path / "checkpoint-5")
    told = json.loads((folder / "trainer_state.json").read_text())
    told["log_history"] = [{"epoch": 0.5, "loss": 1.0, "learning_rate": 1e-3, "step": n} for n in range(200_000)]
    text = json.dumps(told, indent=2, sort_keys=True)
    assert len(text) > 10 * beside.MOST
    (folder / "trainer_state.json").write_text(text)
    index = opening.index_of(folder)
    assert index.iteration == 1000 and not index.common.doubt
    (folder / "trainer_state.json").write_text(text[: len(text) // 2])
    assert "damaged" in opening.index_of(folder).common.doubt


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ('{"global_step": 5, "x": "PAD"}', 5),
        ('{"x": "PAD", "global_step": 5}', 0),
        ('{"x": {"global_step": 3}, "y": "PAD", "global_step": 5}', 0),
        ('{"log_history": [{"global_step": 3}], "x": "PAD"}', 0),
    ],
)
def test_a_long_state_of_another_form_is_right_or_a_line(tmp_path, text, step):
    folder = trainer(tmp_path / "checkpoint-5")
    (folder / "trainer_state.json").write_text(text.replace("PAD", "y" * (beside.MOST + 1)))
    index = opening.index_of(folder)
    assert index.iteration == step and ("damaged" in index.common.doubt) == (step == 0)


def test_a_folder_of_accelerate_says_that_no_iteration_is_known(tmp_path, snapshot):
    """Its `step` counts only within an epoch, and its schedules one step for each process."""
    folder = trainer(tmp_path / "checkpoint_3", names=("optimizer.bin", "scheduler.bin", "random_states_0.pkl"))
    (folder / "trainer_state.json").unlink()
    index = opening.index_of(folder)
    assert index.iteration == 0
    assert masked("\n".join(index.common.losses()), tmp_path) == snapshot


def test_what_accelerate_saves_of_fsdp_has_the_trainers_iteration(tmp_path, snapshot):
    folder = trainer(tmp_path / "checkpoint-20", 20)
    (folder / "model.safetensors").unlink()
    dcp.save({"optimizer": {"x": torch.ones(1)}}, checkpoint_id=folder / "optimizer_0", no_dist=True)
    dcp.save({"model": WEIGHTS}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        opening.index_of(folder)
    index = opening.index_of(folder / "pytorch_model_fsdp_0")
    (folder / "optimizer.pt").unlink()
    alone = opening.index_of(folder / "pytorch_model_fsdp_0").common
    assert alone.unread == snapshot
    assert index.iteration == 20 and "optimizer.pt, optimizer_0," in index.common.left[-1]
    assert "pytorch_model_fsdp_0" not in index.common.left[-1]


def test_a_folder_of_nemo_has_its_iteration(tmp_path, snapshot):
    folder = tmp_path / "step=7" / "weights"
    dcp.save(WEIGHTS, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    torch.save({"epoch": 0, "global_step": 7, "state_dict": {}, "loops": {"a": 1}}, folder / "common.pt")
    index = opening.index_of(folder)
    assert (index.format, index.iteration, index.common.losses()) == ("torch_dist", 7, [])
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        opening.index_of(folder.parent)


# ------------------------------------------------------------ files of torch.save
def of_lightning(path: Path, **more: object) -> Path:
    """As Lightning 2 writes it."""
    told = {"epoch": 0, "global_step": 5, "pytorch-lightning_version": "2.6", "state_dict": WEIGHTS, "loops": {"a": 1}}
    torch.save(told | {"optimizer_states": [{"state": {}}], "lr_schedulers": []} | more, path)
    return path


def test_a_file_of_lightning_has_its_iteration_and_weights(tmp_path, snapshot):
    path = of_lightning(tmp_path / "epoch=0-step=5.ckpt")
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        opening.index_of(tmp_path)
    index = opening.index_of(path)
    assert (index.format, index.iteration, sorted(index.tensors)) == ("torch", 5, ["bias", "weight"])
    assert index.common.losses() == snapshot
    convert.export(index, tmp_path / "out", "safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], each) for name, each in WEIGHTS.items())


def test_what_lightning_saves_of_a_cut_model_has_its_iteration(tmp_path):
    folder = tmp_path / "epoch=0-step=5.ckpt"
    dcp.save({"model": WEIGHTS}, checkpoint_id=folder, no_dist=True)
    torch.save({"global_step": 5, "loops": {}}, folder / "meta.pt")
    index = opening.index_of(folder)
    assert (index.iteration, index.common.unread, index.common.doubt) == (5, "", "")
    torch.save({"global_step": torch.tensor(6)}, folder / "meta.pt")
    assert opening.index_of(folder).iteration == 6
    torch.save([], folder / "meta.pt")
    index = opening.index_of(folder)
    assert index.iteration == 0 and "meta.pt is damaged" in index.common.doubt


def test_a_file_of_lightning_without_an_iteration_says_so(tmp_path):
    index = opening.index_of(of_lightning(tmp_path / "a.ckpt", global_step=None))
    assert index.iteration == 0 and "a.ckpt: global_step is None" in index.common.doubt
    assert opening.index_of(of_lightning(tmp_path / "b.ckpt", global_step=torch.tensor(9))).iteration == 9


def test_one_file_of_metas_is_read(tmp_path, snapshot):
    """Defect: "no whole checkpoint of a format that is known"."""
    folder = tmp_path / "llama" / "original"
    folder.mkdir(parents=True)
    torch.save({"layers.0.attention.wq.weight": WEIGHTS["weight"].bfloat16()}, folder / "consolidated.00.pth")
    (folder / "params.json").write_text(json.dumps({"dim": 2, "n_heads": 1}))
    for at in (folder, folder / "consolidated.00.pth"):
        index = opening.index_of(at)
        assert (index.format, list(index.tensors), index.common.losses()) == (
            "torch",
            ["layers.0.attention.wq.weight"],
            [],
        )
    with pytest.raises(BadCheckpoint, match=r": unicronctl checkpoint show .*/original$"):
        opening.index_of(folder.parent)
    torch.save(WEIGHTS, folder / "consolidated.01.pth")
    for at in (folder, folder / "consolidated.00.pth", folder / "consolidated.01.pth"):
        with raises_text(BadCheckpoint, snapshot, tmp_path):
            opening.index_of(at)
    (folder / "consolidated.00.pth").unlink()
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        opening.index_of(folder)
    save_file(WEIGHTS, folder / "model.safetensors")
    assert opening.index_of(folder).format == "safetensors"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hf_model_0001_0.pt", "hf_model_0001_0.pt is a file of torch.save.*model.safetensors"),
        ("mp_rank_00_model_states.pt", "is of DeepSpeed, and no state of ZeRO .* zero_to_fp32.py makes nothing of it"),
        ("zero_to_fp32.py", "DeepSpeed: `python zero_to_fp32.py FOLDER OUT --safe_serialization`"),
        ("pytorch_model_fsdp.bin", "is a pickle of Accelerate"),
        ("pytorch_model.fp16.bin", "is a variant, .*: name the variant"),
        ("ckpt.pt", "ckpt.pt is a file of torch.save: name the file itself"),
        ("adapter_model.bin", "is an adapter, and no whole model"),
        ("model.nemo", "is an archive of NeMo: unpack it"),
    ],
)
def test_other_files_of_weights_are_named_with_what_to_do(tmp_path, name, says):
    torch.save(WEIGHTS, tmp_path / name)
    with pytest.raises(BadCheckpoint, match=says) as refused:
        opening.index_of(tmp_path)
    assert "\n" not in str(refused.value)


NO_MODEL = [
    *(("consolidated.00.pth", content) for content in ([1], {"a": 1}, {}, {1: torch.ones(1)})),
    *((name, WEIGHTS) for name in ("optimizer.pt", "a.ckpt", "a.bin", "a.pth", "random_states_0.pkl")),
    *(("a.pt", {"model": content}) for content in ({"a": 1}, [1], {"a": WEIGHTS})),
    ("a.pt", {"model": WEIGHTS, "state_dict": WEIGHTS}),
    ("mp_rank_00/model_optim_rng.pt", {"model": WEIGHTS, "iteration": 5}),
    ("model_rank_0.pt", {"model": WEIGHTS}),
    ("b.pt", {"model": WEIGHTS, "checkpoint_version": 3.0, "iteration": 5}),
    ("adapter_model.bin", {"a.lora_A.weight": torch.ones(1)}),
]


@pytest.mark.parametrize(("name", "content"), NO_MODEL, ids=[f"{n}-{name}" for n, (name, _) in enumerate(NO_MODEL)])
def test_a_file_of_torch_that_is_no_whole_model_is_refused_with_what_to_do(tmp_path, name, content, snapshot):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    torch.save(content, path)
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        opening.index_of(path)


def of_a_script(path: Path, model: str, optimizer: str, **counts: object) -> Path:
    """As nanoGPT, minGPT's kin and many scripts write it, under torch.compile."""
    module = fresh().model[0]
    stepped = torch.optim.AdamW(module.parameters())
    module(torch.ones(2)).sum().backward()
    stepped.step()
    weights = {f"_orig_mod.{name}": each for name, each in WEIGHTS.items()}
    more = {"x\n": 1, "best_val_loss": torch.tensor(1.5), "config": {"compile": True}}
    torch.save({model: weights, optimizer: stepped.state_dict()} | counts | more, path)
    return path


@pytest.mark.parametrize(
    ("model", "optimizer", "counts", "iteration", "doubt"),
    [
        ("model", "optimizer", {"iter_num": 2000}, 2000, ""),
        ("state_dict", "optimizer", {"step": torch.tensor(7), "epoch": 1}, 7, ""),
        ("model_state_dict", "optimizer_state_dict", {"iteration": 5, "global_step": 5}, 5, ""),
        ("model", "optim", {"global_step": 90, "step": 3}, 90, "global_step is 90, step is 3: the first counts"),
        ("model", "optim", {"epoch": 3}, 0, "nothing in it says after how many iterations it was saved"),
        ("model", "optim", {"step": "7"}, 0, "step is '7': this counts as iteration 0"),
    ],
)
def test_a_file_of_a_training_script_has_its_iteration_and_weights(
    tmp_path, model, optimizer, counts, iteration, doubt, snapshot
):
    """Defect: `save its weights as model.safetensors`, for files that say what is the model."""
    path = of_a_script(tmp_path / "ckpt.pt", model, optimizer, **counts)
    index = opening.index_of(path)
    assert (index.format, index.iteration) == ("torch", iteration)
    assert sorted(index.tensors) == ["_orig_mod.bias", "_orig_mod.weight"]
    assert doubt in index.common.doubt and bool(doubt) == bool(index.common.doubt)
    assert index.common.unread.startswith(f"{optimizer!r} in ckpt.pt: numbers")
    others = ["'epoch'"] * ("epoch" in counts) + [r"'x\n'", "'best_val_loss'", "'config'"]
    assert [f" ({some(others)})" in line for line in index.common.left] == [True]
    with raises_text(CheckpointError, snapshot, tmp_path):
        Checkpoints(tmp_path / "new", begin_from=path).load(fresh())
    state = fresh()
    Checkpoints(tmp_path / "new", begin_from=path, begin_with="model").load(state)
    assert torch.equal(state.model[0].weight.data, WEIGHTS["weight"])


def test_nothing_in_a_file_of_a_script_is_executed(tmp_path, snapshot):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    torch.save({"model": WEIGHTS, "iter_num": 1, "config": Trap()}, tmp_path / "ckpt.pt")
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        opening.index_of(tmp_path / "ckpt.pt")
    assert not (tmp_path / "executed").exists()


# ------------------------------------------------------------ in the place of a file
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "4d7a" * 16 + "\nsize 4976698672\n"
INSTEAD = {
    LFS: "a Git LFS pointer: fetch the file with `git lfs pull`",
    LFS.replace("git-lfs", "hawser"): "a Git LFS pointer",
    "/annex/objects/SHA256E-s104857600--4d7a.safetensors\n": "git-annex: fetch the file with `git annex get`",
    "# xet version 0\nfilesize = 4976698672\nhash = '4d7a'\n": "git-xet: fetch the file with `git xet materialize`",
    "\n<!DOCTYPE html>\n<html class=''><title>Log in</title>" + "<p>" * 30_000: "page of a web server",
    "<html><body>403</body></html>": "page of a web server",
    '<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>': "page of a web server",
}
PLACES = (
    "model.safetensors",
    "weights.safetensors",
    "model.safetensors.index.json",
    "consolidated.00.pth",
    "a.ckpt",
    ".metadata",
    "mp_rank_00/model_optim_rng.pt",
    "config.json",
)


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("text", INSTEAD, ids=lambda text: re.sub(r"\W+", "-", text[:20]))
def test_what_stands_in_the_place_of_a_file_is_named(tmp_path, name, text):
    """Defect: "not a file of safetensors", and nothing that says what to do."""
    at = tmp_path / name
    at.parent.mkdir(exist_ok=True)
    if at.suffix == ".json":
        save_file(WEIGHTS, tmp_path / ("model.safetensors" if "index" not in name else "model-1-of-1.safetensors"))
    at.write_text(text)
    with pytest.raises(BadCheckpoint, match=f"{re.escape(name)}: this is .*{re.escape(INSTEAD[text])}"):
        opening.index_of(at if name == "a.ckpt" else tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "consolidated.00.pth"])
@pytest.mark.parametrize(
    "text", ["Entry not found", '{"error":"Repository not found"}', "Access is restricted.\nLog in"]
)
def test_a_servers_answer_in_the_place_of_a_file_is_quoted(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(BadCheckpoint, match=f"but a text: .{re.escape(text.splitlines()[0])}"):
        opening.index_of(tmp_path)
    (tmp_path / name).write_bytes(bytes(30))
    with pytest.raises(BadCheckpoint) as refused:
        opening.index_of(tmp_path)
    assert "but a text" not in str(refused.value)


def test_a_shard_that_is_a_pointer_or_a_broken_link_is_named(tmp_path, snapshot):
    folder = trainer(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {name: f"model-0000{n}-of-00002.safetensors" for n, name in ((1, "weight"), (2, "bias"))}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-00002-of-00002.safetensors").write_text(LFS)
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        opening.index_of(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    (folder / "model-00002-of-00002.safetensors").symlink_to("../.git/annex/objects/aB/Cd/KEY/KEY")
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        opening.index_of(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    (folder / "model-00002-of-00002.safetensors").symlink_to("../../blobs/4d7a")
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        opening.index_of(folder)
