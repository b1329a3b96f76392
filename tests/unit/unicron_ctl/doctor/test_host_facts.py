"""What is collected on a host: plugstack.conf, scripts, files; and how it travels from a node."""

from __future__ import annotations

import io
import os
import random
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.fake_programs import program
from unicron_ctl.doctor import host_checks, host_facts, on_nodes, reach_checks
from unicron_ctl.doctor.facts import COMPUTE, HEAD, LOGIN, HostFacts, Inspection, PluginFacts, Question, SiteFacts
from unicron_ctl.doctor.on_nodes import (
    DOOR,
    FACTS,
    Collector,
    Door,
    Wish,
    cannot_reach,
    command,
    groups,
    interpreter,
    own_program,
    pieces,
)
from unicron_ctl.doctor.plugstack import candidates, in_plugin_dir, plugin_facts
from unicron_ctl.doctor.site_facts import find_role, patterns, question_for
from unicron_ctl.shared.settings.config_file import parse
from unicron_ctl.shared.slurm import NodeInfo
from unicron_ctl.shared.slurm.slurm_settings import SlurmSettings

NODE = Inspection(Question(role=COMPUTE))
BUILT = b"\x7fELF\0unicron 0.1.0, built for Slurm 24.11.5\0more"


@pytest.fixture
def plugstack(tmp_path: Path) -> Path:
    """plugstack.conf with a folder, the plugin in it after pyxis."""
    folder = tmp_path / "plugstack.conf.d"
    folder.mkdir()
    (tmp_path / "unicron.so").write_bytes(BUILT)
    (tmp_path / "plugstack.conf").write_text(f"# Slurm's\ninclude {folder}/*\n")
    (folder / "pyxis.conf").write_text("required spank_pyxis.so\n")
    line = f"optional {tmp_path}/unicron.so agent=/opt/u/bin/unicron-agent controller=tcp://head:7451 default=off"
    (folder / "zz-unicron.conf").write_text(f"{line}  # ours\n")
    return tmp_path / "plugstack.conf"


def test_the_plugin_is_found_through_includes(plugstack: Path) -> None:
    found, agent = plugin_facts(["/nonexistent", str(plugstack)], "")
    assert agent == "/opt/u/bin/unicron-agent"
    assert (found.plugstack, found.is_there, found.required) == (str(plugstack), True, False)
    assert (found.release, found.slurm, found.controller) == ("0.1.0", "24.11.5", "tcp://head:7451")
    assert found.late == [] and found.line.startswith("optional ") and "ours" not in found.line


def test_a_container_plugin_behind_ours_is_noted(plugstack: Path) -> None:
    folder = plugstack.parent / "plugstack.conf.d"
    (folder / "pyxis.conf").rename(folder / "zzz-pyxis.conf")
    assert plugin_facts([str(plugstack)], "")[0].late == ["spank_pyxis.so"]


def test_a_name_without_a_folder_lies_in_plugin_dir(plugstack: Path) -> None:
    plugstack.write_text("optional unicron.so agent=/a\n")
    found, agent = plugin_facts([str(plugstack)], str(plugstack.parent))
    assert (found.path, found.is_there, agent) == (str(plugstack.parent / "unicron.so"), True, "/a")
    assert not plugin_facts([str(plugstack)], "/nonexistent")[0].is_there


def test_plugin_dir_is_a_list_with_colons(plugstack: Path) -> None:
    """Seen with 22.05, 24.11 and 26.05: slurmd takes the plugin from the second folder."""
    plugstack.write_text("optional unicron.so agent=/a\n")
    folders = f"/nonexistent:{plugstack.parent}:/tmp"
    found, _ = plugin_facts([str(plugstack)], folders)
    assert (found.path, found.is_there) == (str(plugstack.parent / "unicron.so"), True)
    assert in_plugin_dir(folders, "unicron.so") == str(plugstack.parent / "unicron.so")
    assert in_plugin_dir("/a:/b", "unicron.so") == "/a/unicron.so" and in_plugin_dir("", "x") == "/usr/lib/slurm/x"


def test_without_a_line_or_a_file_there_is_no_plugin(plugstack: Path) -> None:
    plugstack.write_text("required other.so\n")
    assert plugin_facts([str(plugstack)], "") == (PluginFacts(plugstack=str(plugstack)), "")
    assert plugin_facts(["/nonexistent"], "") == (PluginFacts(), "")


