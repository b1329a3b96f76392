"""Shell scripts with a launcher in them."""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_programs import program
from tests.support.processes import ROOT
from unicron_ctl.agent.launchers.commands import LauncherStays
from unicron_ctl.agent.launchers.readers import read_launcher
from unicron_ctl.agent.launchers.shells import (
    FOLDER,
    kept_in_container,
    launches,
    leave_shell,
    meaning_the_agent,
    starts_own_ranks,
)
from unicron_ctl.agent.start import bare


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cd work && torchrun train.py", True),
        ("L='python -u -m torch.distributed.run'\n$L train.py", True),
        ("source env/bin/activate\ntorchrun train.py", True),
        ("x=$(torchrun --help)", True),
        ("NCCL_DEBUG=INFO exec accelerate launch t.py", True),
        ("# torchrun train.py\npython train.py", False),
        ("python train.py --launcher=my-torchrun", False),
        ("ls torchrun.log", False),
        ("python train.py --strategy deepspeed --launcher torchrun", False),
        ("echo start; python train.py --launcher='torchrun'", True),  # a quoted text may be a command
        ("A='x:1' B=2 \\\n    torchrun --nproc-per-node 2 \\\n    train.py", True),
        ("LAUNCHER=torchrun\n$LAUNCHER train.py", True),
        ("if true; then numactl -l torchrun train.py; fi", True),
        ("pip install accelerate deepspeed; python train.py", False),
        ("torchrun=1\npython train.py", False),
        ("nice python a.py\nls x torchrun", False),
        ("nice python a.py; ls torchrun", False),
        ("nice python a.py <torchrun >x", False),
        ("A=1 B=2 C='x y' torchrun train.py", True),
        ("if A=1 exec nice -n 3 torchrun train.py; then true; fi", True),
        ("(A=torchrun x)", False),
        (". env/bin/activate; nice ls; torchrun t.py", True),
        ("conda activate e\nexec 3>&1\ntorchrun t.py", True),
    ],
)
def test_a_script_that_names_a_launcher(tmp_path: Path, text: str, found: bool) -> None:
    script = program(tmp_path / "run.sh", text, "bash")
    for command in (["bash", str(script)], ["bash", "-eux", str(script), "x"], [str(script)], ["bash", "-c", text]):
        assert launches(command) is found, command
    assert launches(["nice", "-n", "3", "env", "A=1", "bash", "-c", text]) is found


def test_a_script_that_runs_its_arguments(tmp_path: Path) -> None:
    script = program(tmp_path / "wrapper.sh", 'export A=1\nexec "$@"', "bash")
    assert launches([str(script), "torchrun", "train.py"]) and launches(["bash", str(script), "torchrun", "train.py"])
    assert launches([str(script), "python", "-u", "-m", "torch.distributed.run", "train.py"])
    assert not launches([str(script), "python", "train.py", "--launcher=torchrun"])
    script.write_text("#!/bin/bash\nexport A=1\n./prepare\n")
    assert not launches([str(script), "torchrun"])


def test_a_launcher_that_is_all_that_the_shell_runs_may_have_a_path() -> None:
    command = ["bash", "-c", "/opt/bin/torchrun --nproc-per-node 2 train.py"]
    assert not launches(command)
    taken = read_launcher(command)
    assert taken is not None and taken.ranks == "2" and taken.command[-1] == "train.py"


@pytest.mark.parametrize("command", ["torchrun train.py", "python torchrun.py", "bash /nonexistent"])
def test_other_commands(command: str) -> None:
    assert not launches(command.split())


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["bash", "-c", "cd x; /opt/bin/torchrun train.py"], "by its path"),
        (["bash", "-c", "$VENV/bin/python -u -m torch.distributed.run t.py"], "by its path"),
        (["bash", "-c", ". env/bin/activate; exec torchrun t.py"], "after PATH was changed"),
        (["bash", "-c", "conda activate e; numactl -l python -m torch.distributed.run t.py"], "after PATH was changed"),
        (["bash"], "reads from standard input"),
        (["bash", "-l"], "reads from standard input"),
        (["nice", "bash", "-eo", "pipefail", "-s", "torchrun"], "reads from standard input"),
        (["bash", "-eo", "pipefail", "-c", "/opt/bin/torchrun t.py"], "by its path"),
    ],
)
def test_a_launcher_that_would_not_be_found_is_refused(command: list[str], why: str) -> None:
    with pytest.raises(LauncherStays, match=why):
        launches(command)


