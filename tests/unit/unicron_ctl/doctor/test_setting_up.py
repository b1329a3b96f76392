"""`unicronctl setup`: the file that it writes, the lines and the steps that it prints."""

from __future__ import annotations

import re
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from syrupy.assertion import SnapshotAssertion

from tests.support.fake_programs import program
from unicron_ctl.doctor.facts import PluginFacts
from unicron_ctl.doctor.first_file import Wish, unicron_toml
from unicron_ctl.doctor.plugstack import lines_of
from unicron_ctl.doctor.setting_up import Site, plugin_line, slurm_conf_lines, steps
from unicron_ctl.doctor.setup_command import command
from unicron_ctl.doctor.slurm_lines import CONF_LINES
from unicron_ctl.shared.settings.config import Config, ControllerConfig, fields_of
from unicron_ctl.shared.settings.config_file import examine, parse
from unicron_ctl.shared.settings.notify import NotifyConfig
from unicron_ctl.shared.slurm.slurm_settings import SlurmSettings
from unicron_ctl.shared.system.errors import UserError

BARE = {"SlurmUser": "slurm(64030)", "SchedulerParameters": "bf_interval=30", "PrologFlags": "Contain"}
CONFIG = """SlurmUser = slurm(64030)
SlurmctldHost[0] = head(10.0.0.1)
AccountingStorageType = accounting_storage/slurmdbd
JobRequeue = 1
PluginDir = /nonexistent
PlugStackConfig = {folder}/slurm/plugstack.conf
"""
NODES = """NodeName=n1 Gres=gpu:h100:8(S:0-1) NodeAddr=n1 State=IDLE Partitions=gpu
NodeName=n2 Gres=gpu:h100:8(S:0-1) NodeAddr=n2 State=IDLE Partitions=gpu"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with Slurm's programs, which say what the files beside them hold."""
    (tmp_path / "config").write_text(CONFIG.format(folder=tmp_path))
    (tmp_path / "node").write_text(NODES)
    (tmp_path / "partition").write_text("PartitionName=gpu State=UP TotalNodes=2\nPartitionName=cpu State=UP\n")
    (tmp_path / "level").write_text("")
    program(tmp_path / "scontrol", f'for word; do :; done\ncat {tmp_path}/"$word" 2>/dev/null; exit 0')
    program(tmp_path / "sacctmgr", f"cat {tmp_path}/level")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    return tmp_path