def test_an_include_of_itself_ends(plugstack: Path) -> None:
    plugstack.write_text(f"include {plugstack}\n")
    assert plugin_facts([str(plugstack)], "")[0].line == ""


def test_where_plugstack_may_be_of_a_configless_host() -> None:
    assert candidates("", "/run/slurm/conf/slurm.conf", "/var/spool/slurmd") == [
        "/run/slurm/conf/plugstack.conf",
        "/var/spool/slurmd/conf-cache/plugstack.conf",
        "/etc/slurm/plugstack.conf",
    ]
    assert candidates("/x/plugstack.conf", "", "/spool/%n")[0] == "/x/plugstack.conf"


def test_scripts_that_are_ours_or_call_ours_are_known(tmp_path: Path) -> None:
    (tmp_path / "10-site").write_text("#!/bin/sh\n")
    (tmp_path / "50-unicron").write_text("#!/bin/sh\n# Unicron's\n")
    program(tmp_path / "60-calls", "exec /usr/local/sbin/unicron-health")
    found = host_checks.scripts([f"{tmp_path}/*"])
    assert [Path(path).name for path in found.found] == ["10-site", "50-unicron", "60-calls"]
    assert [Path(path).name for path in found.ours] == ["50-unicron", "60-calls"]
    assert [Path(path).name for path in found.blocked] == ["50-unicron"]


def test_health_conf_and_its_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    health, prolog = tmp_path / "health.conf", tmp_path / "prolog.conf"
    monkeypatch.setenv("UNICRON_HEALTH_CONF", str(health))
    monkeypatch.setenv("UNICRON_PROLOG_CONF", str(prolog))
    found = host_checks.health(NODE)
    assert (found.conf, found.seconds, found.python) == ("", 0, "/opt/unicron/bin/python")
    health.write_text("# ours\nUNICRON_PYTHON=/nonexistent/python\n")
    found = host_checks.health(NODE)
    assert (found.python, found.problem, found.seconds) == ("/nonexistent/python", "No such file or directory", 4)
    health.write_text("UNICRON_PYTHON=/bin/false\n")
    prolog.write_text("UNICRON_HEALTH_SECONDS=12\n")
    assert (host_checks.health(NODE).problem, host_checks.health(NODE).seconds) == ("it ended with 1", 12)
    prolog.write_text("UNICRON_CHECK_HEALTH=off\n")
    assert host_checks.health(NODE).seconds == 0


def test_an_agent_is_asked_for_its_release(tmp_path: Path) -> None:
    agent = tmp_path / "unicron-agent"
    asked = Inspection(Question(role=COMPUTE), agent=str(agent))
    assert reach_checks.agent_facts(asked).problem == "No such file or directory"
    program(agent, "echo unicron-agent 0.1.0")
    assert reach_checks.agent_facts(asked).release == "0.1.0"
    agent.write_text("#!/bin/sh\necho no such thing >&2; exit 3\n")
    assert reach_checks.agent_facts(asked).problem == "no such thing"


def test_a_kernel_log_that_a_user_may_not_read(tmp_path: Path) -> None:
    log = tmp_path / "kernel.log"
    asked = Inspection(Question(role=COMPUTE), parse({"agent": {"kmsg": str(log)}}))
    assert not host_checks.kernel_log_facts(asked).is_there
    log.write_text("")
    log.chmod(0o640)
    assert not host_checks.kernel_log_facts(asked).readable
    log.chmod(0o644)
    assert host_checks.kernel_log_facts(asked).readable


def test_containers_mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "ENROOT_MOUNTS", str(tmp_path / "mounts.d"))
    monkeypatch.setattr(host_checks, "APPTAINER_CONF", str(tmp_path / "apptainer.conf"))
    (tmp_path / "mounts.d").mkdir()
    asked = Inspection(Question(role=COMPUTE), agent="/opt/unicron/bin/unicron-agent")
    (tmp_path / "apptainer.conf").write_text("# bind path = /opt/unicron\n")
    found = host_checks.container_facts(asked)
    assert found.enroot and not found.enroot_mounts and found.apptainer and not found.apptainer_binds
    (tmp_path / "mounts.d" / "50-unicron.fstab").write_text(f"# ours\n{tmp_path}/unicron /opt none bind\n")
    (tmp_path / "apptainer.conf").write_text("bind path = /opt/unicron\n")
    found = host_checks.container_facts(asked)
    assert found.enroot_mounts and found.enroot_missing == [f"{tmp_path}/unicron"] and found.apptainer_binds


