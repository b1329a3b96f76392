"""Stack traces of real processes in the states in which a rank hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support.processes import outside_slurm, state_of, wait_for
from unicron_detector.processes import stacks
from unicron_detector.processes.stacks import Dump

pytestmark = pytest.mark.process

REGISTERED = (
    "import sys; from unicron_detector.processes import stacks; stacks.register(sys.argv[1]); print('up', flush=True)\n"
)
HANGS = {
    "sleeping": "import time\ndef stuck_in_sleep(): time.sleep(60)\nstuck_in_sleep()",
    "gil held": "import ctypes\ndef stuck_with_gil():\n while True: ctypes.PyDLL(None).sleep(60)\nstuck_with_gil()",
    "busy": "def stuck_busy():\n while True: pass\nstuck_busy()",
}


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no py-spy: what every machine has
    running = []

    def run(code: str) -> tuple[int, str]:
        path = str(tmp_path / "stacks")
        process = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, env=outside_slurm())
        running.append(process)
        process.stdout.readline()
        return process.pid, path

    yield run
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


def finish(dump: Dump) -> Dump:
    wait_for(dump.done, "the trace")
    return dump


def stuck(pid: int, path: str) -> None:
    """Wait until it hangs where it is to."""
    wait_for(lambda: "stuck_" in finish(Dump(pid, path)).text, "it is stuck")


@pytest.mark.parametrize("kind", HANGS)
def test_a_hanging_rank_shows_where(start, kind):
    pid, path = start(REGISTERED + HANGS[kind])
    stuck(pid, path)
    for _ in range(2):  # the second trace does not hold the first
        dump = finish(Dump(pid, path))
        assert dump.how == "faulthandler" and dump.text.count("stuck_") == 1, dump.text
    assert stacks.process_state(pid)[0] in "SR"


def test_a_stopped_rank_is_said_to_be_stopped(start):
    pid, path = start(REGISTERED + HANGS["sleeping"])
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: state_of(pid) == "T", "it is stopped")
    dump = finish(Dump(pid, path))
    assert dump.how == "none" and dump.text == "" and dump.state.startswith("T (stopped by a signal")


def test_a_process_without_a_handler_is_not_signalled(start):
    pid, path = start("print('up', flush=True)\n" + HANGS["sleeping"])
    assert not stacks.handles_signal(pid)
    assert finish(Dump(pid, path)).how == "none"
    wait_for(lambda: stacks.process_state(pid).startswith("S"), "it lives: the signal's default would have killed it")


def test_a_dead_process_gives_nothing():
    assert stacks.process_state(2**22 + 1) == ""
    assert finish(Dump(2**22 + 1, "/nonexistent/stacks")).text == ""


def test_py_spy_is_used_where_it_is_and_its_failure_leads_to_the_signal(start, tmp_path):
    pid, path = start(REGISTERED + HANGS["sleeping"])
    stuck(pid, path)
    spy = tmp_path / "py-spy"
    spy.write_text('#!/bin/sh\necho "spied $*"\n')
    spy.chmod(0o755)
    dump = finish(Dump(pid, path))
    assert dump.how == "py-spy" and dump.text == f"spied dump --pid {pid}"
    spy.write_text("#!/bin/sh\nexit 1\n")
    dump = finish(Dump(pid, path))
    assert dump.how == "faulthandler" and "stuck_in_sleep" in dump.text
