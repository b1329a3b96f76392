"""A plain program's process counts its work in a page that its agent has made."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

from unicron_ctl.agent.ranks.counted import Folder, Progress
from unicron_ctl.shared.protocol.structs import RankStatus
from unicron_detector.processes import counters
from unicron_detector.processes.counters import Counters


@pytest.fixture
def folder(tmp_path):
    made = Folder(str(tmp_path))
    yield made
    made.close()


@pytest.fixture
def pair(folder):
    """Return a slot's counts for the agent, and the page for the process."""
    counted = Progress(folder, 0)
    environment = counted.start(1, 0)
    return counted, Counters(environment[counters.PAGE])


def look(counted: Progress, status: RankStatus | None = None):
    status = status or RankStatus(state="running", generation=1)
    news, step = counted.update(status, time.monotonic())
    return status, news, step


def steps(count: Counters, *optimizers: object) -> None:
    for each in optimizers:
        count.on_step(each, (), {})


def test_an_iteration_ends_with_the_first_step_of_a_round(pair):
    counted, count = pair
    one, two = object(), object()
    steps(count, one, one)  # one optimizer: each step is an iteration
    assert look(counted)[0].iteration == 2
    steps(count, two, one, two, one, two)  # two in turns, as a GAN has them: each pair is one
    assert look(counted)[0].iteration == 4
    steps(count, *[two] * 5, one)  # one of them five times as often
    assert look(counted)[0].iteration == 9
    third = object()
    steps(count, third, third, third)  # another takes over
    assert look(counted)[0].iteration == 11


def test_what_a_rank_does_now(pair):
    counted, count = pair
    status, news, step = look(counted)
    assert not news and step is None and status.micro_batches == 0, "a script that never steps is not judged"
    assert count.waiting(lambda: look(counted)[0].phase, 1)() == "reducing"
    assert look(counted)[0].micro_batches == 0
    steps(count, count)
    status, news, step = look(counted)
    assert news and (status.phase, status.iteration, status.micro_batches) == ("computing", 1, 1)
    assert (step.iteration, step.generation, step.loss) == (0, 1, None)
    assert not look(counted, status)[1], "nothing new"
    with count.outside():
        status = look(counted)[0]
        assert (status.phase, status.iteration) == ("stepped", 0), "it saves, which takes its time"
    count.beat()
    assert look(counted)[0].moved == 1


def test_times_of_several_steps_are_told_as_one_report(pair):
    counted, count = pair
    steps(count, count)
    look(counted)
    wait = count.waiting(lambda: time.sleep(0.05), 2)
    for _ in range(4):
        wait()
        with count.outside():
            time.sleep(0.01)
        steps(count, count)
    step = look(counted)[2]
    assert step.iteration == 4 and 0.05 <= step.phases["reduce"] <= step.seconds
    assert 0.01 <= step.phases["outside"] and step.phases["forward"] >= 0.0
    assert sum(step.phases.values()) == pytest.approx(step.seconds, rel=0.01)


def test_waits_within_waits_and_of_other_threads_count_once(pair):
    counted, count = pair
    inner = count.waiting(lambda: None, 2)
    count.waiting(inner, 1)()
    assert count.page[counters.AT["waits"]] == 1
    with pytest.raises(ZeroDivisionError):
        count.waiting(lambda: 1 / 0, 1)()
    assert look(counted)[0].phase == "computing", "an error ends the wait"


def test_one_process_of_a_rank_counts_and_its_children_do_not(pair, folder):
    _, count = pair
    steps(count, count)
    other = Counters(f"{folder.path}/0")
    other.page[counters.AT["pid"]] = os.getppid()
    steps(other, other)
    assert count.page[counters.AT["done"]] == 1, "another process that lives counts already"
    count.page[counters.AT["pid"]] = os.getpid()
    count.after_fork()
    steps(count, count)
    assert count.page[counters.AT["done"]] == 1
    again = Counters(f"{folder.path}/0")
    again.page[counters.AT["pid"]] = subprocess.Popen(["true"]).wait() or 4_000_000
    steps(again, again)
    assert again.page[counters.AT["done"]] == 1, "the next process starts again"


