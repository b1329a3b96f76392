"""Folders of checkpoints: the newest whole one is named, and why newer ones are not whole. What each library writes is
in docs/behaviour/checkpoint-layouts.md."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.support.texts import masked, raises_text
from unicron_transition.snapshot.formats import below, opening
from unicron_transition.snapshot.formats.index import BadCheckpoint

WEIGHTS = {"weight": torch.arange(4.0).reshape(2, 2), "bias": torch.ones(2)}


def hugging_face(folder: Path, **more: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(WEIGHTS, folder / "model.safetensors")
    for name, text in more.items():
        (folder / name).write_text(text)
    return folder


def shards(folder: Path, there: tuple[int, ...]) -> Path:
    folder.mkdir(parents=True)
    parts = {name: f"model-0000{n}-of-00002.safetensors" for n, name in enumerate(WEIGHTS, 1)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    for number, (name, file) in enumerate(parts.items(), 1):
        if number in there:
            save_file({name: WEIGHTS[name]}, folder / file)
    return folder


def of_dcp(folder: Path, whole: bool = True) -> Path:
    dcp.save({"model": WEIGHTS}, checkpoint_id=folder, no_dist=True)
    if not whole:
        (folder / ".metadata").unlink()
    return folder


def lightning(path: Path, step: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"pytorch-lightning_version": "2.6.6", "global_step": step, "state_dict": WEIGHTS}, path)
    return path


def touch(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


def titan(run: Path) -> tuple[Path, dict[str, str]]:
    of_dcp(run / "outputs/checkpoint/step-1500", whole=False)
    of_dcp(run / "outputs/checkpoint/step-500")
    why = "no .metadata: its saving was not finished"
    return of_dcp(run / "outputs/checkpoint/step-1000"), {"step-1500": why}


def lightnings(run: Path) -> tuple[Path, dict[str, str]]:
    folder = run / "lightning_logs/version_0/checkpoints"
    last = lightning(folder / "last.ckpt", 2500)
    lightning(folder / "epoch=3-step=2000.ckpt", 2000)
    os.utime(last, (1, 1))  # as a copy has it
    touch(run / "lightning_logs/version_0", "hparams.yaml", "metrics.csv")
    return last, {}


def lightning_whose_last_is_older(run: Path) -> tuple[Path, dict[str, str]]:
    lightning(run / "checkpoints/last.ckpt", 900)
    return lightning(run / "checkpoints/epoch=3-step=2000.ckpt", 2000), {}


def lightning_cut(run: Path) -> tuple[Path, dict[str, str]]:
    cut = lightning(run / "checkpoints/epoch=4-step=2500.ckpt", 2500)
    cut.write_bytes(cut.read_bytes()[:500])
    return lightning(run / "checkpoints/epoch=3-step=2000.ckpt", 2000), {cut.name: "not an archive of torch.save"}


def versions(run: Path) -> tuple[Path, dict[str, str]]:
    for version in (9, 11):
        lightning(run / f"lightning_logs/version_{version}/checkpoints/epoch=0-step=5.ckpt", 5)
    return lightning(run / "lightning_logs/version_11/checkpoints/epoch=1-step=10.ckpt", 10), {}


def trainer(run: Path) -> tuple[Path, dict[str, str]]:
    hugging_face(run / "checkpoint-500")
    shards(run / "checkpoint-1500", (1,))
    hugging_face(run / "tmp-checkpoint-2000")
    unfinished = {"checkpoint-1500": "model-00002-of-00002.safetensors", "tmp-checkpoint-2000": "not finished"}
    return shards(run / "checkpoint-1000", (1, 2)), unfinished


def adapters(run: Path) -> tuple[Path, dict[str, str]]:
    folder = touch(run / "checkpoint-90")
    save_file({"x.lora_A.weight": torch.ones(1)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    return hugging_face(run / "checkpoint-80"), {"checkpoint-90": "is an adapter, and no whole model"}


def accelerate(run: Path) -> tuple[Path, dict[str, str]]:
    for number in (2, 9):
        hugging_face(run / f"checkpoints/checkpoint_{number}")
    return hugging_face(run / "checkpoints/checkpoint_10"), {}


def trained_to_the_end(run: Path) -> tuple[Path, dict[str, str]]:
    """The step of a name without one is in its files, whatever its time says."""
    final = hugging_face(run / "final", **{"trainer_state.json": json.dumps({"global_step": 700})})
    hugging_face(run / "checkpoint-500")
    os.utime(final, (1, 1))
    return final, {}


def megatron(run: Path) -> tuple[Path, dict[str, str]]:
    of_dcp(run / "iter_0000200", whole=False)
    of_dcp(run / "iter_0000090")
    return of_dcp(run / "iter_0000100"), {"iter_0000200": "no .metadata"}


def tracked(run: Path) -> tuple[Path, dict[str, str]]:
    """Defect: "write the number of another one", and not which."""
    newest, why = megatron(run)
    (run / "latest_checkpointed_iteration.txt").write_text("200")
    return newest, why


def deepspeed(run: Path) -> tuple[Path, dict[str, str]]:
    three = ("zero_pp_rank_0_mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    touch(run / "checkpoint-200/global_step200", *three)
    touch(run / "checkpoint-200", "zero_to_fp32.py", "latest").joinpath("latest").write_text("global_step200")
    return hugging_face(run / "checkpoint-100"), {"checkpoint-200": "DeepSpeed, ZeRO stage 3: `python "}


def nemo(run: Path) -> tuple[Path, dict[str, str]]:
    for step in (100, 90):
        of_dcp(run / f"checkpoints/gpt--val_loss=2.35-step={step}-consumed_samples=800.0/weights")
    of_dcp(run / "checkpoints/gpt--val_loss=1.10-step=150-consumed_samples=900.0/weights")
    touch(run / "checkpoints", "gpt--val_loss=1.10-step=150-consumed_samples=900.0-unfinished")
    newest = of_dcp(run / "checkpoints/gpt--val_loss=2.35-step=120-consumed_samples=850.0-last/weights")
    return newest, {"step=150-consumed_samples=900.0 ": "-unfinished is beside it: its saving was not finished"}


def torchtune(run: Path) -> tuple[Path, dict[str, str]]:
    touch(run / "epoch_11", "hf_model_0001_0.pt")
    hugging_face(run / "epoch_2")
    return hugging_face(run / "epoch_10"), {"epoch_11": "hf_model_0001_0.pt is a file of torch.save"}


def olmo(run: Path) -> tuple[Path, dict[str, str]]:
    of_dcp(run / "step2000-tmp/model_and_optim")
    of_dcp(run / "step990/model_and_optim")
    return of_dcp(run / "step1000/model_and_optim"), {"step2000-tmp": "not finished"}


def veomni(run: Path) -> tuple[Path, dict[str, str]]:
    for part in ("model", "optimizer"):
        of_dcp(run / "global_step_200" / part, whole=False)
    return of_dcp(run / "global_step_100/model"), {"global_step_200/model": "no .metadata"}


def automodel(run: Path) -> tuple[Path, dict[str, str]]:
    touch(run / "epoch_0_step_19/model", "shard-00001-model-00001-of-00001.safetensors")
    hugging_face(run / "epoch_0_step_9/model/consolidated")
    return hugging_face(run / "epoch_0_step_19/model/consolidated"), {}


def verl(run: Path) -> tuple[Path, dict[str, str]]:
    """Its tracker is called as Megatron-LM's."""
    (touch(run) / "latest_checkpointed_iteration.txt").write_text("100")
    touch(run / "global_step_100/actor", "model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt")
    why = "is one rank's part, of verl: `python -m verl.model_merger merge`"
    return hugging_face(run / "global_step_90/actor/huggingface"), {"global_step_100/actor": why}