def test_this_host_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unicron_ctl.doctor.reach_checks.ASK_SECONDS", 0.3)
    facts = host_facts.collect(Question(role=LOGIN, users=["root", "no-such-user"], controller="tcp://127.0.0.1:1"))
    assert facts.users == {"root": 0, "no-such-user": None}
    assert facts.shm.size > 0 and facts.limits["nofile"] > 0 and facts.limits.keys() == {"nofile", "memlock", "core"}
    assert facts.uid == os.geteuid() and facts.python and facts.controller.problem and facts.controller.tcp is False


# ------------------------------------------------------------------------------------------------------------ travel


def test_pieces_of_several_nodes_may_mix() -> None:
    sent = {name: on_nodes.encode(HostFacts(name=name, role=COMPUTE, python=name * 700)) for name in ("n1", "n2")}
    noise = random.Random(1)
    sent = {name: data + noise.randbytes(3000).hex().encode() for name, data in sent.items()}
    lines = [line for name, data in sent.items() for line in pieces(name, FACTS, data)]
    assert len(lines) > 8 and max(map(len, lines)) < 700
    noise.shuffle(lines)
    collector = Collector(sent)
    lines = ["srun: job 5 queued", *lines, "unicron-doctor: n1"]
    got = [found for line in lines if (found := collector.add_line(line))]
    assert {name: data for name, _, data in got} == sent


BROKEN = (
    "",
    "unicron-doctor: n1 facts 0 1 !!!!",
    "unicron-doctor: n1 facts x 1 aaaa",
    f"unicron-doctor: n1 facts {'9' * 5000} 1 aaaa",
    "unicron-doctor: n1 facts 0 999999 aaaa",
    pieces("another", FACTS, b"{}")[0],
    pieces("n1", "kind", b"{}")[0],
    pieces("n1", FACTS, b"0" * (on_nodes.MOST_FACTS + 1))[-1],
)


@pytest.mark.parametrize("line", BROKEN)
def test_a_line_that_is_broken_or_too_much_is_none(line: str) -> None:
    assert Collector({"n1"}).add_line(line) is None


def test_a_little_that_unpacks_to_very_much_is_none() -> None:
    collector = Collector({"n1"})
    lines = pieces("n1", FACTS, bytes(64 << 20))
    assert len(lines) < on_nodes.MOST_PIECES and [collector.add_line(line) for line in lines] == [None] * len(lines)


def asked(printed: str) -> on_nodes.NodeAnswers:
    """What is gathered where the step on n1 and n2 prints this."""
    asking = on_nodes.Asking(Question(role=COMPUTE), on_nodes.Wish(), {}, {})
    with ThreadPoolExecutor(1) as doors:
        asking._read(on_nodes._lines(io.StringIO(printed)), {"n1", "n2"}, doors)
    return asking._found


def test_what_a_step_writes_is_bounded_and_safe_for_a_terminal() -> None:
    written = io.StringIO("x" * (2 * on_nodes.MOST_ERRORS))
    assert [len(said) for said in on_nodes._errors(written)] == [on_nodes.MOST_ERRORS] and not written.read()
    asking = on_nodes.Asking(Question(role=COMPUTE), on_nodes.Wish(), {}, {})
    asking._note_silent(["n1"], "srun: \x1b]0;gone\x07\n", late=False)
    assert asking._found.silent["n1"].isprintable() and "srun: " in asking._found.silent["n1"]


def test_a_node_speaks_for_itself_once_and_ends_nothing() -> None:
    lines = pieces("n1", FACTS, on_nodes.encode(HostFacts(name="login1", role="head", python="3.11")))
    doors = [*pieces("n1", DOOR, b"nonsense"), *pieces("n2", DOOR, b"99999")]
    found = asked("\n".join(["x" * 100_000, *lines, *lines, *doors, ""]))
    assert [(host.name, host.role, host.python) for host in found.hosts] == [("n1", COMPUTE, "3.11")]
    assert found.doors == {}
    assert max(map(len, on_nodes._lines(io.StringIO("x" * 100_000)))) == on_nodes.LINE


