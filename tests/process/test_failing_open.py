"""Real agents on nodes that are short of something, at the start and in the middle: the user's command always runs, and
what ends for want of it is protection, not training."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.jobs import AGENT, Job, scripted
from tests.support.processes import ROOT, call, is_alive, outside_slurm, undated, wait_for
from tests.support.scripted import FakeController
from tests.support.users import User
from unicron_ctl.agent.node.rendezvous_store import StoreProcess
from unicron_ctl.shared.protocol import wire

pytestmark = pytest.mark.process
PRIVATE_MOUNTS = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
CODE = 7
# The first rank that fails ends the others, so only one of them does.
COMMAND = ["sh", "-c", f"[ ${{RANK:-0}} = 0 ] || exec sleep 600; echo ran $RANK; exit {CODE}"]


@pytest.fixture
def fake() -> Iterator[FakeController]:
    made = FakeController()
    yield made
    made.close()


def agents_of(fake: FakeController, folder: Path, **settings: str) -> dict[str, str]:
    """The environment of an agent of a job of one node."""
    return outside_slurm() | {
        "SLURM_JOB_ID": "30",
        "SLURM_JOB_USER": "ann",
        "SLURMD_NODENAME": "n0",
        "UNICRON_CONTROLLER": fake.address,
        "UNICRON_NODE_ADDRESS": "127.0.0.1",
        "UNICRON_MEMORY_DIR": str(folder),
        "UNICRON_REGISTER_TIMEOUT": "1",
        "UNICRON_MODE": "session",
        "TMPDIR": str(folder),
        **settings,
    }


def run_shell(text: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return call("bash", "-c", text, environment=environment)


def agent(command: Sequence[str] = COMMAND) -> str:
    return shlex.join([*AGENT, "run", "--", *command])


LAUNCHER = ROOT / "slurm_plugin" / "spank" / "unicron-launch"  # `make plugin`


# ---------------------------------------------------------------- at the start
@pytest.mark.parametrize(
    ("home", "module"),
    [("/opt/python3.8", ""), ("", "enum.py"), ("", "zmq.py"), ("", "unicron_ctl/__init__.py")],
    ids=["a home of another Python", "a module of Python's", "a library", "a package of the project's name"],
)
def test_what_the_user_has_set_for_python_is_the_commands_not_the_agents(fake, tmp_path, home, module):
    """Defect: the agent's Python did not start, or imported the user's modules, and the command never ran."""
    theirs = tmp_path / "theirs"
    (theirs / module).parent.mkdir(parents=True, exist_ok=True)
    if module:
        (theirs / module).write_text("raise SystemExit(9)\n")
    mine = tmp_path / "agent"
    mine.write_text(f'#!/bin/sh\nexec {sys.executable} -m unicron_ctl.agent.start.entry "$@"\n')
    mine.chmod(0o755)
    environment = agents_of(fake, tmp_path) | {"PYTHONPATH": str(theirs)} | ({"PYTHONHOME": home} if home else {})
    show = f'echo "ran ${{PYTHONHOME:-}} $PYTHONPATH"; env | grep -c _UNICRON_USERS; exit {CODE}'
    done = call(LAUNCHER, mine, "sh", "-c", show, environment=environment)
    assert done.returncode == CODE, done
    said = done.stdout.splitlines()
    assert said[0].startswith(f"ran {home} ") and str(theirs) in said[0] and said[1] == "0", done


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize("files", [14, 30])
def test_with_too_few_open_files_the_command_runs_unprotected(fake, tmp_path, files, ranks):
    done = run_shell(f"ulimit -n {files}; exec {agent()}", agents_of(fake, tmp_path, UNICRON_RANKS_PER_NODE=ranks))
    assert done.returncode == CODE and "ran 0" in done.stdout, done
    assert re.fullmatch(
        r"WARNING unicron job=30_0 node=n0: only \d+ more files can be opened .*raise `ulimit -n`.*\n",
        undated(done.stderr),
    )


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user, whose processes are limited")
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_with_too_few_threads_the_command_runs_unprotected(fake, tmp_path, ranks):
    """libzmq aborts the process that cannot start its threads."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own folders let nobody else in
        os.chmod(folder, 0o755)
        user = User("games", Path(folder), agents_of(fake, tmp_path, UNICRON_RANKS_PER_NODE=ranks))
        program = user.start("tests.process.test_failing_open:few_threads")
        try:
            code = program.wait(60)
        finally:
            user.close()
        said = user.log.read_text()
    assert code == CODE, said
    assert "threads can be started and the agent needs" in said and "runs unprotected" in said and "ran 0" in said


def few_threads() -> None:
    """An agent of a user who may have six processes and threads."""
    from unicron_ctl.agent.start.agent_main import main

    resource.setrlimit(resource.RLIMIT_NPROC, (6, 6))
    sys.argv = ["unicron-agent", "run", "--", *COMMAND]
    main()


