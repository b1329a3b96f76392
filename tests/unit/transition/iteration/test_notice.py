"""A rank's children outlive the signals of its step as the rank does: workers of torch's DataLoader, processes of
multiprocessing, programs."""

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
    from unicron_transition.seams import workers
    workers.END_SECONDS = 60  # a busy machine gives no process its turn within a second
    notice.outlive_notice()
    main(*sys.argv[1:])
"""


def run(folder: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    path = folder / "train.py"
    path.write_text(script)
    command = [sys.executable, str(path), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.mark.parametrize(
    ("handler", "how"),
    [
        ("handler", "fork"),
        ("none", "forkserver"),
        pytest.param("none", "fork", marks=pytest.mark.long),
        pytest.param("handler", "spawn", marks=pytest.mark.long),  # each of its processes imports torch anew
    ],
)
def test_what_a_rank_starts_outlives_the_signals_of_its_step(tmp_path: Path, handler: str, how: str) -> None:
    """Defect: with proctrack/linuxproc a request for a checkpoint (SIGUSR2) killed the workers that load data, and with
    them all ranks; so did SIGTERM before the boundary at which the rank was to leave. What `terminate` does stays."""
    done = run(tmp_path, SCRIPT, handler, how)
    assert (done.returncode, done.stdout.strip()) == (0, "went on" + " USR1" * (handler == "handler")), done.stderr
    assert done.stderr == "", "torch does not call its workers' end a failure"


BEGINNINGS = """
import itertools, multiprocessing, os, signal, subprocess, sys, time

def rest():
    time.sleep(600)

def soon_over():
    pass

def in_c():
    sum(itertools.repeat(0, 10**10))  # a handler of Python's waits for its end

def ended(target, after):
    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    time.sleep(after)
    process.terminate()
    process.join(30)
    assert process.exitcode in (-signal.SIGTERM, -signal.SIGKILL), (process.exitcode, after)

def at_any_time():
    notice.outlive_notice()
    for step in range(150):
        ended(rest, step % 30 / 10_000)

def starts_others():
    notice.outlive_notice()
    process = multiprocessing.get_context("fork").Process(target=at_any_time)
    process.start()
    process.join()
    assert process.exitcode == 0

def cannot_act():
    notice.outlive_notice()
    workers.END_SECONDS = 0.1
    ended(in_c, 0.3)

def first(how):
    notice.outlive_notice()
    process = multiprocessing.get_context(how).Process(target=soon_over)
    process.start()
    os.kill(process.pid, signal.SIGTERM)
    process.join()
    assert process.exitcode == 0, process.exitcode

def torch_sets_its_handler():
    from torch.utils.data import DataLoader, _utils
    own = _utils.signal_handling._set_worker_signal_handlers
    def slow():
        own()
        os.kill(os.getpid(), signal.SIGTERM)
    _utils.signal_handling._set_worker_signal_handlers = slow
    notice.outlive_notice()
    assert len(list(DataLoader(range(8), num_workers=2))) == 8

def forks_by_itself():
    notice.outlive_notice()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the signal is there before the fork has its first turn
    for _ in range(20):
        pid = os.fork()
        if not pid:
            rest()
        os.kill(pid, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM

def is_for_the_rank_alone():
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(1))
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGUSR1))
    notice.outlive_notice()
    pid = os.fork()
    if not pid:
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

def ends_a_group():
    notice.outlive_notice()
    group = subprocess.Popen(["sleep", "600"], preexec_fn=os.setsid)
    os.killpg(group.pid, signal.SIGTERM)
    assert group.wait(10) == -signal.SIGTERM

if __name__ == "__main__":
    from unicron_transition.iteration import notice
    from unicron_transition.seams import workers
    globals()[sys.argv[1]](*sys.argv[2:])
"""


@pytest.mark.parametrize(
    "what",
    "at_any_time starts_others cannot_act first-spawn first-forkserver torch_sets_its_handler forks_by_itself "
    "is_for_the_rank_alone ends_a_group".split(),
)
def test_a_signal_finds_a_process_that_begins(tmp_path: Path, what: str) -> None:
    """Defects: one that was through with its beginning while `terminate` looked at it lived on, and so did a fork of
    the script's own to which SIGTERM came before its first turn. Slurm's SIGTERM ended the first process of spawn and
    forkserver, and a worker of torch's while that set its own handler. A fork heard what was for the rank."""
    done = run(tmp_path, BEGINNINGS, *what.split("-"))
    assert done.returncode == 0, done.stderr
