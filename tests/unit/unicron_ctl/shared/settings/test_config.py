"""`unicron.toml`: what it may say, and that everything wrong with it is said at once."""

from __future__ import annotations

import math
import re
import socket
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from unicron_ctl.shared.protocol.client import ask_controller
from unicron_ctl.shared.settings.config import (
    AgentConfig,
    Config,
    ControllerConfig,
    listen_problem,
    port_notes,
    problems,
)
from unicron_ctl.shared.settings.config_file import examine, load, parse, parse_sections, search_path
from unicron_ctl.shared.settings.places import controller_address, is_guess, state_dir
from unicron_ctl.shared.system.errors import UserError

ANY_ENVIRONMENT: dict[str, str] = {}


def test_the_defaults_contradict_nothing() -> None:
    assert problems(ControllerConfig(), ANY_ENVIRONMENT) == [] and problems(AgentConfig()) == []


WRONG = (
    "[controller]\nheartbeat_period = 0",
    "[controller]\nheartbeat_period = 0.005",
    "[controller]\nlease_periods = 1.0",
    "[controller]\nheartbeat_period = 20",
    "[controller]\nreport_timeout = 0.2",
    "[controller]\nrestart_grace = 0.1",
    "[controller]\nrepeat_seconds = inf",
    "[controller]\nrepeat_seconds = nan",
    "[controller]\nrestart_seconds = 0.0",
    "[controller]\nregroup_seconds = 5.0",
    "[controller]\nfault_grace = 10.0",
    "[controller]\nslurm_timeout = 400.0",
    "[controller]\nmetrics_seconds = 0.5",
    '[controller]\naddress = ["tcp://a:1", "tcp://b:1"]\nmetrics = "a:7453"',
    "[controller]\nmax_isolated_share = 1.5",
    "[controller]\nmax_isolated_nodes = -1",
    "[controller]\nauth = 'trust'",
    "[controller]\nadmission = 'no'",
    "[controller]\nlisten = 'here'",
    "[controller]\nhearbeat_period = 1",
    "[controller]\nallow_inject = 'yes'",
    "[controller]\nadmins = 'root'",
    "[agent]\nlink_seconds = 0.0",
    "[agent]\nkernel = '/dev/kmsg'",
    "[controler]\n",
    "controller = 3",
    "severity = 3",
    "[health]\ngpuz = 8",
    "[health]\ngpus = -8",
    "[health]\nskip = 'gpu'",
    "[health]\nskip = ['gpus']",
    "[planner]\ncomparee = 'user'",
    "[[severity.rule]]\nid = 'a'\nfoo = 1",
    "[controller]\naddress = 'tcp://a b:7451'",
    "[controller",
)


def test_a_wrong_file_gives_one_line_that_names_the_key(tmp_path: Path, snapshot) -> None:
    path, messages = tmp_path / "unicron.toml", {}
    for text in WRONG:
        path.write_text(text)
        with pytest.raises(UserError) as caught:
            load(path)
        line = str(caught.value)
        assert line.startswith(f"{path}: ") and "\n" not in line and caught.value.exit_code == 2
        messages[text.replace("\n", " ")] = re.sub("(: not TOML).*", r"\1", line.replace(str(path), "FILE"))
    assert messages == snapshot


def test_of_notify_only_unicrond_is_told_what_is_wrong(tmp_path: Path, snapshot) -> None:
    """Defect: a mistake in an address of mail left all jobs unprotected, for agents read the same file."""
    path = tmp_path / "unicron.toml"
    path.write_text("[notify]\nkinds = ['admn']\nmail = ['ops']\n[agent]\nlink_seconds = 7.0\n")
    assert load(path).agent.link_seconds == 7.0
    found = examine(path, ANY_ENVIRONMENT)[1]
    assert found == snapshot
    path.write_text("[notify]\nkinds = ['admn']\n[agent]\nlink_seconds = 0.0\n")
    with pytest.raises(UserError, match="link_seconds = 0 must be"):
        load(path)


def test_a_file_without_text_in_utf8_or_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"a = '\xe9'")
    with pytest.raises(UserError, match="not TOML"):
        load(tmp_path / "latin.toml")
    with pytest.raises(UserError, match="name an existing file"):
        load(tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("settings", "listen", "fine"),
    [
        ('auth = "none"', None, False),
        ('auth = "none"', "tcp://192.0.2.1:7451", False),
        ('auth = "none"\nlisten = "tcp://*:7451"', None, False),
        ('auth = "none"', "tcp://127.0.0.1:0", True),
        ('auth = "none"\nlisten = "tcp://[::1]:7451"', None, True),
        ('public_key = "none"', None, False),
        ("", None, True),
    ],
)
def test_without_munge_only_this_machine_is_served(
    tmp_path: Path, settings: str, listen: str | None, fine: bool
) -> None:
    path = tmp_path / "unicron.toml"
    path.write_text(f"[controller]\n{settings}\n")
    _, found = examine(path, ANY_ENVIRONMENT, listen)
    assert (found == []) == fine and len(found) < 2, found
    load(path)  # others than the controller read the file as well


