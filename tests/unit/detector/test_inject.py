"""The rank's side of fault injection; what would end or stop a process does so in one of its own."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from detector import blackhole, cage
from detector.classify import default_classifier
from detector.inject import EXCEPTIONS, FAULTS, InjectError, Injector, parse

EXPECTED = {
    "python": ("application", 2),
    "cuda": ("unknown", 2),
    "cuda-oom": ("application", 2),
    "ecc": ("hardware", 1),
    "nccl": ("network", 2),
    "connection-reset": ("network", 2),
    "file-system": ("storage", 2),
    "disk-full": ("storage", 2),
}


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_an_injected_exception_is_what_the_table_takes_it_for(kind):
    """An exception ends the process, so it is never milder than SEV2."""
    error, text = EXCEPTIONS[kind]
    verdict = default_classifier().exit(1, f"{error.__name__}: {text}")
    assert (verdict.scope, int(verdict.severity)) == EXPECTED[kind], verdict


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("", "no fault is called ''"),
        ("typo", "use one of rank-kill, exception"),
        ("exception", "exception:cuda"),
        ("exception:typo", "exception:ecc"),
        ("slow", "write a factor above 1"),
        ("slow:0.5", "write a factor above 1"),
        ("slow:nan", "write a factor above 1"),
        ("rank-kill:9", "write rank-kill"),
        ("full-disk:2", "write full-disk"),
    ],
)
def test_wrong_faults_say_what_is_right(fault, says):
    with pytest.raises(InjectError, match=None) as caught:
        parse(fault)
    assert says in str(caught.value)


def test_every_fault_can_be_named():
    details = {"exception": ":ecc", "slow": ":2"}
    assert [parse(name + details.get(name, ""))[0] for name in FAULTS] == list(FAULTS)


def test_an_exception_strikes_once_at_the_next_micro_batch():
    injector = Injector()
    injector.point()
    injector.take({"kind": "inject", "fault": "exception:connection-reset"})
    with pytest.raises(ConnectionResetError, match="Connection reset by peer"):
        injector.point()
    injector.point()


def test_a_slow_rank_takes_so_many_times_as_long_for_a_while():
    slept, now = [], [100.0]
    injector = Injector(clock=lambda: now[0], sleep=slept.append)
    injector.slow_down(0.2)
    injector.take({"fault": "slow:2.5", "seconds": 10.0})
    injector.slow_down(0.2)
    now[0] = 110.5
    injector.slow_down(0.2)
    assert slept == [pytest.approx(0.3)]


def test_a_lost_network_breaks_the_connections():
    injector, broken = Injector(), []
    injector.break_connections = lambda: broken.append(1)
    injector.take({"fault": "lost-network"})
    assert broken == [1]


def run(code: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, env=environment, check=False
    )


def test_out_of_memory_is_the_ranks_own_and_leaves_it_able_to_report():
    code = (
        "from detector.inject import Injector\ni = Injector()\ni.take({'fault': 'oom'})\n"
        "try: i.point()\nexcept MemoryError as e: print('reported', len(bytearray(200 << 20)), e)"
    )
    done = run(code)
    assert done.stdout.startswith("reported 209715200 the rank reached its limit of"), done


def test_the_interpreters_lock_is_held():
    code = (
        "import threading, time\nfrom detector.inject import hold_gil\nticks = []\n"
        "def tick():\n while True: ticks.append(time.monotonic()); time.sleep(0.01)\n"
        "threading.Thread(target=tick, daemon=True).start(); time.sleep(0.1)\n"
        "b = time.monotonic(); hold_gil(0.6); e = time.monotonic()\n"
        "print(e - b, sum(b + 0.05 < t < e - 0.05 for t in ticks))"
    )
    began = time.monotonic()
    took, ticked = run(code).stdout.split()
    assert 0.6 <= float(took) < time.monotonic() - began and int(ticked) == 0


def test_a_full_disk_is_the_kernels_own_error():
    injector = Injector()
    injector.take({"fault": "full-disk"})
    with pytest.raises(OSError, match="No space left on device") as caught:
        injector.point()
    assert caught.value.errno == errno.ENOSPC
    assert default_classifier().text(f"OSError: {caught.value}").cause == "disk_full"
    injector.point()


def test_a_corrupted_checkpoint_is_sent_once_for_every_order():
    injector = Injector()
    assert not injector.spoils_transfer()
    injector.take({"fault": "corrupt-checkpoint"})
    injector.take({"fault": "corrupt-checkpoint"})
    assert [injector.spoils_transfer() for _ in range(3)] == [True, True, False]


def test_a_black_hole_swallows_packets_and_breaks_no_connection():
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname(), 5)
        there, _ = server.accept()
        with here, there:
            inodes = {os.fstat(here.fileno()).st_ino}
            keep = {inode for inode, view in blackhole._sockets() if not view.close()} - inodes
            dug = blackhole.dig(pace=False)
            blackhole.fill(keep)
            there.sendall(b"lost")
            here.settimeout(0.3)
            with pytest.raises(TimeoutError):
                here.recv(10)
            blackhole.fill(dug)
            here.settimeout(20.0)
            assert here.recv(10) == b"lost", "TCP sends it again"


def test_the_kernel_kills_a_process_in_a_cage_or_the_cage_says_why_it_cannot_be_made():
    program = "import sys; from detector import cage; sys.stdin.readline(); cage.fill()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, text=True) as process:
        try:
            made = cage.Cage(process.pid, 32 << 20)
        except cage.CageError as error:
            assert "cgroup" in str(error) and "\n" not in str(error)
            process.kill()
            return
        process.communicate("go\n", timeout=60)
        assert process.returncode == -signal.SIGKILL and made.killed()
        made.close()
        assert not made.folder.exists()


def test_without_a_memory_cgroup_there_is_no_cage(monkeypatch):
    monkeypatch.setattr(cage, "counter_file", lambda: None)
    with pytest.raises(cage.CageError, match="no memory cgroup"):
        cage.Cage(os.getpid())
