"""Helpers of an agent outlive the signals that Slurm sends to every process of a step."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.support.processes import LIMIT
from unicron_ctl.agent.ranks import watchdog
from unicron_detector.processes import step_signals
from unicron_detector.processes.step_signals import STEP_SIGNALS


def test_a_process_ignores_them_and_tells_which_it_heard_before():
    program = f"import signal, sys\nsys.path.insert(0, {str(step_signals.__file__.rpartition('/')[0])!r})\n"
    program += "from step_signals import *\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    program += "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"  # a shell's background job is born ignoring it
    program += "heard = ignore_step_signals()\n"
    program += "[signal.raise_signal(number) for number in STEP_SIGNALS]\nprint(*map(int, heard))"
    command = [sys.executable, "-I", "-S", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT)
    assert [int(word) for word in done.stdout.split()] == [n for n in STEP_SIGNALS if n != signal.SIGHUP], done


def test_the_watchdog_outlives_them_and_ends_with_its_line():
    command = [sys.executable, "-I", "-S", watchdog.__file__, *(str(int(number)) for number in STEP_SIGNALS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as dog:
        assert dog.stdin is not None and dog.stdout is not None
        assert dog.stdout.read(1) == b".", "its timer works"
        for number in STEP_SIGNALS:
            dog.send_signal(number)
        dog.stdin.write(b"until 1e18\n")
        dog.stdin.flush()
        assert dog.stdout.read(1) == b".", "it listens"
        dog.stdin.close()
        assert dog.wait(30) == 0
