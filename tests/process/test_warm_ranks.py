"""Ranks of real agents are forked from their node's zygote; what is in the way of that is said, and costs no rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.support import jobs
from tests.support.controller import Controller
from tests.support.jobs import FOREVER, PLAIN, TINY_PLAIN, Job, World
from tests.support.moments import fault
from tests.support.processes import children, is_alive, unicronctl, wait_for
from tests.support.scripted import FakeController
from unicron_ctl.shared.protocol import wire

pytestmark = pytest.mark.process
WAITS = "import os, sys, time\nprint('rank', os.environ['UNICRON_INCARNATION'], file=sys.stderr)\ntime.sleep(600)\n"


@pytest.fixture(autouse=True)
def zygotes_of_their_own(monkeypatch):
    """From the first one on."""
    monkeypatch.setattr(Job, "lent", False)


@pytest.fixture
def fake():
    started = FakeController()
    yield started
    started.close()


def began_at(pid: int) -> int:
    """The time at which it was started, in ticks; of a fork, that of the fork."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def answers(address: str) -> bool:
    """A store that takes and gives there."""
    host, _, port = address.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=30))
    store.set("a", "b")
    return store.get("a") == b"b"


def warm_ones(agent: int) -> list[int]:
    """The agent's zygote and its forks, which have the same command line; the oldest, the zygote, first."""
    paths = [(pid, Path(f"/proc/{pid}/cmdline")) for pid in children(agent)]
    found = [
        pid for pid, path in paths if path.is_file() and b"unicron_detector/processes/zygote.py" in path.read_bytes()
    ]
    return sorted(found, key=began_at)


def zygote_of(agent: int, rank: int) -> int:
    """The agent's zygote, which has ended when its fork is the oldest."""
    oldest = wait_for(lambda: warm_ones(agent), "its zygote")[0]
    assert oldest != rank
    return oldest


def test_a_killed_rank_comes_back_warm_and_what_it_says_is_heard(tmp_path):
    """Three deaths: by a signal, by an exception, with the zygote itself."""
    wrong = [{"slot": 1, "incarnation": 1, "iteration": "any", "at": "fetch", "kind": "raise", "file": "now"}]
    settings = {"TINY_ITERATIONS": FOREVER, "TINY_SLOW": "0.02", "TINY_FAULT": json.dumps(wrong)}
    with World(tmp_path, 2, command=TINY_PLAIN, **settings) as world:
        world.trains_on([0, 1])
        assert [world.rank(slot, "7")["start"] for slot in (0, 1)] == ["warm", "warm"]
        agent = world.agents[1].process.pid
        pid = world.rank(1, "7")["pid"]
        assert pid in children(agent) and os.getpgid(pid) == pid
        os.kill(pid, signal.SIGKILL)
        world.wait(lambda: world.rank(1, "7")["incarnation"] == 1 and world.trains([0, 1]), "it is back")
        assert world.rank(1, "7")["start"] == "warm"
        assert next(f for f in world.failures() if f["slot"] == 1)["cause"] == "killed_from_outside"
        world.trains_on([0, 1])
        (tmp_path / "now").touch()
        world.wait(lambda: world.rank(1, "7")["incarnation"] == 2 and world.trains([0, 1]), "it is back again")
        assert world.rank(1, "7")["start"] == "warm" and len(world.failures()) == 2
        dead = zygote_of(agent, world.rank(1, "7")["pid"])
        os.kill(dead, signal.SIGKILL)
        os.kill(world.rank(1, "7")["pid"], signal.SIGKILL)
        world.wait(lambda: world.rank(1, "7")["incarnation"] == 3 and world.trains([0, 1]), "without it, too")
        ranks = world.rank(0, "7")["pid"], world.rank(1, "7")["pid"]
        world.agents[1].kill()
        wait_for(lambda: not is_alive(ranks[1]), "the rank ends with its agent")
        wait_for(lambda: not any(is_alive(pid) for pid in children(agent)), "and its zygote")


@pytest.mark.wide
def test_in_a_container_with_an_agent_that_is_its_first_process_ranks_start_warm_too(tmp_path, monkeypatch) -> None:
    """Namespaces of its own, as container runtimes make them: orphans come to the agent anyway, and pids are others."""
    container = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    container += [] if os.getuid() == 0 else ["--map-root-user"]
    if subprocess.run([*container, "true"], capture_output=True, timeout=30).returncode:
        pytest.skip("this machine grants no namespaces")
    monkeypatch.setattr(jobs, "AGENT", [*container, *jobs.AGENT])
    faults = json.dumps([fault(1, 5, "fetch")])
    with World(tmp_path, nodes=2, TINY_ITERATIONS="30", TINY_SLOW="0.02", TINY_FAULT=faults) as world:
        world.wait(lambda: world.rank(1).get("incarnation") == 1 and world.trains([0, 1], 8), "slot 1 is back")
        assert world.rank(0)["pid"] < 100 and [world.rank(slot)["start"] for slot in (0, 1)] == ["warm", "warm"]
        world.wait(lambda: world.job().get("ended"), "it is trained to its end")
        assert [agent.wait() for agent in world.agents.values()] == [0, 0]
        assert world.job()["ended"]["code"] == 0 and not world.events("started_cold")


