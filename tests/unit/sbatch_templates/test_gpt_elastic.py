"""The batch scripts, with an srun that only prints: what they would start with and without the plugin."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import sbatch_templates.train_gpt as train_gpt
from tests.support.processes import LIMIT

FOLDER = Path(train_gpt.__file__).parent
TEMPLATE = FOLDER / "gpt_elastic.sbatch"
ANY_SCRIPT = FOLDER / "array.sbatch"
MEGATRON_LM = FOLDER / "megatron_lm.sbatch"


@pytest.fixture
def start(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("srun", "unicron-agent"):
        (tools / name).write_text('#!/bin/sh\necho "$@"\necho "weight $UNICRON_WEIGHT"\n')
        (tools / name).chmod(0o755)

    def run(*arguments: str, file: Path = TEMPLATE, **environment: str) -> subprocess.CompletedProcess:
        slurm = {"SLURM_SUBMIT_DIR": str(FOLDER), "SLURM_ARRAY_JOB_ID": "7"}
        environment = {"PATH": f"{tools}:/usr/bin:/bin", **slurm, **environment}
        command = ["bash", str(file), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=tmp_path, env=environment)

    run.tools = tools
    return run


def test_without_the_plugin_the_agent_is_written_out(start):
    result = start("--data-path", "a b")
    assert result.stdout.splitlines() == [
        f"--cpu-bind=none unicron-agent run -- python {FOLDER}/train_gpt.py --metrics metrics/gpt-7 "
        "--save checkpoints/gpt-7 --data-path a b",
        "weight 1.0",
    ]


def test_with_the_plugin_srun_gets_the_training_command_alone(start):
    result = start(UNICRON="1", UNICRON_WEIGHT="2.5", SLURM_JOB_NAME="mine")
    assert result.stdout.splitlines() == [
        f"--cpu-bind=none python {FOLDER}/train_gpt.py --metrics metrics/mine-7 --save checkpoints/mine-7",
        "weight 2.5",
    ]


def test_a_named_agent_is_used(start):
    result = start(UNICRON_AGENT_COMMAND="unicron-agent run --controller tcp://c:1 --", UNICRON="1")
    assert "unicron-agent run --controller tcp://c:1 -- python" in result.stdout


def test_what_is_missing_is_one_clear_line(start):
    os.unlink(start.tools / "unicron-agent")
    agent, script = start(), start(UNICRON="1", SLURM_SUBMIT_DIR="/nowhere")
    assert (agent.returncode, script.returncode) == (2, 2)
    assert agent.stderr.startswith("gpt_elastic: unicron-agent not found") and agent.stderr.count("\n") == 1
    assert script.stderr.startswith("gpt_elastic: no /nowhere/train_gpt.py") and script.stderr.count("\n") == 1


def test_what_the_design_asks_of_the_job():
    words = {line.removeprefix("#SBATCH ") for line in TEMPLATE.read_text().splitlines() if line.startswith("#SBATCH ")}
    wanted = {"--nodes=1", "--exclusive", "--requeue", "--open-mode=append", "--array=0-3"}
    assert wanted <= words


def test_any_script_runs_the_words_after_the_file_under_the_agent(start, snapshot):
    words = ["python", "train.py", "--text", "a  b"]
    assert start(*words, file=ANY_SCRIPT).stdout.splitlines()[0] == (
        "--cpu-bind=none unicron-agent run -- python train.py --text a  b"
    )
    assert start(*words, file=ANY_SCRIPT, UNICRON="1").stdout.startswith("--cpu-bind=none python train.py")
    nothing = start(file=ANY_SCRIPT)
    assert (nothing.returncode, nothing.stderr) == snapshot


def test_megatron_lms_script_runs_in_session_mode(start, tmp_path):
    (tmp_path / "pretrain_gpt.py").write_text("")
    (start.tools / "srun").write_text('#!/bin/sh\necho "$@"\necho "mode $UNICRON_MODE"\n')
    own = "--distributed-backend nccl --eval-iters 0 --eval-interval 1000"
    own += " --save checkpoints/pretrain-7 --save-interval 500"
    found = start("pretrain_gpt.py", "--lr", "1", "--save", "/mine", file=MEGATRON_LM).stdout.splitlines()
    assert found == [
        f"--cpu-bind=none unicron-agent run -- python pretrain_gpt.py {own} --lr 1 --save /mine",
        "mode session",
    ]
    nothing = start("gone.py", file=MEGATRON_LM, UNICRON="1")
    assert nothing.returncode == 2
    assert nothing.stderr.startswith("megatron_lm: no script gone.py: ")


@pytest.mark.parametrize("file", [TEMPLATE, ANY_SCRIPT, MEGATRON_LM], ids=lambda file: file.name)
def test_what_an_element_needs_is_asked_for(file):
    asked = {line.split()[1].split("=")[0] for line in file.read_text().splitlines() if line.startswith("#SBATCH ")}
    assert asked >= {"--array", "--gres", "--nodes", "--exclusive", "--requeue", "--open-mode", "--output"}
    assert "--ntasks" not in asked, "the GPUs say how many ranks there are"
