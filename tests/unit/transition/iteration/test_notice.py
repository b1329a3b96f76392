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

class Data:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return os.getpid()

def rest(began=None):
    if began:
        began.set()
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

def own_handler(began):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    began.set()
    time.sleep(600)

def tool():
    sys.exit(subprocess.run(["timeout", "0.1", "sleep", "600"]).returncode)

def loaded(how, count):
    from torch.utils.data import DataLoader
    batches = iter(DataLoader(Data(), batch_size=1, num_workers=count, multiprocessing_context=how))
    next(batches)
    return batches

def main(handler, how):
    started = multiprocessing.get_context(how)
    batches = loaded(how, 2)
    left_over = loaded(how, 1)  # its workers are there at the end
    began = started.Event()
    other = started.Process(target=rest, args=[began], daemon=True)
    other.start()
    assert began.wait(60)
    begins = started.Process(target=rest, daemon=True)
    begins.start()
    program = subprocess.Popen(["sleep", "600"])
    own = os.getpid()
    numbers = [signal.SIGUSR2] + [signal.SIGUSR1] * (handler == "handler")
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
    assert other.is_alive() and begins.is_alive()
    program.terminate()
    assert program.wait(10) == -signal.SIGTERM
    other.terminate()
    other.join(10)
    assert other.exitcode == -signal.SIGTERM, other.exitcode
    began.clear()
    own = started.Process(target=own_handler, args=[began])
    own.start()
    assert began.wait(60)
    own.terminate()
    own.join(10)
    assert own.exitcode == 7, own.exitcode
    ends = started.Process(target=tool)
    ends.start()
    ends.join(60)
    assert ends.exitcode == 124, "what a program of a worker starts ends by SIGTERM"
    just = started.Process(target=rest, daemon=True)
    just.start()
    just.terminate()  # it may not be through with its beginning
    just.join(10)
    assert just.exitcode in (-signal.SIGTERM, -signal.SIGKILL), just.exitcode
    print("went on", *heard, flush=True)
    left = started.Process(target=rest, daemon=True)
    left.start()  # the interpreter ends it, and waits for its end

if __name__ == "__main__":
    heard = []
    if sys.argv[1] == "handler":
        signal.signal(signal.SIGUSR1, lambda *_: heard.append("USR1"))
    import torch  # as in a rank
    from unicron_transition.iteration import notice
    notice.outlive_notice()
    main(*sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("handler", "how"), [("handler", "fork"), ("none", "fork"), ("handler", "spawn"), ("none", "forkserver")]
)
def test_what_a_rank_starts_outlives_the_signals_of_its_step(tmp_path: Path, handler: str, how: str) -> None:
    """Defect: with proctrack/linuxproc a request for a checkpoint (SIGUSR2) killed the workers that load data, and with
    them all ranks; so did SIGTERM before the boundary at which the rank was to leave. What `terminate` does stays."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(path), handler, how], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "went on" + " USR1" * (handler == "handler")), done.stderr
    assert done.stderr == "", "torch does not call its workers' end a failure"


def test_a_process_that_the_rank_forks_by_itself_ends_by_sigterm_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import os, signal, subprocess, time\nfrom unicron_transition.iteration import notice\n"
        "notice.outlive_notice()\n"
        "pid = os.fork()\nif not pid:\n    time.sleep(600)\ntime.sleep(0.2)\nos.kill(pid, signal.SIGTERM)\n"
        "assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM\n"
        "group = subprocess.Popen(['sleep', '600'], preexec_fn=os.setsid)\n"
        "os.killpg(os.getpgid(group.pid), signal.SIGTERM)\nassert group.wait(10) == -signal.SIGTERM\n"
    )
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
