"""Reading what Slurm's programs print, and what is done when they do not."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_ctl.slurm import ElementInfo, NodeInfo, SlurmError
from unicron_ctl.slurm.command_line import (
    CommandLineClient,
    count_gpus,
    parse_element,
    parse_node,
    parse_states,
    parse_time,
)

NODE = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=4  CPUAlloc=0 CPUEfctv=4 CPUTot=4 CPULoad=0.37 AvailableFeatures=(null) "
    "ActiveFeatures=(null) Gres=gpu:a100:8(S:0-1) NodeAddr=127.0.0.1 NodeHostName=head Port=21824 Version=22.05.8 "
    "OS=Linux 6.1.0 #1 SMP State=fake 2024  RealMemory=2000 AllocMem=0 FreeMem=N/A Sockets=1 Boards=1 "
    "State=DOWN*+DRAIN ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=main  "
    "BootTime=2026-11-21T06:24:00 SlurmdStartTime=2026-11-21T07:25:07 LastBusyTime=2026-11-21T07:25:07 "
    "CfgTRES=cpu=4,mem=2000M,billing=4 AllocTRES= CapWatts=n/a "
)


def test_a_node_line_is_read_with_flags_reason_and_start_time() -> None:
    line = NODE.replace("State=fake ", "") + "Reason=unicron[node_problem]: Port=3 odd [root@2026-11-21T07:26:02]  "
    assert parse_node(line) == NodeInfo(
        name="n1",
        states=frozenset({"DOWN", "NOT_RESPONDING", "DRAIN"}),
        reason="unicron[node_problem]: Port=3 odd",
        address="127.0.0.1",
        port=21824,
        slurmd_start=1795245907.0,
        gpus=8,
    )


def test_a_node_that_never_registered_has_no_start_time_and_is_not_healthy() -> None:
    info = parse_node("NodeName=n2 State=UNKNOWN+NOT_RESPONDING SlurmdStartTime=None Gres=(null)")
    assert (info.slurmd_start, info.gpus, info.port, info.address, info.healthy) == (None, 0, 6818, "n2", False)


@pytest.mark.parametrize(
    ("text", "states"),
    [
        ("IDLE", {"IDLE"}),
        ("idle*", {"IDLE", "NOT_RESPONDING"}),
        ("DOWN*+DRAIN", {"DOWN", "NOT_RESPONDING", "DRAIN"}),
        ("IDLE~", {"IDLE", "POWERED_DOWN"}),
        ("ALLOCATED+COMPLETING", {"ALLOCATED", "COMPLETING"}),
        ("DOWN+DRAIN+INVALID_REG", {"DOWN", "DRAIN", "INVALID_REG"}),
    ],
)
def test_states_of_old_and_new_releases(text: str, states: set[str]) -> None:
    assert parse_states(text) == states


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("", 0),
        ("(null)", 0),
        ("gpu", 1),
        ("gpu:8", 8),
        ("gpu:a100:4(S:0-1)", 4),
        ("gpu:a100:4(S:0,1),gpu:2,shard:8", 6),
    ],
)
def test_gpus_are_counted(gres: str, count: int) -> None:
    assert count_gpus(gres) == count


def test_times() -> None:
    assert parse_time("1970-01-02T00:00:01") == 86401.0
    assert parse_time("None") is None and parse_time("Unknown") is None and parse_time("") is None


def _line(*values: str) -> str:
    return "".join(f"{value:20}\x1f" for value in values)


def test_array_elements_and_plain_jobs() -> None:
    line = _line("7", "2", "9", "RUNNING", "n3", "None", "ann", "1", "0", "my job", "(null)")
    assert parse_element(line) == (ElementInfo("7", 2, "9", "RUNNING", "n3", "", "my job", "ann", "", 1), True)
    line = _line("8", "N/A", "8", "PENDING", "", "JobHeldUser", "ann", "0", "0", "x", "a | b")
    info, is_array = parse_element(line)
    assert (info.element, info.node, info.held, info.comment, is_array) == (0, None, True, "a | b", False)


def test_how_an_element_ended_is_read_from_its_wait_status() -> None:
    ended = {"35072": "137:0", "9": "0:9", "768": "3:0", "0": "", "0:125": "0:125", "N/A": ""}
    for status, expected in ended.items():
        info, _ = parse_element(_line("7", "2", "9", "FAILED", "n3", "NonZeroExitCode", "ann", "1", status, "x", ""))
        assert info.exit_code == expected


def test_a_line_of_another_format_is_an_error_of_one_line() -> None:
    with pytest.raises(SlurmError, match="cannot read") as raised:
        parse_element("JOBID PARTITION\nNAME")
    assert "\n" not in str(raised.value)
    with pytest.raises(SlurmError, match="cannot read"):
        parse_node("Nodes are fine")


_TEXT = st.text(st.characters(blacklist_categories=["Cs", "Cc", "Z"]), max_size=30)


@given(name=_TEXT, comment=_TEXT.filter(lambda text: text not in ("(null)", "N/A")))
def test_whatever_users_write_comes_back(name: str, comment: str) -> None:
    info, _ = parse_element(_line("7", "0", "7", "PENDING", "", "None", "ann", "0", "0", name, comment))
    assert (info.name, info.comment) == (name, comment)


@pytest.mark.parametrize(
    ("state", "reason", "held"),
    [
        ("PENDING", "JobHeldAdmin", True),
        ("PENDING", "JobHeldUser", True),
        ("PENDING", "job requeued in held state", True),
        ("PENDING", "Resources", False),
        ("RUNNING", "JobHeldAdmin", False),
    ],
)
def test_held(state: str, reason: str, held: bool) -> None:
    assert ElementInfo("1", 0, "1", state, None, reason, "", "", "", 0).held is held


def _program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_slurm_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(SlurmError, match=r"scontrol .*no answer from Slurm within 0\.2 s"):
        CommandLineClient(env={"PATH": ""}, timeout=0.2).nodes()


def test_what_slurm_says_becomes_one_line(tmp_path: Path) -> None:
    _program(tmp_path, "scontrol", "echo 'error: one' >&2; echo 'error: two' >&2; exit 3")
    with pytest.raises(SlurmError) as raised:
        CommandLineClient(env={"PATH": str(tmp_path)}).down("n1", "unicron[node_problem]: x")
    assert str(raised.value) == "scontrol update NodeName=n1: error: one error: two"


def test_missing_programs_are_named_with_their_package(tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match=r"scontrol not found; install with: apt-get install slurm-client"):
        CommandLineClient(env={"PATH": str(tmp_path)}).nodes()


def test_formats_that_people_set_for_themselves_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    _program(tmp_path, "sinfo", 'echo "slurm ${SQUEUE_FORMAT:-22}.${SLURM_TIME_FORMAT:-05}.8"')
    assert CommandLineClient(env={"PATH": f"{tmp_path}"}).version() == "22.05.8"
