"""The tasks of a node that wait for their ranks: the real unicron-launch, and the agent's side of its channel."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.plugin_site import SOURCE
from tests.support.processes import wait_for
from unicron_ctl.agent.connections.step_tasks import CHANNELS, StepTask, StepTasks, TasksMissing

pytestmark = pytest.mark.process
SHOW = "import os; print('ran as', os.environ.get('RANK'), os.environ.get('_UNICRON_TASK')); raise SystemExit(4)"


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    subprocess.run(["make", "-s", "-C", SOURCE, f"O={folder}", folder / "unicron-launch"], check=True)
    return folder / "unicron-launch"


class Node:
    """As the plugin starts it: tasks 1 to `count` wait, and this process is task 0."""

    def __init__(self, launcher: Path, count: int, begun: bool = True) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
        self.waiting = []
        for local, (_, theirs) in enumerate(pairs, 1):
            environment = os.environ | {"_UNICRON_TASK": str(theirs.fileno()), "MINE": str(local)}
            command = [launcher, "/the/agent", sys.executable, "-c", SHOW]
            pipe, fds = subprocess.PIPE, [theirs.fileno()]
            self.waiting.append(
                subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, pass_fds=fds, text=True)
            )
            theirs.close()
        self.channels = [mine for mine, _ in pairs]
        self.environment = {CHANNELS: ",".join(str(os.dup(mine.fileno())) for mine in self.channels), "HOME": "/"}
        for mine in self.channels:
            if begun:
                mine.send(f"A{os.getpid()}".encode())
            mine.close()
        self.tasks = StepTasks()
        self.tasks.adopt(self.environment)

    def receive(self) -> list[StepTask]:
        """What the others are; their output is theirs alone again."""
        own, *others = self.tasks.receive()
        assert own.environment is os.environ and (own.stdout, own.stderr) == (1, 2)
        for number, task in enumerate(others, 1):
            os.write(task.stdout, f"rank {number}\n".encode())
            os.close(task.stdout)
            os.close(task.stderr)
        return others

    def ends(self) -> list[tuple[int, str]]:
        return [(task.wait(20), task.communicate()[0]) for task in self.waiting]

    def close(self) -> None:
        self.tasks.close()
        for task in self.waiting:
            task.kill()
            task.wait()
            for pipe in filter(None, (task.stdout, task.stderr)):
                pipe.close()


@pytest.fixture
def node(launcher: Path) -> Iterator[Node]:
    made = Node(launcher, 3)
    yield made
    made.close()


def test_tasks_hand_over_what_they_are_and_end_as_their_ranks_do(node: Node) -> None:
    assert node.environment == {"HOME": "/"} and node.tasks.count == 4
    others = node.receive()
    assert [task.environment["MINE"] for task in others] == ["1", "2", "3"]
    assert all("_UNICRON_TASK" not in task.environment and task.cpus == os.sched_getaffinity(0) for task in others)
    for waiting in node.waiting:  # as Slurm sends it to all tasks of a step: the agent says when the ranks have ended
        waiting.send_signal(signal.SIGTERM)
        waiting.send_signal(signal.SIGUSR1)
    node.tasks.tell_codes({1: 3, 2: -signal.SIGTERM})
    node.tasks.end(9)
    assert node.ends() == [(3, "rank 1\n"), (-signal.SIGTERM, "rank 2\n"), (9, "rank 3\n")]


def test_tasks_end_well_where_all_do(node: Node) -> None:
    node.receive()
    node.tasks.tell_codes({1: -signal.SIGTERM})  # a spare's
    node.tasks.end(0)
    assert [code for code, _ in node.ends()] == [0, 0, 0]


@pytest.mark.parametrize("received", [True, False])
def test_tasks_run_the_command_themselves_where_the_agent_says_so(node: Node, received: bool) -> None:
    if received:
        node.tasks.run_themselves([{**task.environment, "RANK": f"{n}"} for n, task in enumerate(node.receive(), 1)])
    else:
        node.tasks.run_themselves()
    said = [f"rank {n}\nran as {n} None\n" if received else "ran as None None\n" for n in (1, 2, 3)]
    assert node.ends() == [(4, text) for text in said]


def test_tasks_do_not_outlive_their_agent(node: Node, launcher: Path) -> None:
    node.tasks.close()
    assert [code for code, _ in node.ends()] == [-signal.SIGKILL] * 3
    # One whose channel somebody else holds open, too: its agent's end is seen by the process.
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, theirs, subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as agent:
        environment = os.environ | {"_UNICRON_TASK": str(theirs.fileno())}
        task = subprocess.Popen([launcher, "/the/agent", "true"], env=environment, pass_fds=[theirs.fileno()])
        mine.send(f"A{agent.pid}".encode())
        mine.send(b"H")
        mine.recv(65536)
        assert task.poll() is None
        agent.kill()
        assert wait_for(lambda: task.poll() is not None and task.returncode, "it ends") == -signal.SIGKILL


def test_tasks_run_the_command_where_the_first_one_has_no_agent(launcher: Path) -> None:
    """It could not be put in front of that one's command, say; a step is never left to wait for it."""
    node = Node(launcher, 1, begun=False)
    node.tasks.close()
    assert node.ends() == [(4, "ran as None None\n")]
    node.close()


def test_a_task_that_has_not_begun_is_named() -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    tasks = StepTasks()
    tasks.adopt({CHANNELS: str(mine.detach())})
    with pytest.raises(TasksMissing, match="task 1 of this node has not begun: timed out"):
        tasks.receive(0.1)
    theirs.close()
    with pytest.raises(TasksMissing, match="task 1 of this node has ended before it began"):
        tasks.receive()
    tasks.close()