def by_loss(run: Path) -> tuple[Path, dict[str, str]]:
    """A loss is no step."""
    old = of_dcp(run / "checkpoints/gpt--reduced_train_loss=0.7-epoch=0/weights")
    os.utime(old.parent, (1, 1))
    return of_dcp(run / "checkpoints/gpt--reduced_train_loss=0.5-epoch=0-last/weights"), {}


MADE = [
    *(titan, lightnings, lightning_whose_last_is_older, lightning_cut, versions, trainer, adapters, accelerate),
    *(trained_to_the_end, megatron, tracked, deepspeed, nemo, torchtune, olmo),
    *(veomni, automodel, verl, by_loss),
]


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.__name__)
def test_each_folder_above_names_the_newest_whole_one_and_why_newer_ones_are_not(tmp_path, made):
    """Defect: nothing was said of those that are not whole, and one was named by the numbers in its name."""
    newest, unfinished = made(tmp_path / "a run")
    above = [folder for folder in newest.parents if folder.is_relative_to(tmp_path / "a run")]
    for folder in above:
        if re.search("step|epoch|--", str(folder.relative_to(tmp_path))):
            continue  # of this one checkpoint alone
        with pytest.raises(BadCheckpoint) as refused:
            opening.index_of(folder)
        said = str(refused.value)
        _, _, command = said.partition("the newest whole one below it: unicronctl checkpoint show ")
        assert command.startswith(shlex.quote(str(newest))) and "\n" not in said, said
        for name, why in unfinished.items():
            assert name in command and why in command.partition(name)[2], said
        assert ("newer ones" in said) == bool(unfinished)
    assert opening.index_of(newest).tensors