def test_all_that_is_wrong_is_found_at_once(tmp_path: Path, snapshot) -> None:
    path = tmp_path / "unicron.toml"
    path.write_text(
        "[controller]\nheartbeat_period = 20\nhearbeat = 1\nallow_inject = 'yes'\nauth = 'x'\n"
        "max_holds_per_minute = -1\nrestart_seconds = 1200\n[agent]\nlink_seconds = 0\n[extra]\n"
    )
    _, found = examine(path, ANY_ENVIRONMENT)
    with pytest.raises(UserError) as refused:
        load(path)
    assert [*found, str(refused.value).replace(str(path), "FILE")] == snapshot


def test_a_value_out_of_range_breaks_no_rule_besides() -> None:
    assert len(problems(ControllerConfig(report_timeout=-1.0), ANY_ENVIRONMENT)) == 1
    assert len(problems(ControllerConfig(heartbeat_period=1e9), ANY_ENVIRONMENT)) == 1


def test_without_slurm_its_time_outs_do_not_matter() -> None:
    settings: dict[str, Any] = {"isolate_seconds": 3.0}
    assert problems(ControllerConfig(**settings)) and not problems(ControllerConfig(slurm="none", **settings))


def test_only_unicrond_checks_against_the_limits_of_agents_and_ranks(tmp_path: Path, snapshot) -> None:
    """An agent that refuses its configuration would leave its job unprotected."""
    path = tmp_path / "unicron.toml"
    path.write_text("[controller]\nreport_timeout = 5\n")
    assert load(path).controller.report_timeout == 5.0
    assert examine(path, ANY_ENVIRONMENT)[1] == snapshot


def test_a_variable_that_the_site_sets_counts(snapshot) -> None:
    config = ControllerConfig(restart_seconds=900.0)
    assert problems(config, {"UNICRON_PLAN_TIMEOUT": "1200"}) == []
    assert problems(config, {"UNICRON_PLAN_TIMEOUT": "soon"}) == snapshot


def every_number() -> list[msgspec.structs.FieldInfo]:
    fields = (*msgspec.structs.fields(ControllerConfig), *msgspec.structs.fields(AgentConfig))
    return [field for field in fields if type(field.default) in (int, float)]


@pytest.mark.parametrize("field", every_number(), ids=lambda field: field.name)
def test_every_number_has_a_range(field: msgspec.structs.FieldInfo) -> None:
    section = AgentConfig if field.name in ("link_seconds", "audit", "compare") else ControllerConfig
    for value in (-1.0, 1e12, math.inf, math.nan):
        settings: dict[str, Any] = {field.name: value}
        assert any(problem.startswith(f"{field.name} = ") for problem in problems(section(**settings))), value


LISTEN = {  # address -> the end of its problem
    **dict.fromkeys(("tcp://0.0.0.0:7451", "tcp://*:0", "tcp://[::1]:65535", "tcp://[::]:7451"), ""),
    "tcp://::1:7451": "as in tcp://[::1]:7451",
    **dict.fromkeys(("tcp://:::7451", "tcp://[fd00::x]:7451", "tcp://[head]:7451"), "as in tcp://[::]:7451"),
    **dict.fromkeys(("", "7451", "tcp://a", "udp://a:1", "tcp://a:65536"), "write tcp://ADDRESS:PORT"),
    **dict.fromkeys(("tcp://a:²", "tcp://a:٣", "tcp:// :1"), "write tcp://ADDRESS:PORT"),
}


@pytest.mark.parametrize(("listen", "problem"), LISTEN.items())
def test_addresses_to_listen_on(listen: str, problem: str) -> None:
    found = listen_problem(listen)
    assert found.endswith(problem) and bool(found) is bool(problem)


def test_the_option_takes_the_place_of_the_files_address(tmp_path: Path) -> None:
    path = tmp_path / "unicron.toml"
    path.write_text("[controller]\nlisten = 'here'\n")
    config, found = examine(path, ANY_ENVIRONMENT, listen="tcp://a:1")
    assert (config.controller.listen, found) == ("tcp://a:1", [])


def test_whole_numbers_are_numbers() -> None:
    config = parse({"controller": {"heartbeat_period": 2}, "health": {"timeout": 2}, "severity": {"rule": []}})
    assert config.controller.heartbeat_period == 2.0 and config.health.timeout == 2.0
    assert parse_sections({}) == (Config(), [])


def test_whose_flops_are_compared_is_one_of_three(snapshot) -> None:
    assert parse({}).controller.planner.compare == "user"
    assert parse({"planner": {"compare": "flops"}}).controller.planner.compare == "flops"
    messages = []
    for wrong in ({"compare": "all"}, {"compares": "flops"}, 1):
        with pytest.raises(UserError) as refused:
            parse({"planner": wrong})
        messages.append(str(refused.value))
    assert messages == snapshot


