"""The options of train_gpt.py: Megatron's names, and one clear line for what does not fit together."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sbatch_templates import gpt_options
from sbatch_templates.gpt_options import parse, stage_layers, virtual_stages
from tests.support.processes import LIMIT


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    """Datasets in the present folder: one that looks like one, and one that does not."""
    for name, index in (("text", gpt_options.INDEX_MAGIC), ("broken", b"text")):
        (tmp_path / f"{name}.bin").touch()
        (tmp_path / f"{name}.idx").write_bytes(index + b"and so on")
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "UNICRON_AGENT", "UNICRON_LAYOUT"):
        monkeypatch.delenv(name, raising=False)


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(list(arguments))
    line = capsys.readouterr().err
    assert ended.value.code == 2 and line.startswith("train_gpt: ") and line.count("\n") == 1, line
    return line


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--data-path /nowhere/data", "no dataset at /nowhere/data.idx"),
        ("--data-path broken", "is not a Megatron index"),
        ("", "--data-path"),
        ("--data-path text --hidden-size 100 --num-attention-heads 3", "not a multiple"),
        ("--data-path text --micro-batches 0", "--micro-batches: 0 is below 1"),
        ("--data-path text --lr fast", "--lr: fast is not a number"),
        ("--data-path text --train-iterations 5 --warmup 5", "must be below --train-iterations 5"),
        ("--data-path text --min-lr 1", "--min-lr 1 is above"),
        ("--data-path text --no-such-option", "unrecognized arguments"),
    ],
)
def test_bad_input_is_one_clear_line(capsys, options, says):
    assert says in refused(capsys, *options.split())


TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
PER_STAGE, PER_RANK = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (f"{TP} 3", "--num-attention-heads 4 is not a multiple of --tensor-model-parallel-size 3"),
        (f"{PP} 3", "--num-layers 4 cannot be shared out evenly over 3 of 3 pipeline stages"),
        (f"{PP} 2 {FIRST} 5", "cannot be shared out"),
        (f"{PP} 4 {FIRST} 2", "2 layers, cannot be shared out evenly over 3 of 4 pipeline stages"),
        (f"{PP} 2 {FIRST} 2 {LAST} 1", "over 0 of 2 pipeline stages"),
        (f"{FIRST} 2", f"need {PP} 2 or more"),
        (f"{PER_STAGE} 1", f"{PER_STAGE} needs {PP} 2 or more"),
        (f"{PP} 2 {PER_STAGE} 3", f"a pipeline stage of 2 layers is not a multiple of {PER_STAGE} 3"),
        (f"{PP} 2 {PER_RANK} 4", f"is not a multiple of {PER_RANK} 4"),
        (f"{PP} 2 {PER_STAGE} 1 {PER_RANK} 2", "give one of"),
        (f"{PP} 2 {FIRST} 1 {PER_STAGE} 1", f"use {PER_RANK}"),
        ("--context-parallel-size 2", "--context-parallel-size: Megatron's own attention"),
        ("--sequence-parallel", f"--sequence-parallel needs {TP} 2"),
        (f"--sequence-parallel {TP} 2", "needs the layer norms of Apex, which is not installed"),
        ("--overlap-param-gather --overlap-grad-reduce", "needs --use-distributed-optimizer"),
        ("--overlap-param-gather --use-distributed-optimizer", "needs --overlap-grad-reduce"),
        ("--use-distributed-optimizer --optimizer sgd", "leave --optimizer sgd out"),
        ("--recompute-granularity full", "needs --recompute-method and --recompute-num-layers"),
        ("--recompute-method uniform", "are for --recompute-granularity full"),
        ("--attention-dropout 1", "--attention-dropout 1 must be below 1"),
        ("--expert-model-parallel-size 2", "--expert-model-parallel-size: every rank has all experts here"),
        ("--expert-tensor-parallel-size 2", "--expert-tensor-parallel-size: experts need"),
        ("--num-experts 1", "--num-experts: 1 is below 2"),
        ("--num-experts 4 --moe-router-topk 5", "--moe-router-topk 5 is above --num-experts 4"),
        (f"--num-experts 4 {TP} 2", f"use {PP}"),
        ("--moe-aux-loss-coeff 0.1", "--moe-aux-loss-coeff needs --num-experts"),
        ("--moe-router-enable-expert-bias", "--moe-router-enable-expert-bias needs --num-experts"),
        ("--num-experts 4 --moe-router-enable-expert-bias", "needs --moe-router-score-function sigmoid"),
        ("--num-experts 4 --moe-router-load-balancing-type global_aux_loss", "invalid choice: 'global_aux_loss'"),
        (
            "--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1",
            "--moe-aux-loss-coeff is not for --moe-router-load-balancing-type sinkhorn",
        ),
        (f"--mtp-num-layers 1 {PP} 2", "needs --untie-embeddings-and-output-weights"),
        ("--fp16 --bf16", "give one of --fp16 and --bf16"),
        ("--loss-scale 1024", "--loss-scale is for --fp16"),
        ("--fp16 --initial-loss-scale 2 --min-loss-scale 4", "--min-loss-scale is above --initial-loss-scale"),
        ("--fp8-format hybrid", "--fp8-format: fp8 needs Transformer Engine"),
    ],
)
def test_a_layout_that_cannot_be_is_one_clear_line(capsys, options, says):
    assert says in refused(capsys, "--data-path", "text", *options.split())


def test_ranks_that_are_no_whole_replicas_are_refused_where_their_number_is_known(capsys, monkeypatch):
    words = ["--data-path", "text", TP, "2", PP, "2"]
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert "6 ranks are no multiple" in refused(capsys, *words)
    monkeypatch.setenv("UNICRON_AGENT", "ipc:///agent")  # who is there changes all the time
    assert parse(words).tensor_model_parallel_size == 2


@pytest.mark.parametrize(
    ("options", "layers", "chunks"),
    [
        ("", [4], None),
        (f"{PP} 2", [2, 2], None),
        (f"{PP} 2 {PER_STAGE} 1", [2, 2], 2),
        (f"{PP} 2 {PER_STAGE} 2", [2, 2], None),
        (f"{PP} 2 {FIRST} 3", [3, 1], None),
        (f"{PP} 2 {FIRST} 3 {LAST} 1", [3, 1], None),
        (f"{PP} 3 --num-layers 10 {FIRST} 2 {LAST} 4 {PER_RANK} 2", [2, 4, 4], 2),
    ],
)
def test_layers_and_chunks_of_the_stages(options, layers, chunks):
    found = parse(["--data-path", "text", *options.split()])
    assert (stage_layers(found), virtual_stages(found)) == (layers, chunks)


def test_nothing_slow_is_imported_for_it():
    code = "import sys, gpt_options; sys.exit(bool({'torch', 'megatron', 'numpy'} & set(sys.modules)))"
    folder = gpt_options.__file__.rpartition("/")[0]
    assert subprocess.run([sys.executable, "-c", code], cwd=folder, timeout=LIMIT).returncode == 0


def test_the_layout_that_the_job_is_told_wins_over_the_command_line(capsys, monkeypatch):
    words = ["--data-path", "text", TP, "4", PP, "2", FIRST, "1"]
    monkeypatch.setenv("UNICRON_LAYOUT", "TP2")
    found = parse(words)
    assert (found.tensor_model_parallel_size, stage_layers(found), virtual_stages(found)) == (2, [4], None)
    monkeypatch.setenv("UNICRON_LAYOUT", "PP2 VPP2")
    found = parse(["--data-path", "text", TP, "2"])
    assert (found.tensor_model_parallel_size, stage_layers(found), virtual_stages(found)) == (1, [2, 2], 2)
    monkeypatch.setenv("UNICRON_LAYOUT", "TP3")
    assert "not a multiple" in refused(capsys, "--data-path", "text")