@pytest.mark.wide
def test_the_store_is_a_fork_too_and_a_process_of_its_own_when_that_has_ended(fake, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"import torch\n{WAITS}")
    job = Job(tmp_path, fake.address, "77", 1, [sys.executable, str(script)], UNICRON_MODE="session")
    try:
        fake.welcome()
        agent = job.agents[0].process.pid
        first = fake.status(lambda status: bool(status.store) and status.ranks[0].pid > 0, "its store and its rank")
        assert first.cold == {} and answers(first.store)
        zygote, *forks = warm_ones(agent)
        assert children(agent) == {zygote, *forks} and len(forks) == 2
        (store,) = set(forks) - {first.ranks[0].pid}
        os.kill(store, signal.SIGKILL)
        second = fake.status(lambda status: status.store not in ("", first.store), "another store")
        assert answers(second.store) and second.ranks[0].pid == first.ranks[0].pid
        (cold,) = children(agent) - {zygote, first.ranks[0].pid}
        job.agents[0].kill()
        wait_for(lambda: not any(map(is_alive, (zygote, cold, first.ranks[0].pid))), "none outlives the agent")
    finally:
        job.close()


@pytest.mark.wide
def test_a_store_that_cannot_be_forked_starts_cold(fake, tmp_path):
    """The script's imports change what it needs; what the fork says of it is heard."""
    (tmp_path / "spoils.py").write_text("import os\nos.nice = lambda by: 1 / 0\n")
    script = tmp_path / "train.py"
    script.write_text(f"import spoils\n{WAITS}")
    job = Job(tmp_path, fake.address, "78", 1, [sys.executable, str(script)], UNICRON_MODE="session")
    try:
        fake.welcome()
        status = fake.status(lambda status: bool(status.store) and status.ranks[0].pid > 0, "its store and its rank")
        assert answers(status.store) and status.cold == {} and "ZeroDivisionError" in job.agents[0].log
    finally:
        job.close()


def test_why_a_rank_starts_cold_is_on_record_and_explained(tmp_path):
    (tmp_path / "of_the_rank.py").write_text("import os\nSLOT = os.environ.get('UNICRON_SLOT')\n")
    script = tmp_path / "train.py"
    script.write_text(f"import of_the_rank, unicron\n{WAITS}")
    controller = Controller(tmp_path)
    job = Job(tmp_path, controller.address, "71", 1, [sys.executable, str(script)])
    try:
        reason = "its imports depend on UNICRON_SLOT, which this rank has otherwise"
        controller.wait(lambda: (controller.job("71") or {}).get("elements"), "the job")
        controller.wait(lambda: controller.rank(0, "71").get("start"), "its rank")
        assert controller.rank(0, "71")["start"] == f"cold: {reason}"
        assert job.agents[0].log.count(f"start cold: {reason}") == 1
        said = unicronctl("explain", "71", UNICRON_CONTROLLER=controller.address).stdout
        assert f"started cold: slot 0: {reason}" in " ".join(said.split())
        assert [event["reason"] for event in controller.events("started_cold", job="71")] == [
            f"slot 0 on n0 started cold: {reason}"
        ]
    finally:
        job.close()
        controller.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"UNICRON_WARM": "0"}, "UNICRON_WARM=0"),
        ({"UNICRON_PRELOAD": "os, no module"}, "UNICRON_PRELOAD: 'no module' is not a module"),
        ({"UNICRON_PRELOAD": "no_such_module"}, "import no_such_module: ModuleNotFoundError"),
    ],
)
def test_what_a_user_may_say_about_it(fake, tmp_path, settings, says):
    script = tmp_path / "train.py"
    script.write_text(WAITS)
    job = Job(tmp_path, fake.address, "72", 1, [sys.executable, str(script)], UNICRON_MODE="session", **settings)
    try:
        fake.welcome()
        status = fake.status(lambda status: status.ranks[0].pid > 0, "its process")
        assert says in status.cold[0]
        if "UNICRON_WARM" not in settings:  # who has turned it off is not told of it
            wait_for(lambda: says in job.agents[0].log, lambda: job.agents[0].log)
    finally:
        job.close()