def run_shell(command: Sequence[str], environment: Mapping[str, str]) -> int:
    with meaning_the_agent(environment) as changed:
        return bare.run_all([command], [changed])


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A program in the agent's place, which writes what it is given to a file."""
    monkeypatch.setattr(sys, "executable", str(program(tmp_path / "agent", f'echo "$A|$@" >> {tmp_path}/given')))
    return tmp_path / "given"


@pytest.mark.parametrize(
    "text",
    [
        "A=2 torchrun $N train.py",
        "PATH=/usr/bin:/bin\nexport A=2\ntorchrun $N train.py",
        "export A=2; exec nice torchrun $N train.py",
        "export A=2; L='torchrun'; time $L $N train.py",
    ],
)
def test_the_launchers_name_in_a_shell_means_the_agent(agent: Path, text: str) -> None:
    code = f"N='--nproc 2'\n{text}"
    assert run_shell(["bash", "-c", code], os.environ) == 0
    front = "-I -m unicron_ctl.agent.start.entry run --"
    assert agent.read_text() == f"2|{front} torchrun --nproc 2 train.py\n"


def test_a_python_that_runs_no_launcher_is_the_users_own_and_says_so(
    agent: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "bin"
    own.mkdir()
    program(own / "python", f'echo "own $@ $PATH" >> {tmp_path}/given')
    environment = os.environ | {"PATH": f"{own}:/usr/bin:/bin"}
    code = "python prepare.py; python -u -m torch.distributed.run t.py; python -m pkg torch.distributed.run; exit 3"
    assert run_shell(["bash", "-c", code], environment) == 3
    said = agent.read_text().splitlines()
    told = capfd.readouterr().err
    assert told.count("unicron: ") == 1 and "unicron: python prepare.py " in told and "unprotected" in told
    assert said[0] == f"own prepare.py {own}:/usr/bin:/bin" and said[2].startswith("own -m pkg torch")
    assert said[1] == "|-I -m unicron_ctl.agent.start.entry run -- python -u -m torch.distributed.run t.py"


def test_the_agent_in_a_shell_leaves_nothing_of_it_to_the_ranks(tmp_path: Path) -> None:
    """The second launch of a shell is a later step of the job."""
    out = tmp_path / "out"
    code = f"env -0 > {out}"
    assert run_shell(["bash", "-c", code], os.environ | {"A": "1"}) == 0
    inside = dict(line.split("=", 1) for line in out.read_text().split("\0") if line)
    assert inside[FOLDER] in inside["PATH"]
    Path(inside[FOLDER]).mkdir()
    for launch in ("0", "1"):
        left = leave_shell(inside)
        assert left["PATH"] == os.environ["PATH"] and FOLDER not in left
        assert left["_UNICRON_LAUNCH"] == launch and not [name for name in left if name.startswith("BASH_FUNC_")]
    assert leave_shell({"A": "1"}) == {"A": "1"}


def test_the_shells_exit_status_is_the_commands(tmp_path: Path) -> None:
    program = "from unicron_ctl.agent.start import bare\n"
    program += "raise SystemExit(bare.run_all([['bash', '-c', 'kill -9 $$']], [{}]))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 137


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("apptainer exec --nv i.sif bash -c 'cd /x && torchrun --nnodes $N train.py'", True),
        ("apptainer exec i.sif bash -lc 'torchrun train.py'", True),
        ("singularity exec i.sif bash -c 'cd x; python -m torch.distributed.run t.py'", True),
        ("enroot start i bash -c 'cd /x; torchrun train.py'", True),
        ("bash -c 'cd /x && apptainer exec i.sif torchrun --nnodes $N train.py'", True),
        ("bash -c 'cd /x && apptainer exec i.sif bash -c \"torchrun t.py\"; date'", True),
        ("apptainer exec i.sif bash inside.sh", True),
        ("bash -c 'cd /x; podman run -it i torchrun t.py'", True),
        ("apptainer exec i.sif python train.py --strategy deepspeed", False),
        ("bash -c 'apptainer pull i.sif docker://x && python train.py'", False),
        ("python train.py", False),
    ],
)
def test_a_launcher_inside_a_container_stays_and_a_line_says_so(line, told, tmp_path, monkeypatch, snapshot) -> None:
    """Defect: whole nodes were restarted, `jobs` counted torchrun for a rank, and nothing said so."""
    monkeypatch.chdir(tmp_path)
    Path("inside.sh").write_text("cd /x\naccelerate launch train.py\n")
    command = shlex.split(line)
    assert not launches(command) and read_launcher(command) is None
    said = kept_in_container(command)
    assert bool(said) is told and said == snapshot


