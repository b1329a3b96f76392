"""A supervised process: its output, its CPUs, its signals."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from tests.support.processes import wait_for
from unicron_detector.processes.job_output import JobOutput
from unicron_detector.processes.supervise import LINE_BYTES, TAIL_LINES, Child, Surroundings

BARS = """
import sys
for number in range(20000):
    sys.stderr.write(f"\\r{number}/20000 it/s")
sys.stderr.write("\\rdone\\nRuntimeError: " + "x" * 50000 + " the end\\n")
sys.stderr.write("".join(f"line {number}\\n" for number in range(50)))
"""


def test_a_progress_bar_and_a_long_line_are_kept_as_a_terminal_shows_them():
    child = Child([sys.executable, "-c", BARS], dict(os.environ))
    wait_for(lambda: not child.pass_stderr(), "all was read")
    assert child.reap(60.0) == 0
    lines = child.tail().splitlines()
    child.close()
    assert lines[0] == "done" and len(lines) == 52 <= TAIL_LINES
    assert lines[1].startswith("RuntimeError: xxx") and lines[1].endswith("xxx the end")
    assert len(lines[1]) == LINE_BYTES


def test_a_process_has_the_output_and_the_cpus_of_its_own_task():
    cpu = min(os.sched_getaffinity(0))
    (out, its_out), (err, its_err) = os.pipe(), os.pipe()
    around = Surroundings(stdout=its_out, err=JobOutput(its_err), cpus=frozenset({cpu}))
    show = "import os, sys; print(os.sched_getaffinity(0)); print('oh', file=sys.stderr)"
    child = Child([sys.executable, "-c", show], dict(os.environ), surroundings=around)
    wait_for(lambda: not child.pass_stderr(), "all was read")
    assert child.reap(60.0) == 0 and child.tail() == "oh"
    child.close()
    assert os.read(out, 100).decode() == f"{{{cpu}}}\n" and os.read(err, 100) == b"oh\n"
    for descriptor in (out, its_out, err, its_err):
        os.close(descriptor)


COUNTS = """import signal, sys, time
terms = []
signal.signal(signal.SIGTERM, lambda *_: terms.append(1))
print("ready", file=sys.stderr, flush=True)
while not terms:
    time.sleep(0.01)
time.sleep(0.5)
sys.exit(len(terms))
"""


def test_sigterm_reaches_a_process_once_by_whatever_way() -> None:
    """Defect: a script's handler ran for Slurm's SIGTERM, and again for the agent's."""
    child = Child([sys.executable, "-c", COUNTS], dict(os.environ))
    wait_for(lambda: child.pass_stderr() and "ready" in child.tail(), "its handler is set")
    child.terminate()
    time.sleep(0.1)
    child.terminate()
    assert child.reap(60.0) == 1
    child.close()
    child = Child([sys.executable, "-c", COUNTS], dict(os.environ))
    child.terminated = True  # by Slurm, which signals all processes of a step
    child.terminate()
    assert not child.ended(0.3)
    child.signal(signal.SIGKILL)
    assert child.reap(60.0) == -signal.SIGKILL
    child.close()


FAMILY = """import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
children = [os.fork()]
if children[0]:
    children.append(os.fork())
if all(children):
    print(*children, file=sys.stderr, flush=True)
while True:
    time.sleep(0.01)
"""


def test_a_signal_that_is_passed_on_reaches_no_worker() -> None:
    """Defect: the agent sent SIGUSR1 and SIGUSR2 to the rank's whole group; it ended workers that load data."""
    child = Child([sys.executable, "-c", FAMILY], dict(os.environ))
    wait_for(lambda: child.pass_stderr() and child.tail(), "it has two children")
    worker, trainer = map(int, child.tail().split())
    child.pass_on(signal.SIGUSR1, trainer)
    wait_for(lambda: child.ended(), "the process has heard it")
    wait_for(lambda: not runs(trainer), "and so has the one that trains")
    assert runs(worker)
    child.pass_on(signal.SIGUSR1, os.getpid())  # of another group
    assert child.reap(60.0) == 7
    child.close()


def runs(pid: int) -> bool:
    """Whether it exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False
