"""An interrupt ends the sruns of `unicronctl`. srun and scancel are scripts here."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.processes import wait_for
from unicron_ctl.doctor import on_nodes
from unicron_ctl.doctor.facts import COMPUTE, Question
from unicron_ctl.shared.slurm.slurm_client import NodeInfo
from unicron_ctl.shared.slurm.steps import Steps
from unicron_ctl.shared.system.errors import UserError
from unicron_ctl.tools import pairs

LIMIT = 20.0  # seconds; the sruns here would take longer


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An srun that notes the name of its job and hangs, and a scancel that notes its words."""
    for name, line in (("srun", "exec sleep 300"), ("scancel", "exit 0")):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "$1" | sed s/job-// >> {tmp_path}/{name}\n{line}\n')
        path.chmod(0o755)
    return {"PATH": f"{path.parent}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}


def of_doctor(environment: dict[str, str], began: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    asking = on_nodes.Asking(Question(role=COMPUTE), on_nodes.Wish(("doctor",)), environment, None)
    ask = asking._step

    def step(partition: str, names: list[str], doors: ThreadPoolExecutor) -> None:
        interrupt_if(partition == "first", began)
        ask(partition, names, doors)

    monkeypatch.setattr(asking, "_step", step)
    asking.run([("first", []), ("gpu", ["n1"]), ("cpu", ["n2"])])


def of_pair_test(environment: dict[str, str], began: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [NodeInfo(f"n{i}", frozenset({"IDLE"}), "", "ip", 1, 0.0, 4) for i in range(6)]
    runner = pairs.Runner(nodes, pairs.Wish(python="p"), environment, lambda text: None)
    test = runner._test

    def one(number: int, group: pairs.Group) -> pairs.Test:
        interrupt_if(group == ("n0", "n1"), began)
        return test(number, group)

    monkeypatch.setattr(runner, "_test", one)
    runner.wave(1, [("n0", "n1"), ("n2", "n3"), ("n4", "n5")])


def interrupt_if(first: bool, began: Callable[[], object]) -> None:
    """What Ctrl-C does to the thread that waits for the first one, when the two others run."""
    if first:
        wait_for(began, "both run", LIMIT)
        raise KeyboardInterrupt


@pytest.mark.parametrize("what", [of_doctor, of_pair_test])
def test_an_interrupt_ends_all_sruns_at_once(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: Callable[..., None]
) -> None:
    started, ended = tmp_path / "srun", tmp_path / "scancel"
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        what(environment, lambda: started.exists() and len(started.read_text().splitlines()) == 2, monkeypatch)
    assert time.monotonic() - began < LIMIT
    assert set(ended.read_text().splitlines()) == set(started.read_text().splitlines()), "by the names of their jobs"


def test_a_surrounding_job_and_the_plugin_are_kept_out() -> None:
    given = {"SLURM_JOB_ID": "7", "SLURM_CONF": "/c", "SBATCH_PARTITION": "x", "HOME": "/h", "UNICRON": "1"}
    steps = Steps("test-", given)
    assert steps._environment == {"SLURM_CONF": "/c", "HOME": "/h", "UNICRON": "0"}


def test_without_srun_it_says_what_to_install_and_after_the_end_none_is_started(tmp_path: Path) -> None:
    steps = Steps("test-", {"PATH": str(tmp_path)})
    with pytest.raises(UserError, match="apt-get install slurm-client"), steps.running("1", ["srun"]):
        pass
    steps.stop()
    with pytest.raises(UserError, match="interrupted"), steps.running("2", ["sleep", "300"]):
        pass
