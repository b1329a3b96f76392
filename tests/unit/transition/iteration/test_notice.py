"""What a rank starts outlives the signals of its step, as the rank does: real workers of torch's DataLoader, processes
of multiprocessing, programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import LIMIT

SCRIPT = """
import multiprocessing, os, signal, subprocess, sys, time
import torch
from torch.utils.data import DataLoader

heard = []
if sys.argv[1] == "handler":
    signal.signal(signal.SIGUSR1, lambda *_: heard.append("USR1"))
from unicron.transition.iteration import notice
notice.outlive_notice()

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.tensor([os.getpid()])

def rest():
    time.sleep(600)

def step_of(pid):
    found = {pid}
    while True:
        more = {int(p) for p in os.listdir("/proc") if p.isdigit() and int(p) not in found and parent(p) in found}
        if not more:
            return found
        found |= more

def parent(pid):
    try:
        return int(open(f"/proc/{pid}/stat").read().rpartition(") ")[2].split()[1])
    except OSError:
        return -1

def loaded():
    batches = iter(DataLoader(Data(), batch_size=1, num_workers=2, multiprocessing_context="fork"))
    next(batches)
    return batches

batches = loaded()
left_over = loaded()  # its workers are there at the end
other = multiprocessing.get_context("fork").Process(target=rest, daemon=True)
other.start()
program = subprocess.Popen(["sleep", "600"])
own = os.getpid()
numbers = [signal.SIGUSR2] + [signal.SIGUSR1] * (sys.argv[1] == "handler")
for number in numbers:  # as Slurm with proctrack/linuxproc
    for pid in step_of(own):
        os.kill(pid, number)
    time.sleep(0.2)
assert program.poll() is None, "a program that the rank executed"
for pid in step_of(own) - {program.pid}:
    os.kill(pid, signal.SIGTERM)
time.sleep(0.2)
seen = {int(batch) for batch in batches}
assert len(seen) == 2 and own not in seen, seen
assert other.is_alive()
program.terminate()
assert program.wait(10) == -signal.SIGTERM
other.terminate()
other.join(10)
assert other.exitcode == -signal.SIGKILL, other.exitcode
print("went on", *heard, flush=True)
left = multiprocessing.get_context("fork").Process(target=rest, daemon=True)
left.start()  # the interpreter ends it, and waits for its end
"""


@pytest.mark.parametrize("handler", ["handler", "none"])
def test_what_a_rank_starts_outlives_the_signals_of_its_step(tmp_path: Path, handler: str) -> None:
    """Defect: with proctrack/linuxproc a request for a checkpoint (SIGUSR2) killed the workers that load data, and with
    them all ranks; so did SIGTERM before the boundary at which the rank was to leave."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(path), handler], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "went on" + " USR1" * (handler == "handler")), done.stderr
    assert done.stderr == "", "torch does not call its workers' end a failure"


def test_a_process_that_the_rank_forks_by_itself_ends_by_sigterm_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import os, signal, subprocess, time\nfrom unicron.transition.iteration import notice\n"
        "notice.outlive_notice()\n"
        "pid = os.fork()\nif not pid:\n    time.sleep(600)\ntime.sleep(0.2)\nos.kill(pid, signal.SIGTERM)\n"
        "assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM\n"
        "group = subprocess.Popen(['sleep', '600'], preexec_fn=os.setsid)\n"
        "os.killpg(os.getpgid(group.pid), signal.SIGTERM)\nassert group.wait(10) == -signal.SIGTERM\n"
    )
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
