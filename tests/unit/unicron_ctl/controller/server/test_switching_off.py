"""The site's program that switches a node off: real programs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support.processes import wait_for
from unicron_ctl.controller.server.switching_off import switch_off
from unicron_ctl.shared.settings.config import ControllerConfig, problems
from unicron_ctl.shared.settings.power_off import command_of, power_off_unfit
from unicron_ctl.shared.slurm.slurm_client import SlurmError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    return tmp_path


def program(folder: Path, text: str) -> Path:
    path = folder / "off"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_it_gets_the_name_of_the_node_and_no_shell_reads_it(folder: Path) -> None:
    off = program(folder, f'echo "$#:$1:$2" > {folder}/said')
    switch_off(f"{off} -n '%n;$HOME'", "n7")
    assert (folder / "said").read_text() == "2:-n:n7;$HOME\n"
    assert command_of("/sbin/off --host=bmc-%n %n", "n7") == ["/sbin/off", "--host=bmc-n7", "n7"]


def test_why_it_failed_is_said(folder: Path) -> None:
    off = program(folder, "echo first >&2; echo 'no answer of the BMC' >&2; exit 3")
    with pytest.raises(SlurmError, match=r"ended with status 3: .*no answer of the BMC"):
        switch_off(f"{off} %n", "n7")
    off.chmod(0o644)
    with pytest.raises(SlurmError, match="chmod"):
        switch_off(f"{off} %n", "n7")
    off.chmod(0o777)
    with pytest.raises(SlurmError, match="off"):
        switch_off(f"{off} %n", "n7")


def test_what_others_can_change_is_not_run_by_way_of_an_interpreter_either(folder: Path) -> None:
    off = program(folder, f"echo $1 > {folder}/said")
    off.chmod(0o777)
    for line in (f"/bin/sh {off} %n", f"/usr/bin/env {off} %n", f"/bin/sh -c '{off} %n'"):
        assert f"others can write {off}" in power_off_unfit(line)
        with pytest.raises(SlurmError, match="others can write"):
            switch_off(line, "n7")
    assert not (folder / "said").exists()


def test_one_that_prints_without_end_is_killed(folder: Path) -> None:
    """Defect: its errors went to a file without a limit."""
    off = program(folder, "exec yes 'no answer of the BMC' >&2")
    with pytest.raises(SlurmError, match="printed more than 1 MiB and was killed"):
        switch_off(f"{off} %n", "n7", 10.0)


def test_it_has_a_short_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_PASSWORD", "of unicrond's own")
    switch_off(f"{program(folder, f'env > {folder}/said')} %n", "n7")
    said = (folder / "said").read_text()
    assert "UNICRON_PASSWORD" not in said and "PATH=" in said


def test_it_is_killed_when_unicrond_ends(folder: Path) -> None:
    began = time.monotonic()
    with pytest.raises(SlurmError, match="was killed, because unicrond ends"):
        switch_off(f"{program(folder, 'sleep 600')} %n", "n7", stops=lambda: time.monotonic() > began + 0.5)
    assert time.monotonic() - began < 10.0


def test_one_that_does_not_end_is_killed_with_its_children(folder: Path) -> None:
    """A pipe has an end when all that had it open are gone."""
    os.mkfifo(folder / "open")
    off = program(folder, f"sleep 600 > {folder}/open & sleep 600")
    held = os.open(folder / "open", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(SlurmError, match=r"did not end within 2 s and was killed"):
        switch_off(f"{off} %n", "n7", 2.0)
    wait_for(lambda: _at_end(held), "the child is gone")
    os.close(held)


def _at_end(pipe: int) -> bool:
    try:
        return os.read(pipe, 1) == b""
    except BlockingIOError:  # somebody has it open
        return False


def test_a_child_in_the_background_delays_nothing(folder: Path) -> None:
    child = f"(until [ -e {folder}/through ]; do sleep 0.1; done; echo done > {folder}/later)"
    off = program(folder, f"{child} & echo 'no BMC' >&2; exit $2")
    switch_off(f"{off} %n 0", "n7")
    with pytest.raises(SlurmError, match="ended with status 1: no BMC"):
        switch_off(f"{off} %n 1", "n7")
    (folder / "through").touch()
    wait_for(lambda: (folder / "later").exists(), "the child goes on")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", ""),
        ("/sbin/off %n", ""),
        ("off %n", "write the absolute path of a program"),
        ("  ", "write the absolute path of a program"),
        ("/sbin/off", "write %n where the program takes the name of the node"),
        ("/sbin/%n", "write %n where"),
        ("/sbin/off '%n", "No closing quotation"),
    ],
)
def test_a_wrong_setting_is_one_line(value: str, said: str) -> None:
    found = problems(ControllerConfig(power_off=value))
    assert (len(found) == 1 and said in found[0] and "\n" not in found[0]) if said else not found


def test_a_program_that_is_missing_is_found_at_the_start(folder: Path) -> None:
    assert "install it" in power_off_unfit(f"{folder}/none %n")
    assert power_off_unfit(f"{program(folder, 'true')} %n") == power_off_unfit("") == power_off_unfit("off") == ""
