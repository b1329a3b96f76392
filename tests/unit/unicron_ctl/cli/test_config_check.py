"""unicronctl config check, without a Slurm; tests/slurm/test_client_contract.py has it with one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from syrupy.assertion import SnapshotAssertion

from tests.support.fake_programs import program
from unicron_ctl.cli.config_check import command, permissions, table
from unicron_ctl.shared.settings.config import Config, ControllerConfig
from unicron_ctl.shared.settings.partitions import Claim, PartitionConfig
from unicron_ctl.shared.slurm import PartitionInfo

PARTITIONS = {
    "gpu": PartitionConfig(mode="act", actions=["drain", "pin"], account={"lab": Claim(max_weight=4.0)}, spare_nodes=2),
    "old": PartitionConfig(mode="off"),
}


def _call(path: Path, *arguments: str, code: int) -> Any:
    result = CliRunner().invoke(command, ["check", "--config", str(path), *arguments], standalone_mode=False)
    assert result.return_value == code, result.output
    return result


def test_each_partition_is_a_line_to_be_grepped(snapshot: SnapshotAssertion) -> None:
    config = Config(controller=ControllerConfig(partitions=PARTITIONS))
    found = table(permissions(config, [PartitionInfo("gpu", 64, "UP"), PartitionInfo("cpu", 8, "DOWN")])).lines()
    assert found == snapshot


def test_without_slurm_the_file_alone_is_shown_with_all_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "unicron.toml"
    path.write_text("[controller]\nslurm = 'none'\n[partition.default]\nmode = 'act'\nspares = 1\n")
    report = json.loads(_call(path, "--json", code=3).output)
    (problem,) = report["problems"]
    assert problem.startswith("[partition.default] spares: ") and "spare_nodes" in problem
    assert [(one["partition"], one["mode"], one["nodes"]) for one in report["partitions"]] == [("default", "act", None)]
    path.write_text("[controller]\nslurm = 'none'\n[partition.default]\nmode = 'act'\n")
    assert _call(path, code=0).output.splitlines()[2].split() == ["default", "-", "-", "act", "0", "1", "all"]


@pytest.mark.parametrize(("value", "warns"), [("2", True), ("1", False)])
def test_slurm_that_gives_nodes_back_by_itself_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, warns: bool
) -> None:
    answers = {"partition": "PartitionName=gpu State=UP TotalNodes=4", "config": f"ReturnToService         = {value}"}
    cases = "\n".join(f"*{name}*) echo '{said}' ;;" for name, said in answers.items())
    program(tmp_path / "scontrol", f'case "$*" in\n{cases}\nesac')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    path = tmp_path / "unicron.toml"
    path.write_text("[controller]\nslurm = 'command'\n")
    said = json.loads(_call(path, "--json", code=0).output)
    assert said["partitions"][0]["partition"] == "gpu"
    assert ("ReturnToService=2" in "".join(said["warnings"])) == warns
    assert ("ReturnToService=2" in _call(path, code=0).output) == warns