def test_where_tmpdir_is_full_another_place_is_taken_and_without_any_the_command_runs_unprotected(fake, tmp_path):
    full, end = tmp_path / "full", tmp_path / "end"
    full.mkdir()
    mount = f"mount -t tmpfs -o size=16k,nr_inodes=3 none {full}; touch {full}/1 {full}/2"
    environment = agents_of(fake, tmp_path, TMPDIR=str(full), UNICRON_REGISTER_TIMEOUT="30")
    waits = ["sh", "-c", f"echo ran $RANK; ls -d /tmp/unicron-30-*; while ! [ -e {end} ]; do sleep 0.05; done"]
    words = [*PRIVATE_MOUNTS, "bash", "-c", f"{mount}; exec {agent(waits)}"]
    process = subprocess.Popen(words, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    fake.welcome()
    assert fake.rank(lambda rank: rank.pid > 0, "its rank runs")
    end.touch()
    said = process.communicate(timeout=60)[0].decode()
    assert "/tmp/unicron-30-" in said and "unprotected" not in said, said
    below = ROOT.relative_to("/tmp") if ROOT.is_relative_to("/tmp") else "nothing"  # the checkout has to be found still
    mounts = (
        f"mount -t tmpfs -o nr_inodes=64 none {full}; mkdir -p {full}/{below}; mount --bind {ROOT} {full}/{below}; "
        f"n=0; while touch {full}/$n 2>/dev/null; do n=$((n + 1)); done; "
        f"mount --rbind {full} /dev/shm; mount --rbind {full} /tmp"
    )
    environment["TMPDIR"] = "/tmp"
    done = call(*PRIVATE_MOUNTS, "bash", "-c", f"{mounts}; exec {agent()}", environment=environment)
    assert done.returncode == CODE and done.stdout == "ran 0\n", done
    assert "No space left on device; the job runs unprotected" in done.stderr and "/tmp: " in done.stderr


def test_where_the_agents_packages_cannot_be_imported_the_command_runs_unprotected(tmp_path):
    """A library of the agent's own is missing, or another's hides it."""
    (tmp_path / "msgspec.py").write_text("raise ImportError('not this one')\n")
    entry = [sys.executable, "-m", "unicron_ctl.agent.start.entry", "run", "--", *COMMAND]
    environment = outside_slurm() | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "SLURM_JOB_ID": "30"}
    done = call(*entry, environment=environment)
    assert done.returncode == CODE and "ran" in done.stdout
    assert done.stderr == "unicron: the agent cannot begin (ImportError: not this one); the command runs unprotected\n"


def test_the_command_has_the_locale_that_was_given_and_not_the_agents_own(tmp_path):
    """A Python sets LC_CTYPE for itself where there is no locale, as in a container."""
    (tmp_path / "msgspec.py").write_text("raise ImportError('not this one')\n")
    entry = [sys.executable, "-m", "unicron_ctl.agent.start.entry", "run", "--", "sh", "-c", "echo ${LC_CTYPE-none}"]
    bare = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}:{ROOT}", "SLURM_JOB_ID": "30"}
    assert call(*entry, environment=bare).stdout == "none\n"
    assert call(*entry, environment=bare | {"LC_CTYPE": "C.UTF-8"}).stdout == "C.UTF-8\n"


def test_a_log_that_takes_nothing_keeps_no_command_from_running(fake, tmp_path):
    """Its reader is stopped and the pipe is full; there is no controller either."""
    note = tmp_path / "ran"
    command = ["sh", "-c", f"exec 2>&-; touch {note}; exit {CODE}"]
    with full_pipe() as log:
        environment = agents_of(fake, tmp_path, UNICRON_CONTROLLER="tcp://127.0.0.1:9")
        done = subprocess.run([*AGENT, "run", "--", *command], env=environment, cwd=ROOT, stderr=log, timeout=60)
    assert done.returncode == CODE and note.exists()


@contextlib.contextmanager
def full_pipe() -> Iterator[int]:
    """Its writing end; nobody reads."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    yield writing
    os.close(reading)
    os.close(writing)


# ---------------------------------------------------------------- while it trains
LOUD = """
import os, signal, sys, threading, time
from unicron_detector.processes.rank_channel import RankChannel
from unicron_detector.processes.rank_messages import Status
saved = threading.Event()
channel = RankChannel.from_environment(lambda message: None)
signal.signal(signal.SIGTERM, lambda *_: (open(os.environ["NOTE"], "w").write("saved"), os._exit(0)))
channel.send(Status("running", iteration=1))
channel.flush(5)
written = 0
while True:
    sys.stderr.write("x" * 999 + chr(10))
    sys.stderr.flush()
    written += 1
    if written % 1000 == 0:
        channel.send(Status("running", iteration=written))
    if written > 30000:
        time.sleep(0.1)