def test_a_value_that_says_neither_is_one_clear_line(fake, tmp_path):
    job = Job(tmp_path, fake.address, "73", 1, [sys.executable, "train.py"], UNICRON_WARM="yes", UNICRON_MODE="session")
    assert job.agents[0].wait() == 2
    assert job.agents[0].log == "unicron-agent: UNICRON_WARM='yes': write 0 to start every rank cold, or unset it\n"


@pytest.mark.wide
def test_fifty_restarts_in_a_row_leak_nothing(fake, tmp_path):
    """Neither descriptors nor processes nor memory, of the agent and of the zygote."""
    script = tmp_path / "train.py"
    leaves = 'subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])\n'
    script.write_text(f"import subprocess\n{WAITS.replace('time.sleep', leaves + 'time.sleep')}")
    job = Job(tmp_path, fake.address, "74", 1, [sys.executable, str(script)], UNICRON_MODE="session")
    try:
        fake.welcome()
        agent = job.agents[0].process.pid
        counted = []
        for incarnation in range(56):
            rank = fake.rank(lambda rank, n=incarnation: (rank.incarnation, rank.pid > 0) == (n, True), "a process")
            if incarnation in (5, 55):
                zygote = zygote_of(agent, rank.pid)
                fake.status(what="one more turn")
                wait_for(lambda: len(children(agent)) <= 3, lambda: f"{children(agent)}")
                memory = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in (agent, zygote)]
                held = [len(os.listdir(f"/proc/{pid}/fd")) for pid in (agent, zygote)]
                counted.append((zygote, held, len(children(agent)), memory))
            wait_for(lambda n=incarnation: f"rank {n}\n" in job.agents[0].log, "it runs")
            fake.send(wire.StopRank(slot=0, incarnation=incarnation, reason="test"))
            end = fake.rank(lambda rank: rank.state == "exited", "its end")
            assert end.exit.code == -signal.SIGKILL and not is_alive(rank.pid)
            fake.send(wire.StartRank(slot=0, incarnation=incarnation + 1, reason="test"))
        (zygote, held, count, memory), last = counted
        assert last[:3] == (zygote, held, count)
        assert all(after - before < 256 for before, after in zip(memory, last[3], strict=True)), "pages"
    finally:
        job.close()


def test_programs_of_restart_mode_are_forked_too(tmp_path):
    controller = Controller(tmp_path, "forming_settle_seconds = 2\n")
    out = tmp_path / "out"
    out.mkdir()
    job = Job(tmp_path, controller.address, "75", 2, [sys.executable, str(PLAIN)], PLAIN_OUT=str(out))
    try:

        def steps(element: int) -> int:
            path = out / f"steps.{element}"
            return path.read_text().count("\n") if path.is_file() else 0

        wait_for(lambda: steps(0) > 3, lambda: f"a world\n{job.logs}")
        starts = lambda: [controller.rank(slot, "75")["start"] for slot in (0, 1)]  # noqa: E731
        controller.wait(lambda: all(starts()), "both have said how they started")
        assert starts() == ["warm", "warm"]
        before = controller.rank(1, "75")
        os.kill(before["pid"], signal.SIGKILL)
        controller.wait(lambda: controller.rank(1, "75")["pid"] not in (0, before["pid"]), "a process")
        assert controller.rank(1, "75")["start"] == "warm"
        done = steps(0)
        wait_for(lambda: steps(0) > done + 3, lambda: f"it goes on\n{job.logs}")
        (out / "stop").touch()
        assert job.wait() == [0, 0], job.logs
    finally:
        job.close()
        controller.close()


@pytest.mark.wide
def test_a_socket_folder_that_a_cleaner_has_removed_is_made_again(fake, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os, time, unicron\nunicron.init_process_group('gloo')\ntime.sleep(600)\n")
    job = Job(tmp_path, fake.address, "76", 1, [sys.executable, str(script)])
    try:
        fake.welcome()
        fake.rank(lambda rank: rank.pid > 0, "its process")
        agent = job.agents[0]
        folder = agent.socket.parent
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        fake.send(wire.StopRank(slot=0, incarnation=0, reason="test"))
        fake.rank(lambda rank: rank.state == "exited", "its end")
        fake.send(wire.StartRank(slot=0, incarnation=1, reason="test"))
        fake.rank(lambda rank: rank.incarnation == 1 and rank.pid > 0, "a process")
        assert agent.socket.exists() and agent.log.count("is gone, and is made again") == 1
    finally:
        job.close()
