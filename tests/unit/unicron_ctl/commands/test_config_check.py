"""unicronctl config check, without a Slurm; tests/slurm/test_client_contract.py has it with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from unicron_ctl.commands.config import allowed, command, lines
from unicron_ctl.config import Config, ControllerConfig
from unicron_ctl.partitions import Claim, PartitionConfig
from unicron_ctl.slurm import PartitionInfo

PARTITIONS = {
    "gpu": PartitionConfig(mode="act", actions=["drain", "pin"], account={"lab": Claim(max_weight=4.0)}, spare_nodes=2),
    "old": PartitionConfig(mode="off"),
}


def _call(path: Path, *arguments: str, code: int) -> Any:
    result = CliRunner().invoke(command, ["check", "--config", str(path), *arguments], standalone_mode=False)
    assert result.return_value == code, result.output
    return result


def test_each_partition_is_a_line_to_be_grepped() -> None:
    config = Config(controller=ControllerConfig(partitions=PARTITIONS))
    found = lines(allowed(config, [PartitionInfo("gpu", 64, "UP"), PartitionInfo("cpu", 8, "DOWN")]))
    assert found == [
        "PARTITION  NODES  STATE  MODE     SPARE  WEIGHT   ACTIONS",
        "gpu        64     UP     act      2      1,lab=4  drain,pin",
        "cpu        8      DOWN   observe  0      1        none",
        "old        -      -      off      0      1        none",
        "default    -      -      observe  0      1        none",
    ]


def test_without_slurm_the_file_alone_is_shown_with_all_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "unicron.toml"
    path.write_text("[controller]\nslurm = 'none'\n[partition.default]\nmode = 'act'\nspares = 1\n")
    said = json.loads(_call(path, "--json", code=2).output)
    assert said["problems"] == ["[partition.default] spares: unknown key; did you mean spare_nodes?"]
    assert [(one["partition"], one["mode"], one["nodes"]) for one in said["partitions"]] == [("default", "act", None)]
    path.write_text("[controller]\nslurm = 'none'\n[partition.default]\nmode = 'act'\n")
    assert _call(path, code=0).output.splitlines()[2].split() == ["default", "-", "-", "act", "0", "1", "all"]
