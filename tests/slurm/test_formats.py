"""Each of our questions to Slurm's programs is answered in its first form: nothing is asked again in another one, and
nothing is read as unknown. What releases that are not installed here print: docs/behaviour/slurm-formats.md. sacct and
sacctmgr: test_history.py."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.processes import outside_slurm
from unicron_ctl.agent.connections.signals import proctrack_type
from unicron_ctl.agent.ranks import static_world
from unicron_ctl.lab.cluster import LocalCluster
from unicron_ctl.shared.slurm import CommandLineClient, ElementInfo
from unicron_ctl.shared.slurm.host_lists import fold, hosts

pytestmark = pytest.mark.slurm
Wait = Callable[..., ElementInfo]
Submit = Callable[..., str]


class Asked(CommandLineClient):
    """Counts how often each program runs."""

    def __init__(self, env: dict[str, str]) -> None:
        super().__init__(env)
        self.commands: list[list[str]] = []

    def _output(self, command: list[str]) -> bytes:
        self.commands.append(command)
        return super()._output(command)


@pytest.fixture
def asked(cluster: LocalCluster, caplog: pytest.LogCaptureFixture) -> Iterator[Asked]:
    """No answer leads to a warning."""
    with caplog.at_level(logging.INFO, "unicron.slurm"):
        yield Asked(cluster.env())
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.fixture
def answered(asked: Asked, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """answered(*words) is what a program prints, by lines."""
    monkeypatch.setenv("SLURM_CONF", cluster.env()["SLURM_CONF"])

    def call(*words: str) -> list[str]:
        done = subprocess.run(words, env=outside_slurm() | cluster.env(), capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return call


def test_nodes_reservations_and_partitions(asked: Asked, cluster: LocalCluster) -> None:
    nodes = asked.nodes()
    assert [node.name for node in nodes] == [*cluster.spec.node_names] and all(node.heard for node in nodes)
    assert all(node.slurmd_start and node.partitions and node.address and node.gres == "gpu:1" for node in nodes)
    assert [(one.name, one.nodes, one.state) for one in asked.partitions()] == [("main", len(nodes), "UP")]
    shown = [command[-1] for command in asked.commands]
    assert sorted(shown) == ["config", "node", "partition", "partition", "reservation"], "with the nodes, and asked for"


def test_settings_are_all_read(asked: Asked, answered: Callable[..., list[str]]) -> None:
    settings = asked.settings()
    assert settings.release == asked.version() == answered("sinfo", "--version")[0].split()[-1]
    assert (asked.kill_wait(), settings.seconds("KillWait")) == (2.0, 2.0)
    for name in ("SlurmdTimeout", "MessageTimeout", "MinJobAge", "BatchStartTimeout", "UnkillableStepTimeout"):
        assert settings.seconds(name), name
    assert asked.private_data() == set() and asked.shrinks() and asked.return_to_service() in (0, 1, 2)
    assert settings.head_hosts() and settings.user()[1] == os.getuid() and proctrack_type().startswith("proctrack/")
    assert asked.grace() == {} and asked.domains() == {}


def test_host_lists_are_folded_and_unfolded_as_slurm_does(asked: Asked, answered: Callable[..., list[str]]) -> None:
    for names in ("n[8-10]", "n1-ib,n2-ib", "r1n[1-2],r2n[1-2]", "n[8-10,011-012]", "login,n07"):
        assert asked.hostnames(names) == hosts(names) == answered("scontrol", "show", "hostnames", names)
        assert hosts(answered("scontrol", "show", "hostlist", ",".join(hosts(names)))[0]) == hosts(names)
        assert sorted(hosts(fold(hosts(names)))) == sorted(hosts(names))


def test_elements_and_what_is_asked_about_one(
    asked: Asked, submit: Submit, wait_until: Wait, answered: Callable[..., list[str]]
) -> None:
    array, plain = submit("--array=0-1", "--comment=mine"), submit("--hold")
    wait_until(asked, array, 1, "RUNNING")
    asked.commands.clear()
    found = {(info.job, info.element): info for info in asked.elements([array, plain])}
    assert sorted(found) == sorted([(array, 0), (array, 1), (plain, 0)])
    assert all(command[0] == "squeue" for command in asked.commands) and len(asked.commands) <= 4, "no second form"
    assert found[plain, 0].held and found[array, 1].comment == "mine" and found[array, 1].submitted > time.time() - 3600
    assert (asked._id(plain, 0), asked._id(array, 1), asked._state(array, 1)) == (plain, f"{array}_1", "RUNNING")
    wait_until(asked, array, 0, "RUNNING")
    running = static_world._running(array, 1)
    assert running == {
        element: found.node for element in (0, 1) if (found := wait_until(asked, array, element, "RUNNING"))
    }
    assert static_world._address(running[0]) == "127.0.0.1"
    shown = "\n".join(answered("scontrol", "--local", "show", "job", f"{array}_1"))
    assert re.findall(r"^\s*StdOut=(.+?)\s*$", shown, re.MULTILINE)[0].endswith(f"{array}_1.out"), "patterns replaced"
    assert answered("squeue", "--local", "-h", "-o", "%U", "-j", array)[0] == str(os.getuid())