FRONT_ENDS = tomllib.loads((ROOT / "docs" / "behaviour" / "front-ends.toml").read_text())["program"]


def ways_to_start(program: dict[str, Any]) -> Iterator[list[str]]:
    """The words that name the program, by its own name and as a module."""
    if "name" in program:
        yield [program["name"]]
        yield [f"/opt/env/bin/{program['name']}"]
    for module in program.get("modules", []):
        yield ["python", "-m", module]
        yield ["/opt/env/bin/python3.11", "-u", "-m", module]


@pytest.mark.parametrize("program", FRONT_ENDS, ids=lambda program: program["package"])
def test_what_starts_its_own_ranks_gets_its_line(program: dict[str, Any]) -> None:
    """Defect: it was one rank a node, and nobody said so."""
    for start, words in itertools.product(ways_to_start(program), program["starts"]):
        line = shlex.join([*start, *words.split()])
        for command in (
            [*shlex.split(line), "x.yaml"],
            ["env", "A=1", *shlex.split(line), "x.yaml"],
            ["uv", "run", "--frozen", *shlex.split(line), "x.yaml"],
            ["bash", "-c", f"NODE_RANK=$SLURM_NODEID NPROC_PER_NODE=8 {line} x.yaml"],
            ["bash", "-c", f"cd work && exec {line} x.yaml"],
            ["bash", "-c", f"cd work; conda run -n env {line} x.yaml"],
        ):
            told = starts_own_ranks(command)
            assert f"{words} " in told and "Unicron restarts whole nodes" in told, command
            assert read_launcher(command) is None
    for start, words in itertools.product(ways_to_start(program), program["alone"]):
        assert starts_own_ranks([*start, *words.split(), "x"]) == "", words
    for name in filter(None, [program.get("name"), *program.get("modules", [])]):
        assert starts_own_ranks(["python", "train.py", "--with", name]) == ""
        assert starts_own_ranks(["uv", "run", "python", "train.py", "--with", name, *program["starts"][:1]]) == ""
        assert starts_own_ranks(["bash", "-c", f"ls {name}.log; cat {name}; pip install {name}"]) == ""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cd work && uv run torchrun --nproc-per-node 8 train.py", "torchrun"),
        ("cd work; conda run -n env accelerate launch train.py", "accelerate"),
        ("cd work; uv run --no-sync -m torch.distributed.run train.py", "torch.distributed.run"),
        ("cd work; poetry run python -m torch.distributed.run train.py", "torch.distributed.run"),
        ("cd work; uv run --with accelerate -- deepspeed train.py", "deepspeed"),
        ("uv pip install deepspeed accelerate && python train.py", ""),
        ("conda install -c conda-forge deepspeed; conda run -n accelerate python train.py", ""),
        ("uv run python train.py --strategy deepspeed && ls", ""),
        ("uv sync; python train.py --strategy deepspeed", ""),
        ("uv run prepare.py | cat; echo torchrun", ""),
    ],
)
def test_a_launcher_of_another_environment_in_a_shell_gets_its_line(text: str, told: str) -> None:
    """Defect: nothing takes its place there, as that environment's own comes first in PATH, and nobody said so."""
    command = ["bash", "-c", text]
    assert not launches(command)
    said = starts_own_ranks(command)
    assert said.startswith(f"{told} ") if told else not said


def test_a_module_that_trains_in_its_own_process_gets_no_line() -> None:
    for module in ("axolotl.cli.train", "verl.trainer.sft_trainer", "openrlhf.cli.train_sft", "mypackage.train"):
        assert starts_own_ranks(["python", "-m", module, "x.yaml"]) == ""


@pytest.mark.parametrize("shell", ["csh", "tcsh", "fish"])
def test_a_launcher_in_a_shell_that_sets_path_itself_stays_and_a_line_says_so(shell: str, tmp_path: Path) -> None:
    """Defect: the agent did not read these shells' scripts, and nobody was told (docs/behaviour/shells.md)."""
    script = program(tmp_path / "run.sh", "# deepspeed no\ncd work; torchrun --nproc-per-node 8 train.py", shell)
    for command in (
        [shell, str(script)],
        ["nice", shell, "-f", str(script)],
        [str(script)],
        [shell, "-c", "torchrun t.py"],
    ):
        assert not launches(command) and read_launcher(command) is None
        assert starts_own_ranks(command).startswith("torchrun starts the ranks of a node by itself"), command
    assert starts_own_ranks([shell, "-c", "python train.py"]) == ""


def test_mksh_is_a_shell_like_sh() -> None:
    assert launches(["mksh", "-c", "cd x; torchrun train.py"])