def call(*words: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(command, [str(word) for word in words], standalone_mode=False, catch_exceptions=False)
    assert done.return_value == code, done.output
    return done.output


def uncommented(text: str) -> dict[str, Any]:
    """The file with every commented setting in force."""
    return tomllib.loads(re.sub(r"(?m)^# (?=\[partition|\w+ = )", "", text))


# ---------------------------------------------------------------------------------------------------------- the file


def test_the_file_is_valid_in_mode_observe_and_says_where_the_controller_is() -> None:
    text = unicron_toml(Wish("head", "unicron", ("gpu", "cpu"), gpus=8))
    config = parse(tomllib.loads(text))
    assert config.controller.address == "tcp://head:7451" and config.controller.state_dir == "/var/lib/unicron"
    assert config.agent.controller_users == ["unicron"] and config.health.gpus == 8
    assert {config.controller.rules(name).mode for name in ("gpu", "cpu", "")} == {"observe"}


def test_one_marked_partition_leaves_the_others_off() -> None:
    config = parse(tomllib.loads(unicron_toml(Wish("head", partitions=("gpu", "my part"), marked=("my part",)))))
    assert [config.controller.rules(name).mode for name in ("gpu", "my part")] == ["off", "observe"]
    assert config.agent.controller_users == [] and config.health.gpus is None


def test_each_setting_is_there_with_its_default_and_its_meaning() -> None:
    text = unicron_toml(Wish("head"))
    given = uncommented(text)
    config = parse(given)
    for name, section in (("controller", ControllerConfig()), ("agent", Config().agent), ("health", Config().health)):
        for field in fields_of(type(section)):
            if field.name in ("partitions", "planner"):
                continue
            assert field.name in given[name], f"[{name}] {field.name}"
            if field.name not in ("address", "state_dir", "gpus", "memory_mb"):
                assert getattr(getattr(config, name), field.name) == getattr(section, field.name), field.name
    assert given["partition"]["default"].keys() == {"mode", "actions", "max_weight", "spare_nodes"}
    assert given["planner"] == {"compare": "user"}
    assert given["notify"].keys() == {field.name for field in fields_of(NotifyConfig)}
    lines = text.splitlines()
    settings = [
        i for i, line in enumerate(lines) if re.match(r"(# )?\w+ = ", line) and "[partition" not in lines[i - 1]
    ]
    assert settings and all(lines[i - 1].startswith("# ") for i in settings)


# ------------------------------------------------------------------------------------------------------- slurm.conf


def test_only_what_slurm_conf_lacks_is_printed_and_other_words_stay() -> None:
    lines = [line for line in slurm_conf_lines(SlurmSettings(BARE)) if not line.startswith("#")]
    assert "PrologFlags=Contain,Alloc" in lines
    assert "SchedulerParameters=bf_interval=30,nohold_on_prolog_fail" in lines
    assert "JobRequeue=1" in lines and "ReturnToService=1" in lines
    told = dict(line.split("=", 1) for line in lines)
    assert slurm_conf_lines(SlurmSettings({**BARE, **told})) == []


@pytest.mark.parametrize("wanted", CONF_LINES, ids=lambda wanted: wanted.name)
def test_each_line_is_met_by_itself(wanted) -> None:
    line = wanted.line(SlurmSettings({wanted.name: "0" if wanted.name != "HealthCheckNodeState" else "IDLE"}))
    if wanted.name in ("Prolog", "Epilog", "HealthCheckProgram"):
        # Any program counts here: the nodes say whether it is ours.
        assert line == "" and wanted.line(SlurmSettings()).startswith(f"{wanted.name}=")
    else:
        name, _, value = line.partition("=")
        assert name == wanted.name and wanted.line(SlurmSettings({name: value})) == ""


# ------------------------------------------------------------------------------------------------------------ steps


def site(**changes: Any) -> Site:
    usual: dict[str, Any] = {
        "settings": SlurmSettings(BARE),
        "address": "tcp://head:7451",
        "config": "/etc/unicron/unicron.toml",
        "plugstack": "/etc/unicron/plugstack.conf",
        "user": "unicron",
    }
    return Site(**usual | changes)


def test_the_steps_are_those_that_are_left() -> None:
    configless = SlurmSettings({**BARE, "SlurmctldParameters": "enable_configless"})
    text = "\n".join(steps(site(settings=configless, has_accounts=True)))
    for word in ("useradd --system --uid NUMBER", "sacctmgr add user unicron", "configless", "zz-unicron.conf"):
        assert word in text
    found = PluginFacts(line="optional x", is_there=True)
    rest = "\n".join(steps(site(uid=990, has_accounts=True, level="Administrator", found=found)))
    assert "useradd --system --uid 990" in rest
    for word in ("sacctmgr", "zz-unicron.conf", "systemctl edit", "configless"):
        assert word not in rest
    order = ["systemctl enable", "copy /etc/unicron", "scontrol reconfigure", "doctor --all", "unicronctl status"]
    assert sorted(order, key=rest.index) == order


def test_who_may_change_nodes_is_said_before_a_partition_acts() -> None:
    last = steps(site(uid=990))[-1]
    assert last.startswith("Before you set mode") and "User=slurm" in last
    last = steps(site(uid=990, has_accounts=True, level="Operator"))[-1]
    assert "sacctmgr modify user where name=unicron set adminlevel=Administrator" in last
    own = steps(site(uid=64030, user="slurm"))
    assert "User=slurm" in own[0] and "Before you set" not in own[-1] and "useradd" not in "".join(own)


def test_a_standby_is_started_too() -> None:
    text = "\n".join(steps(site(uid=990, address="tcp://head:7451,tcp://head2:7451")))
    assert re.search(r"\bcontroller\b.*\bhead and head2\b.*\b7451\b", text)


def test_a_prolog_that_slurm_has_is_to_call_ours(snapshot: SnapshotAssertion) -> None:
    text = "\n".join(steps(site(settings=SlurmSettings({**BARE, "Prolog": "/etc/slurm/prolog"}))))
    assert [line for line in text.splitlines() if "Prolog" in line] == snapshot


def test_the_plugins_line_is_one_that_the_plugin_takes() -> None:
    words = plugin_line(site()).split()
    assert words[0] == "optional" and {word.partition("=")[0] for word in words[2:]} == {
        "agent",
        "controller",
        "config",
        "default",
    }


# ---------------------------------------------------------------------------------------------------------- command


def test_each_command_of_a_step_stands_on_a_line_of_its_own(slurm: Path) -> None:
    """Defect: a step was printed as one line, in which a `#` hides all that follows."""
    lines = call("--config", slurm / "etc" / "unicron.toml").splitlines()
    alone = ["systemctl enable --now unicrond", "unicronctl ping", "scontrol reconfigure", "unicronctl events -f"]
    assert [line.strip() for line in lines if line.strip() in alone] == alone


def test_it_writes_once_and_then_leaves_the_file_alone(slurm: Path) -> None:
    path = slurm / "etc" / "unicron.toml"
    said = call("--config", path)
    assert f"wrote {path}" in said and "Prolog=/usr/lib/unicron/prolog.d/*" in said and "doctor --all" in said
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    config, problems = examine(path, {})
    assert problems == [] and config.controller.address == "tcp://head:7451" and config.health.gpus == 8
    assert config.agent.controller_users == ["unicron"]
    plugstack = path.with_name("plugstack.conf")
    (line,) = lines_of(plugstack)
    assert line.kind == "optional" and "controller=tcp://head:7451" in line.arguments
    assert f"config={path}" in line.arguments
    before = path.stat().st_mtime_ns, plugstack.stat().st_mtime_ns
    again = call("--config", path)
    assert "wrote" not in again and [again.count(f"{one} is there") for one in (path, plugstack)] == [1, 1]
    assert (path.stat().st_mtime_ns, plugstack.stat().st_mtime_ns) == before
    assert sorted(path.parent.iterdir()) == [plugstack, path]


def test_a_file_that_differs_stays_unless_force_is_said(slurm: Path) -> None:
    path = slurm / "unicron.toml"
    path.write_text('[controller]\naddress = "tcp://other:7451"\n')
    said = call("--config", path)
    assert "--force" in said and "other" in path.read_text()
    assert "controller=tcp://other:7451" in (slurm / "plugstack.conf").read_text()
    assert f"wrote {path}" in call("--config", path, "--force")
    assert "tcp://head:7451" in path.read_text() and "other" in (slurm / "unicron.toml.old").read_text()


def test_a_file_that_stays_and_is_wrong_is_found(slurm: Path) -> None:
    path = slurm / "unicron.toml"
    path.write_text("[health]\ngpuz = 8\n")
    assert "gpuz: unknown key" in call("--config", path, code=3)


def test_a_dry_run_writes_nothing_and_prints_the_file(slurm: Path) -> None:
    path = slurm / "etc" / "unicron.toml"
    said = call("--config", path, "--dry-run", "--partition", "gpu", "--host", "fe80::1", "--user", "slurm")
    assert not path.parent.exists()
    assert '[partition.gpu]\nmode = "observe"' in said and 'address = "tcp://[fe80::1]:7451"' in said
    assert "# controller_users = []" in said and "User=slurm" in said


def test_slices_of_gpus_are_not_counted(slurm: Path) -> None:
    (slurm / "node").write_text(NODES.replace("gpu:h100:8", "gpu:1g.10gb:56"))
    assert "# gpus = 8" in call("--dry-run")


def test_a_partition_that_is_not_there_is_wrong_use(slurm: Path) -> None:
    done = CliRunner().invoke(command, ["--dry-run", "--partition", "nix"])
    assert done.exception is not None and "it has gpu, cpu" in str(done.exception)
    assert getattr(done.exception, "exit_code", 0) == 2


@pytest.mark.parametrize("words", [["--host", "a b"], ["--host", "0.0.0.0"], ["--user", 'a"b'], ["--user", ""]])
def test_a_host_or_user_that_is_none_is_not_written(slurm: Path, words: list[str]) -> None:
    done = CliRunner().invoke(command, ["--dry-run", *words])
    assert isinstance(done.exception, UserError) and f"{words[1]!r} is no" in str(done.exception)
    assert done.exception.exit_code == 2


def test_a_folder_that_cannot_be_written_says_what_to_do(slurm: Path, snapshot: SnapshotAssertion) -> None:
    done = CliRunner().invoke(command, ["--config", "/proc/unicron/unicron.toml"])
    assert isinstance(done.exception, UserError) and re.sub(r"\(.*\)", "(WHY)", str(done.exception)) == snapshot
