"""The fence: each room that only looks can be removed, and the core works as before."""

from __future__ import annotations

import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.controller import Controller
from tests.support.processes import ROOT, UNICRONCTL, call, outside_slurm
from tests.support.rooms import ROOMS
from tools.installed_packages import copy_project, write_release
from unicron_ctl.shared.system.release import DISTRIBUTION, release

pytestmark = pytest.mark.process


class OwnProcess(Controller):
    """Started from the packages on its path, and no fork of the tests' process, which has the checkout's."""

    lent = False


ALWAYS = "lab", "tools"  # the larger ones; `make lint` has the contract that nobody imports any


@pytest.mark.parametrize(
    "room",
    [pytest.param(room, id=name, marks=() if name in ALWAYS else pytest.mark.wide) for name, room in ROOMS.items()],
)
def test_the_core_works_without_the_room(room: metadata.EntryPoint, tmp_path: Path) -> None:
    site = tmp_path / "site"
    copy_project(site)
    write_release(site, DISTRIBUTION, release())
    shutil.rmtree(site / room.module.replace(".", "/"))
    environment = outside_slurm() | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "COLUMNS": "200"}

    shown = call(*UNICRONCTL, "--help", cwd=tmp_path, environment=environment)
    assert shown.returncode == 0, shown.stderr
    listed = {line.split()[0] for line in shown.stdout.partition("Commands:")[2].splitlines() if line.strip()}
    own = set(room.load().COMMANDS)
    everything = set().union(*(other.load().COMMANDS for other in ROOMS.values()))
    assert own and not own & listed and everything - own < listed and "status" in listed, listed
    gone = call(*UNICRONCTL, min(own), cwd=tmp_path, environment=environment)
    assert gone.returncode == 2 and "No such command" in gone.stderr, gone.stderr

    (tmp_path / "unicrond").mkdir()
    controller = OwnProcess(tmp_path / "unicrond", environment=environment)
    try:
        status = call(*UNICRONCTL, "status", "--controller", controller.address, cwd=tmp_path, environment=environment)
        assert status.returncode == 0 and "no job yet" in status.stdout, status.stdout + status.stderr
    finally:
        controller.close()

    lint = Path(sys.executable).with_name("lint-imports")
    contracts = call(lint, "--no-cache", ROOT / "pyproject.toml", cwd=site, environment=environment)
    assert contracts.returncode == 0 and "0 broken" in contracts.stdout, contracts.stdout + contracts.stderr
    where = call(
        sys.executable, "-c", "print(__import__('unicron_ctl').__file__)", cwd=tmp_path, environment=environment
    )
    assert where.stdout.startswith(str(site)), "all this was the copy's"
