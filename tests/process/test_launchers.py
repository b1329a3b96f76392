"""Commands with a launcher in them, under real agents and a real unicrond."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.controller import Controller
from tests.support.jobs import AGENT, FOREVER, HERE, PLAIN, Job, json_lines
from tests.support.processes import call, outside_slurm, wait_for
from unicron_ctl.cli.unicronctl import unicronctl

pytestmark = pytest.mark.process
SETTINGS = "lease_periods = 4\nforming_settle_seconds = 4\njoin_after_seconds = 1\n"
NODES = 2
TINY_PLAIN = HERE / "tiny_plain.py"


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    started = Controller(tmp_path_factory.mktemp("controller"), SETTINGS)
    yield started
    started.close()


class Launched:
    """A job of two one-node elements with this command, whose script is `plain_train.py`."""

    def __init__(self, folder: Path, controller: Controller, number: str, command: str, **more: str):
        self.out = folder / f"out{number}"
        self.out.mkdir()
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        settings = {"PLAIN_OUT": str(self.out), "PATH": path, **more}
        self.job = Job(folder, controller.address, number, NODES, shlex.split(command), **settings)

    def world(self, begun: int = 0) -> dict:
        """A step of a world of all ranks that has begun at this step or a later one."""

        def steps() -> list[dict]:
            every = [step for node in range(NODES) for step in json_lines(self.out / f"steps.{node}")]
            young = [step for step in every if step["begun"] >= begun]
            return young if {step["rank"] for step in young} == {0, 1, 2, 3} else []

        found = wait_for(steps, lambda: f"a world of four\n{self.job.logs}")
        assert {step["size"] for step in found} == {4}, found
        return found[-1]

    def stop(self) -> list[int]:
        (self.out / "stop").touch()
        return self.job.wait()


def test_torchrun_on_each_node_becomes_one_world_with_a_file_for_each_rank(
    controller: Controller, tmp_path: Path
) -> None:
    options = f"--nnodes {NODES} --nproc-per-node 2 --rdzv-endpoint head:29500 --log-dir {tmp_path}/logs --tee 3"
    launched = Launched(tmp_path, controller, "80", f"torchrun {options} --local-ranks-filter 1 {PLAIN}")
    try:
        first = launched.world()
        assert controller.job("80")["min_nodes"] == NODES, "by its --nnodes"
        os.kill(first["pid"], signal.SIGKILL)
        launched.world(begun=1)
        assert launched.stop() == [0, 0], launched.job.logs
        said = launched.job.logs
        assert said.count("torchrun is left out: the agent starts 2 ranks on each node") == NODES
        assert "rank 1 of 4 is through" in said and "rank 3 of 4 is through" in said
        assert "rank 0 of 4" not in said and "rank 2 of 4" not in said, "the filter's other ranks are in their files"
        shown = CliRunner().invoke(unicronctl, ["logs", "80", "--json", "--controller", controller.address])
        assert shown.exit_code == 0, shown
        lines = [json.loads(line) for line in shown.output.splitlines()]
        through = {line["rank"] for line in lines if line["text"].startswith(f"rank {line['rank']} of 4 is through")}
        assert through == {0, 1, 2, 3} and lines == sorted(lines, key=lambda line: line["time"])
    finally:
        launched.job.close()


def test_a_shell_script_with_two_launchers_is_two_trainings(controller: Controller, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"set -eu\nexport PYTHONPATH=\necho prepared\nLAUNCHER='python -u -m torch.distributed.run'\n"
        f"$LAUNCHER --nproc_per_node ${{N:-2}} {PLAIN}\nrm -f {tmp_path}/out81/stop\n"
        f"exec torchrun --nproc_per_node 2 --no-python {sys.executable} {PLAIN}\n"
    )
    launched = Launched(tmp_path, controller, "81", f"bash {script}", UNICRON_MIN_NODES=str(NODES))
    try:
        launched.world()
        (launched.out / "stop").touch()
        wait_for(lambda: not (launched.out / "stop").exists(), "the first one ends", now=lambda: launched.job.logs)
        launched.world(begun=1)
        assert launched.stop() == [0, 0], launched.job.logs
        said = launched.job.logs
        assert said.count("prepared") == NODES
        assert said.count("torch.distributed.run is left out") == said.count("torchrun is left out") == NODES
    finally:
        launched.job.close()


@pytest.mark.wide
def test_a_script_with_a_session_behind_torchrun_is_healed_within_the_iteration(
    controller: Controller, tmp_path: Path
) -> None:
    command = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2", str(TINY_PLAIN)]
    settings = {"TINY_ITERATIONS": FOREVER, "TINY_OUT": str(tmp_path)}
    job = Job(tmp_path, controller.address, "82", 1, command, **settings)

    def trains(least: int) -> bool:
        found = controller.job("82")
        return found.get("members") == [0, 1] and found["state"] == "running" and found["iteration"] >= least

    try:
        controller.wait(lambda: trains(2), lambda: job.logs)
        assert controller.job("82")["mode"] == "session"
        os.kill(controller.rank(1, "82")["pid"], signal.SIGKILL)
        controller.wait(lambda: controller.job("82")["failures"] == 1, lambda: job.logs)
        reached = controller.job("82")["iteration"]
        controller.wait(lambda: trains(reached + 2), lambda: job.logs)
        assert controller.job("82")["ledger_violations"] == 0
    finally:
        job.close()


def test_a_launcher_that_cannot_be_read_runs_as_it_is(tmp_path: Path) -> None:
    """One line says so; so does a shell for whose launchers no folder can be made."""
    (tmp_path / "nsys").write_text('#!/bin/sh\necho "nsys $@"\n')
    (tmp_path / "nsys").chmod(0o700)
    environment = outside_slurm() | {"SLURM_JOB_ID": "90", "UNICRON": "1"}
    environment["PATH"] = os.pathsep.join([str(tmp_path), environment["PATH"]])
    behind = call(*AGENT, "run", "--", "nsys", "profile", "torchrun", "train.py", cwd=tmp_path, environment=environment)
    assert behind.stdout == "nsys profile torchrun train.py\n" and behind.returncode == 0
    assert behind.stderr.startswith("unicron: this step runs unprotected: its launcher stands behind nsys")
    code = "torchrun() { echo mine; }; torchrun train.py; exit 3"
    nowhere = environment | {"TMPDIR": "/nonexistent", "HOME": "/nonexistent"}
    program = "import tempfile; tempfile._get_default_tempdir = lambda: '/nonexistent'\n"
    program += "import sys; from unicron_ctl.agent.start.agent_main import main; main()"
    words = [sys.executable, "-P", "-c", program, "run", "--", "bash", "-c", code]
    shell = call(*words, cwd=tmp_path, environment=nowhere)
    assert (shell.stdout, shell.returncode) == ("mine\n", 3)
    assert "its launcher could not be read" in shell.stderr and shell.stderr.count("\n") == 1