"""


def test_an_agent_whose_log_takes_nothing_beats_obeys_and_lets_its_ranks_save(fake, tmp_path):
    """30 MB of a rank's output go nowhere; its reader is stopped from the beginning."""
    note = tmp_path / "note"
    with full_pipe() as log:
        environment = agents_of(fake, tmp_path, UNICRON_REGISTER_TIMEOUT="60", NOTE=str(note), UNICRON_WARM="0")
        words = [*AGENT, "run", "--", *scripted(tmp_path, LOUD)]
        process = subprocess.Popen(words, env=environment, cwd=ROOT, stderr=log)
        try:
            fake.welcome()
            fake.rank(lambda rank: rank.iteration >= 30000, "the rank goes on though nobody reads what it writes")
            times = []
            for _ in range(6):
                fake.status()
                times.append(time.monotonic())
            assert max(after - before for before, after in itertools.pairwise(times)) < 5.0
            process.send_signal(signal.SIGTERM)
            assert fake.status(lambda status: bool(status.leaving)).leaving == "stopped by SIGTERM"
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()
            process.wait()
    assert note.read_text() == "saved"


def test_a_log_that_is_read_late_and_slowly_loses_nothing(fake, tmp_path):
    lines = 20000
    text = f"import sys\nfor number in range({lines}):\n    print(f'{{number}} ' + 'x' * 990, file=sys.stderr)\n"
    reading, writing = os.pipe()
    environment = agents_of(fake, tmp_path, UNICRON_REGISTER_TIMEOUT="60", UNICRON_MODE="restart")
    process = subprocess.Popen(
        [*AGENT, "run", "--", *scripted(tmp_path, text)], env=environment, cwd=ROOT, stderr=writing
    )
    os.close(writing)
    found: list[bytes] = []

    def read() -> None:
        with open(reading, "rb", buffering=0) as file:
            while data := file.read(1 << 16):
                found.append(data)
                time.sleep(0.001)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        fake.welcome()
        fake.plan(wire.Plan(generation=1, members=[0], store="127.0.0.1:9", prefix=""), [0])
        fake.rank(lambda rank: rank.state == "finished", "it has written all")
        fake.send(wire.End(code=0, reason=""))
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    reader.join(30)
    numbers = [line.split()[0] for line in b"".join(found).splitlines() if line.endswith(b"xxx")]
    assert numbers == [str(number).encode() for number in range(lines)]


SLEEPS = """
import time
from unicron_detector.processes.rank_channel import RankChannel
from unicron_detector.processes.rank_messages import Status
channel = RankChannel.from_environment(lambda message: None)
channel.send(Status("running", iteration=3))
channel.flush(5)
time.sleep(600)
"""


@pytest.mark.parametrize("warm", ["0", "1"])
def test_a_rank_that_cannot_be_started_for_want_of_open_files_is_tried_again(fake, tmp_path, warm):
    job = Job(tmp_path, fake.address, "31", 1, scripted(tmp_path, SLEEPS), UNICRON_MODE="session", UNICRON_WARM=warm)
    agent = job.agents[0]
    try:
        fake.welcome()
        first = fake.rank(lambda rank: rank.state == "running", "its rank runs").pid
        fake.send(wire.StopRank(slot=0, incarnation=0, reason="test"))
        fake.rank(lambda rank: rank.state == "exited", "it has ended")
        before = resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE)
        used = max(int(name) for name in os.listdir(f"/proc/{agent.process.pid}/fd"))
        resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE, (used, before[1]))
        fake.send(wire.StartRank(slot=0, incarnation=1, reason="test"))
        wait_for(lambda: "it is tried again" in agent.log, lambda: f"the agent says so\n{agent.log}")
        for _ in range(3):
            assert fake.rank(lambda rank: rank.incarnation == 1, "it beats on").state == "starting"
        resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE, before)
        second = fake.rank(lambda rank: rank.incarnation == 1 and rank.state == "running", "its rank runs").pid
        assert is_alive(second) and second != first and agent.alive
        assert agent.log.count("Too many open files; it is tried again") == 1, agent.log
    finally:
        job.close()


def test_a_store_that_finds_no_descriptor_is_tried_again():
    said: list[str] = []
    store = StoreProcess(
        [sys.executable, "train.py"],
        outside_slurm(),
        lambda words, output: None,
        lambda descriptor, call: None,
        lambda descriptor: None,
        lambda: None,
        said.append,
    )
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        store.start()
        store.complete_start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    try:
        assert store.pid is None and len(said) == 1 and "it is tried again" in said[0]
        wait_for(lambda: store.complete_start() or store.pid, "it has started")
    finally:
        store.close()


def test_a_full_shared_memory_costs_the_copies_in_memory_alone(fake, tmp_path):
    """No image, no folder: the job trains on without, and a line says so."""
    full = tmp_path / "full"
    full.mkdir()
    mount = f"mount -t tmpfs -o size=16k,nr_inodes=2 none {full}; touch {full}/1"
    environment = agents_of(fake, tmp_path, UNICRON_MEMORY_DIR=str(full), UNICRON_REGISTER_TIMEOUT="60")
    words = [*PRIVATE_MOUNTS, "bash", "-c", f"{mount}; exec {agent(scripted(tmp_path, SLEEPS))}"]
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(words, env=environment, cwd=ROOT, stdout=file, stderr=file)
    try:
        fake.registration()
        fake.send(wire.Welcome(heartbeat_period=0.5, controller="test", run="a1"))
        assert fake.rank(lambda rank: rank.state == "running", "its rank runs").iteration == 3
        assert "no training state is kept in memory" in log.read_text()
    finally:
        process.kill()
        process.wait()