def test_where_the_file_and_the_controller_are_found(tmp_path: Path) -> None:
    path = tmp_path / "u.toml"
    path.write_text(f"[controller]\nstate_dir = '{tmp_path}'\nlisten = 'tcp://0.0.0.0:7000'\nheartbeat_period = 2\n")
    assert load(environment={"UNICRON_CONFIG": str(path)}).controller.heartbeat_period == 2.0
    with pytest.raises(UserError, match="no such file"):
        load(environment={"UNICRON_CONFIG": str(tmp_path / "missing")})
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    assert search_path(home)[0] == tmp_path / "unicron" / "unicron.toml"
    config = load(path)
    assert state_dir(config, home) == tmp_path
    assert is_guess(None, config, {})
    assert controller_address("tcp://a:1", config, {}) == "tcp://a:1"
    assert controller_address(None, config, {"UNICRON_CONTROLLER": "tcp://b:2"}) == "tcp://b:2"
    assert controller_address(None, config, {}) == "tcp://127.0.0.1:7000"
    (tmp_path / "address").write_text("tcp://c:3\n")
    assert controller_address(None, config, {}) == "tcp://c:3"
    assert not is_guess(None, config, {})


def test_a_login_node_asks_the_host_that_the_file_names(tmp_path: Path) -> None:
    """It has the head node's file, but neither its state folder nor its port on 127.0.0.1."""
    section = f"[controller]\nstate_dir = '{tmp_path}/none'\n"
    config = parse(tomllib.loads(section + "listen = 'tcp://0.0.0.0:7451'\naddress = 'tcp://head:7451'\n"))
    assert controller_address(None, config, {}) == "tcp://head:7451" and not is_guess(None, config, {})
    for listen in ("tcp://0.0.0.0:7451", "tcp://*:7451", "tcp://[::]:7451"):
        config = parse(tomllib.loads(f"{section}listen = '{listen}'"))
        assert controller_address(None, config, {}) == "tcp://127.0.0.1:7451" and is_guess(None, config, {})
    config = parse(tomllib.loads(f"{section}listen = 'tcp://10.0.0.7:7451'"))
    assert controller_address(None, config, {}) == "tcp://10.0.0.7:7451" and not is_guess(None, config, {})


@pytest.mark.parametrize("address", ["head", "tcp://0.0.0.0:7451", "tcp://*:1", "tcp://head:0", "tcp://:7451"])
def test_an_address_that_nobody_can_reach_is_refused(address: str, snapshot) -> None:
    assert problems(ControllerConfig(address=address)) == snapshot


def test_where_nothing_says_which_host_the_error_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    (tmp_path / "u.toml").write_text(
        f"[controller]\nstate_dir = '{tmp_path}/none'\nlisten = 'tcp://0.0.0.0:{port}'\nauth = 'none'\n"
    )
    monkeypatch.setenv("UNICRON_CONFIG", str(tmp_path / "u.toml"))
    monkeypatch.delenv("UNICRON_CONTROLLER", raising=False)
    with pytest.raises(UserError) as refused:
        ask_controller({"kind": "ping"}, timeout=0.1)
    assert str(refused.value) == snapshot


def test_what_is_shipped_names_the_port_on_which_unicrond_listens() -> None:
    shipped = Path(__file__).resolve().parents[5] / "slurm_plugin" / "plugstack.conf.d" / "zz-unicron.conf"
    (line,) = [line for line in shipped.read_text().splitlines() if not line.startswith("#")]
    (address,) = [word.removeprefix("controller=") for word in line.split() if word.startswith("controller=")]
    assert address.rpartition(":")[2] == ControllerConfig().listen.rpartition(":")[2]


def test_a_standby_is_a_second_address(snapshot) -> None:
    both = ["tcp://head1:7451", "tcp://head2:7451"]
    for given in (both, ", ".join(both)):
        config = parse({"controller": {"address": given}})
        assert config.controller.addresses == both and not is_guess(None, config, {})
        assert controller_address(None, config, {}) == "tcp://head1:7451,tcp://head2:7451"
    assert parse({}).controller.addresses == []
    assert problems(ControllerConfig(address=[both[0], "head2"]))[0].startswith('address = "head2": write tcp://')
    assert problems(ControllerConfig(address=[both[0]] * 2)) == snapshot
    assert "the most" in problems(ControllerConfig(address=[f"tcp://h{n}:1" for n in range(5)]))[0]


def test_an_address_with_another_port_than_listen_is_told_of(snapshot) -> None:
    """Defect: agents tried a port at which nobody listened, and nothing said so. A forwarded port is no mistake."""
    two = ["tcp://head1:7451", "tcp://[fd00::2]:7000"]
    config = parse({"controller": {"address": two, "listen": "tcp://0.0.0.0:7451"}})
    (line,) = port_notes(config.controller)
    assert line == snapshot
    for section in ({"address": two[0]}, {"listen": "tcp://0.0.0.0:9000"}, {"address": two, "listen": "tcp://*:0"}):
        assert port_notes(ControllerConfig(**section)) == [], section  # type: ignore[arg-type]