def test_a_page_that_is_gone_harms_no_script(monkeypatch):
    monkeypatch.setenv(counters.PAGE, "/nonexistent/page")
    before = torch.save
    counters.install()
    assert torch.save is before


HELPERS = """
import os, re, signal, subprocess, sys
signal.signal(signal.SIGUSR1, lambda *_: None)
import torch

def bits(pid, name):
    return int(re.search(name + r":\\s*(\\w+)", open(f"/proc/{pid}/status").read())[1], 16)

def bit(number):
    return 1 << number - 1

read, write = os.pipe()
if not (pid := os.fork()):
    os.read(read, 1)
    os._exit(0)
program = subprocess.Popen(["sleep", "60"])
spawned = "import re; print(int(re.search(r'SigBlk:\\\\s*(\\\\w+)', open('/proc/self/status').read())[1], 16))"
child = os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ)  # as subprocess does from Python 3.13 on
inner = int(subprocess.run([sys.executable, "-c", spawned], capture_output=True, text=True).stdout)
print(*map(bool, (
    bits(pid, "SigIgn") & bit(signal.SIGUSR1), bits(program.pid, "SigBlk") & bit(signal.SIGUSR1),
    inner & bit(signal.SIGUSR1), bits(os.getpid(), "SigCgt") & bit(signal.SIGUSR1),
    bits(os.getpid(), "SigBlk"), bits(pid, "SigIgn") & bit(signal.SIGUSR2),
    bits(program.pid, "SigBlk") & bit(signal.SIGTERM), not bits(child, "SigBlk") & bit(signal.SIGUSR1),
)))
program.kill()
os.kill(child, signal.SIGKILL)
os.write(write, b"x")
"""


def test_what_a_plain_program_starts_does_not_hear_a_signal_for_which_it_has_a_handler(folder):
    """Defect: a worker that loads data ran the script's own handler for SIGUSR1, and a program was ended by it. Signals
    without a handler, and SIGTERM, still reach both."""
    environment = dict(os.environ) | Progress(folder, 0).start(1, 0) | {"PYTHONPATH": folder.autoload}
    done = subprocess.run([sys.executable, "-c", HELPERS], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "True", "True", "True", "False", "False", "False", "False"], done.stderr


@pytest.mark.parametrize(("enqueued", "completed", "ended"), [(7, 7, 5), (7, 6, 4), (17, 2, 4)])
def test_sends_and_receives_are_no_collectives(enqueued, completed, ended):
    """The recorder's numbers of a group count them, and those of its entries do not."""
    entry = {"process_group": ["mesh.1.0.1", "undefined"], "pg_id": 2, "collective_seq_id": 5, "is_p2p": False}
    entry |= {"profiling_name": "gloo:all_reduce", "input_sizes": [[4]]}
    status = {"last_enqueued_collective": str(enqueued), "last_completed_collective": str(completed)}
    found = counters.latest({"entries": [entry], "pg_status": {"2": status}})
    assert found == {"mesh.1.0.1": [5, ended, "gloo:all_reduce [[4]]"]}


def test_a_group_that_was_made_before_a_generation_says_nothing_of_it():
    """A rank that has not come to the first collective of the new one has old numbers under the same name only."""
    entry = {"process_group": ["alike.0.2", "undefined"], "pg_id": 2, "collective_seq_id": 500, "is_p2p": False}
    entry |= {"profiling_name": "gloo:all_reduce", "input_sizes": [[4]], "time_created_ns": 7}
    assert counters.latest({"entries": [entry]}, 8) == {} != counters.latest({"entries": [entry]}, 7)


def test_a_group_made_again_counts_from_one_and_is_called_by_its_description():
    """Asked of the real recorder: it keeps the first group's collectives, under the same name."""
    code = """if True:
        import torch, torch.distributed as dist
        from unicron_detector.processes.counters import collectives
        for times in (5, 2):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            group = dist.new_group([0], group_desc="tp")
            for _ in range(times):
                dist.all_reduce(torch.ones(3), group=group)
            found = collectives()
            dist.destroy_process_group()
        print(found["1"][0], found["1"][2])
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout.strip() == "2 gloo:all_reduce of tp [[3]]", ran.stdout + ran.stderr
