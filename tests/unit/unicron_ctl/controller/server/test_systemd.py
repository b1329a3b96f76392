"""What unicrond tells systemd, over a real socket."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from unicron_ctl.controller.server.systemd import SystemdNotifier
from unicron_ctl.controller.server.worker import VERIFIERS, WORKERS


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """Stands for systemd."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.setblocking(False)
        yield listening


def heard(manager: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(manager.recv(4096).decode())
        except BlockingIOError:
            return found


def address(manager: socket.socket) -> str:
    return str(manager.getsockname())


def test_start_reload_and_stop(manager: socket.socket) -> None:
    notifier = SystemdNotifier({"NOTIFY_SOCKET": address(manager)})
    notifier.ready()
    notifier.reloading()
    notifier.stopping()
    ready, reloading, stopping = heard(manager)
    assert (ready, stopping) == ("READY=1", "STOPPING=1")
    assert re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d+", reloading)


def test_a_long_start_has_systemd_wait_on(manager: socket.socket) -> None:
    notifier = SystemdNotifier({"NOTIFY_SOCKET": address(manager)})
    for now in (0.0, 0.1, 0.9, 1.0, 1.5, 2.5):
        notifier.starting(now)
    assert heard(manager) == ["EXTEND_TIMEOUT_USEC=30000000\nWATCHDOG=1"] * 3


def test_an_abstract_address() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0unicron-test-{os.getpid()}")
        SystemdNotifier({"NOTIFY_SOCKET": f"@unicron-test-{os.getpid()}"}).ready()
        assert listening.recv(100) == b"READY=1"


def test_the_watchdog_hears_twice_per_period(manager: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": address(manager), "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}
    notifier = SystemdNotifier(environment)
    assert notifier.watchdog_seconds == 30.0
    times = []
    for tenth in range(0, 600):
        notifier.watchdog(1000.0 + tenth / 10)
        times += [tenth / 10] * len(heard(manager))
    assert times == [0.0, 15.0, 30.0, 45.0]


@pytest.mark.parametrize(("period", "process"), [(None, ""), ("0", ""), ("-5", ""), ("soon", ""), ("30000000", "1")])
def test_no_watchdog_waits_for_this_process(manager: socket.socket, period: str | None, process: str) -> None:
    variables = {"NOTIFY_SOCKET": address(manager), "WATCHDOG_USEC": period, "WATCHDOG_PID": process}
    notifier = SystemdNotifier({name: value for name, value in variables.items() if value})
    notifier.watchdog(1.0)
    assert heard(manager) == [] and notifier.watchdog_seconds == 0.0


def test_without_systemd_nothing_happens(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address(manager))  # of another process
    here = {"NOTIFY_SOCKET": address(manager)}
    for where, messages in ((here, ["READY=1", "WATCHDOG=1", "STOPPING=1"]), ({}, [])):
        notifier = SystemdNotifier({"WATCHDOG_USEC": "1000000", **where})
        notifier.ready()
        notifier.watchdog(1.0)
        notifier.stopping()
        assert heard(manager) == messages


def test_a_manager_that_is_gone_is_complained_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, snapshot: SnapshotAssertion
) -> None:
    notifier = SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "gone"), "WATCHDOG_USEC": "2000000"})
    with caplog.at_level(logging.WARNING):
        notifier.ready()
        for turn in range(5):
            notifier.watchdog(float(turn))
        SystemdNotifier({"NOTIFY_SOCKET": "/" + "x" * 200}).ready()
    assert [record.getMessage() for record in caplog.records] == snapshot


def test_a_manager_that_does_not_read_is_not_waited_for(manager: socket.socket) -> None:
    notifier = SystemdNotifier({"NOTIFY_SOCKET": address(manager), "WATCHDOG_USEC": "2000000"})
    for _ in range(1000):
        notifier.ready()  # fills its queue
    heard_none_of = len(heard(manager))
    assert heard_none_of < 1000
    notifier.watchdog(1.0)
    assert heard(manager) == ["WATCHDOG=1"], "it is tried again at the next turn"


def test_the_unit_bounds_memory_and_tasks_and_lets_a_long_log_be_read() -> None:
    unit = (Path(__file__).resolve().parents[5] / "slurm_plugin" / "systemd" / "unicrond.service").read_text()
    service = unit[unit.index("[Service]") : unit.index("[Install]")]
    found = dict(line.split("=", 1) for line in service.splitlines() if "=" in line and not line.startswith("#"))
    assert found["MemoryMax"] == "4G" and int(found["TasksMax"]) > WORKERS + VERIFIERS + 64
    assert int(found["TimeoutStartSec"]) >= 600