def test_a_door_greets_and_a_closed_port_says_why() -> None:
    door = Door.open_if(5.0)
    assert door is not None and Door.open_if(0.0) is None
    serving = threading.Thread(target=door.serve, args=(5.0,))
    serving.start()
    assert cannot_reach("127.0.0.1", door.port, on_nodes.GREETING) == ""
    serving.join(5.0)
    assert cannot_reach("127.0.0.1", door.port) == "Connection refused"
    with socket.create_server(("127.0.0.1", 0)) as other:
        serving = threading.Thread(target=lambda: other.accept()[0].close())
        serving.start()
        assert "another program" in cannot_reach("127.0.0.1", other.getsockname()[1], on_nodes.GREETING)
        serving.join(5.0)


def node(name: str, *states: str, partitions: tuple[str, ...] = ("gpu",)) -> NodeInfo:
    return NodeInfo(name, frozenset(states), "", "10.0.0.1", 6818, 0.0, 8, partitions)


def test_nodes_with_room_are_asked_and_the_others_are_named() -> None:
    nodes = [
        node("n1", "IDLE"),
        node("n2", "IDLE", partitions=("cpu", "gpu")),
        node("n3", "MIXED"),
        node("n4", "ALLOCATED"),
        node("n5", "IDLE", "DRAIN"),
        node("n6", "IDLE", partitions=("off",)),
    ]
    steps, left_out = groups(nodes, ["gpu", "cpu"])
    assert steps == [("gpu", ["n1", "n2"]), ("gpu", ["n3"])]
    assert left_out.keys() == {"n4", "n5"} and "in use" in left_out["n4"]


def test_a_step_is_one_task_on_each_node() -> None:
    question = Question(role=COMPUTE, config=TOML, users=["slurm"], door=60.0)
    line = command("gpu", ["n1", "n2"], question, Wish(interpreter("/p"), seconds=90.0, queue=7), "t")
    assert {"--nodes=2", "--nodelist=n1,n2", "--ntasks=2", "--partition=gpu", "--immediate=7"} <= set(line)
    assert line[-5:-1] == ["/p", "-P", "-m", "unicron_ctl.doctor.host_facts"]
    assert on_nodes.decode_question(line[-1]) == question


def test_the_step_is_this_program_or_its_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["-c"])
    assert own_program() == interpreter(sys.executable)
    (tmp_path / "unicronctl").touch(mode=0o755)
    monkeypatch.setattr("sys.argv", [str(tmp_path / "unicronctl"), "doctor"])
    assert own_program() == (f"{tmp_path}/unicronctl", "doctor", "--step")


TOML = "/etc/unicron/unicron.toml"


# -------------------------------------------------------------------------------------------------------------- roles


@pytest.fixture
def no_daemons(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The programs that run on this host, as the doctor sees them."""
    running: set[str] = set()
    monkeypatch.setattr("unicron_ctl.doctor.site_facts.processes", lambda name: [Path("/")] if name in running else [])
    return running


def test_a_host_knows_what_it_is(no_daemons: set[str]) -> None:
    config = parse({"controller": {"address": "tcp://192.0.2.1:7451"}})
    assert find_role(SiteFacts(), config, {}) == LOGIN
    assert find_role(SiteFacts(), config, {"SLURMD_NODENAME": "n1"}) == COMPUTE
    here = socket.gethostname().split(".")[0]
    assert find_role(SiteFacts(nodes=(node(here, "IDLE"),)), config, {}) == COMPUTE
    assert find_role(SiteFacts(settings=SlurmSettings({"SlurmctldHost": f"x,{here}"})), config, {}) == HEAD
    assert find_role(SiteFacts(), parse({"controller": {"address": "tcp://127.0.0.1:7451"}}), {}) == HEAD
    no_daemons.add("slurmd")
    assert find_role(SiteFacts(), config, {}) == COMPUTE
    no_daemons.add("unicrond")
    assert find_role(SiteFacts(), config, {}) == HEAD


def test_a_question_names_what_slurm_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    texts = {"Prolog": "prolog.d/*", "SLURM_CONF": "/run/slurm/conf/slurm.conf", "SlurmUser": "slurm(64030)"}
    asked = question_for(COMPUTE, SiteFacts(settings=SlurmSettings(texts), controller_name="unicron"))
    assert asked.users == ["slurm", "unicron"] and asked.prolog == ["/run/slurm/conf/prolog.d/*"]
    assert patterns(SlurmSettings({"Prolog": "/a/*,/b"}), "Prolog") == ["/a/*", "/b"]