def test_one_that_is_not_finished_says_so_itself(tmp_path, snapshot):
    """Defect: "no whole checkpoint of a format that is known", and that another one has one."""
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        opening.index_of(of_dcp(tmp_path / "step-1500", whole=False))
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        opening.index_of(touch(tmp_path, "step-7-unfinished") and touch(tmp_path / "step-7", "a"))
    index = opening.index_of(hugging_face(tmp_path / "tmp-checkpoint-5"))
    assert "not finished" in index.common.doubt


def test_a_folder_with_none_that_is_whole_says_why(tmp_path, snapshot):
    of_dcp(tmp_path / "step-10", whole=False)
    shards(tmp_path / "step-20", (2,))
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        opening.index_of(tmp_path)


def test_what_has_nothing_to_do_with_checkpoints_is_not_told(tmp_path):
    touch(tmp_path / "logs", "a.txt", "profile.pt")
    touch(tmp_path / "tmp-files", "a")
    touch(tmp_path / "tmp.d")
    assert opening.hint(tmp_path) == ""


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"], "ZeRO stage 3"),
        (["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], "ZeRO stage 1 or 2"),
        (["mp_rank_00_model_states.pt"], "no state of ZeRO"),
        (["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], "no file of weights"),
    ],
)
def test_deepspeeds_stage_is_said_where_its_files_show_it(tmp_path, names, says):
    """Defect: zero_to_fp32.py was named with FOLDER and OUT, and no stage."""
    run = touch(tmp_path / "run", "zero_to_fp32.py")
    (run / "latest").write_text("global_step100\n")
    at = touch(run / "global_step100", *names)
    (run / "global_step20").mkdir()
    for folder in (run, at):
        said = opening.hint(folder)
        assert says in said or (folder == at and not any("model_states" in name for name in names)), said
        assert ("ZeRO stage" in says) == (f"`python {run}/zero_to_fp32.py {run} OUT -t global_step100 --safe" in said)
    (run / "zero_to_fp32.py").unlink()
    if "stage" in says:
        assert f"`python -m deepspeed.utils.zero_to_fp32 {run} OUT" in opening.hint(at)


def test_deepspeeds_latest_that_names_nothing_is_said(tmp_path, snapshot):
    run = touch(tmp_path, "zero_to_fp32.py")
    (run / "latest").write_text("global_step300")
    for step in (90, 100):
        (run / f"global_step{step}").mkdir()
    assert masked(opening.hint(run), tmp_path) == snapshot
    (run / "latest").write_text("../../etc")
    assert "/etc" not in opening.hint(run)


def test_no_more_is_looked_at_than_the_limits_say(tmp_path):
    for step in range(40):
        touch(tmp_path / f"step-{step}", "model.safetensors")
    opened: list[Path] = []
    found = below.Below(lambda path: opened.append(path) or opening.find(path))
    assert found.look_below(tmp_path) and found.cut and found.newest is None
    assert len(opened) == len(found.why_not) == below.MOST_TRIES
    found = below.Below(opening.find, _entries=20)
    assert found.look_below(tmp_path) and found.cut
    hugging_face(tmp_path / "deep" / "/".join("abcdef"))
    found = below.Below(opening.find)
    assert not found.look_below(tmp_path / "deep") and found.newest is None


def test_the_clock_ends_the_search_and_says_so(tmp_path):
    """Defect: files whose pickles take seconds each were all opened."""
    for step in (5, 6):
        shards(tmp_path / f"step-{step}", (1,))
    found = below.Below(opening.find, _until=0.0)
    assert found.look_below(tmp_path) and found.cut and list(found.why_not) == [tmp_path / "step-6"]


def test_a_folder_whose_name_is_no_line_is_not_named(tmp_path):
    hugging_face(tmp_path / "step-9\nstep-10")
    hugging_face(tmp_path / "step-8")
    assert opening.hint(tmp_path).endswith("/step-8")


def test_pipes_are_not_waited_for(tmp_path):
    for name in ("last.ckpt", "latest", "step-5/trainer_state.json", "step-5/model.safetensors", "x/meta.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name)
    assert "step-5 (model.safetensors: " in opening.hint(tmp_path)
