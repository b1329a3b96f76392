"""Faults that take a process, a connection or time of their own: each does what its name says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.support.processes import call
from unicron_detector.chaos import blackhole, memory_cage
from unicron_detector.tcp_sockets import tcp_sockets

pytestmark = pytest.mark.process


def run(code: str) -> subprocess.CompletedProcess[str]:
    return call(sys.executable, "-c", code)


def test_out_of_memory_is_the_ranks_own_and_leaves_it_able_to_report():
    code = (
        "from unicron_detector.chaos.inject import Injector\ni = Injector()\ni.on_order({'fault': 'oom'})\n"
        "try: i.point()\nexcept MemoryError as e: print('reported', len(bytearray(200 << 20)), e)"
    )
    done = run(code)
    assert done.stdout.startswith("reported 209715200 the rank reached its limit of"), done


def test_the_interpreters_lock_is_held():
    code = (
        "import threading, time\nfrom unicron_detector.chaos.inject import hold_gil\nticks = []\n"
        "def tick():\n while True: ticks.append(time.monotonic()); time.sleep(0.01)\n"
        "threading.Thread(target=tick, daemon=True).start(); time.sleep(0.1)\n"
        "b = time.monotonic(); hold_gil(0.6); e = time.monotonic()\n"
        "print(e - b, sum(b + 0.05 < t < e - 0.05 for t in ticks))"
    )
    began = time.monotonic()
    took, ticked = run(code).stdout.split()
    assert 0.6 <= float(took) < time.monotonic() - began and int(ticked) == 0


def test_a_black_hole_swallows_packets_and_breaks_no_connection():
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname(), 5)
        there, _ = server.accept()
        with here, there:
            inodes = {os.fstat(here.fileno()).st_ino}
            keep = set(tcp_sockets()) - inodes
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
    program = "import sys; from unicron_detector.chaos import memory_cage; sys.stdin.readline(); memory_cage.fill()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, text=True) as process:
        try:
            made = memory_cage.Cage(process.pid, 32 << 20)
        except memory_cage.CageError as error:
            assert "cgroup" in str(error) and "\n" not in str(error)
            process.kill()
            return
        process.communicate("go\n", timeout=60)
        assert process.returncode == -signal.SIGKILL and made.killed()
        made.close()
        assert not made.folder.exists()
