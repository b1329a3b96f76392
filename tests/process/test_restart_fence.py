"""Restart mode: no world is left behind that works beside the next one, and the controller's absence ends none.

Real agents, real processes, a real unicrond. Each process writes a line every tenth of a second, as if it were into a
file that all worlds share."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.controller import Controller
from tests.support.jobs import Job, json_lines, scripted
from tests.support.processes import is_alive, wait_for

pytestmark = pytest.mark.process
FENCE_SECONDS = 8.0  # longer than by default, for a busy machine
SETTINGS = f"""fence_seconds = {FENCE_SECONDS}
lease_periods = 4
forming_settle_seconds = 1
restart_grace = 20
allow_inject = true
"""
WRITES = """
import json, os, time
name = os.path.join(os.environ["OUT"], "lines." + os.environ["SLURMD_NODENAME"])
while True:
    line = {"generation": int(os.environ["UNICRON_GENERATION"]), "size": int(os.environ["WORLD_SIZE"]),
            "pid": os.getpid(), "at": time.time()}
    with open(name, "a") as file:
        file.write(json.dumps(line) + chr(10))
    time.sleep(0.1)
"""


class Writers:
    """A job of so many nodes."""

    def __init__(self, folder: Path, name: str, count: int):
        self.out = folder / f"out{name}"
        self.out.mkdir()
        self.count = count
        self.controller = Controller(folder, SETTINGS)
        command = scripted(folder, WRITES)
        self.job = Job(folder, self.controller.address, name, count, command, OUT=str(self.out), UNICRON_WARM="0")
        self.world(count)

    def lines(self, element: int) -> list[dict]:
        return json_lines(self.out / f"lines.n{element}")

    def world(self, size: int, after: int = 0, element: int = 0) -> dict:
        """Wait until there is a world of this size; the last line of it."""

        def found() -> list[dict]:
            return [line for line in self.lines(element) if line["size"] == size and line["generation"] > after]

        return wait_for(lambda: found() and found()[-1], lambda: f"a world of {size}\n{self.job.logs}")

    def pids(self) -> list[int]:
        return [self.lines(element)[-1]["pid"] for element in range(self.count)]

    def close(self) -> None:
        for agent in self.job.agents.values():
            if agent.alive:
                agent.process.send_signal(signal.SIGCONT)
        self.job.close()
        self.controller.close()


def test_without_the_controller_a_world_goes_on_and_a_stopped_agents_processes_end(tmp_path):
    """An agent that is stopped could not end its processes, and no new world may begin beside them: its watchdog does.
    The others answer each other, so they go on for as long as the controller is away."""
    job = Writers(tmp_path, "65", 3)
    try:
        for element in range(3):
            job.world(3, element=element)
        pids = job.pids()
        job.controller.kill()
        time.sleep(FENCE_SECONDS + 4.0)
        assert all(map(is_alive, pids)), job.job.logs
        os.kill(job.job.agents[1].process.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        wait_for(lambda: not is_alive(pids[1]), lambda: f"its process ends\n{job.job.logs}")
        assert time.monotonic() - stopped < FENCE_SECONDS + 15.0
        assert is_alive(pids[0]) and is_alive(pids[2]), job.job.logs
    finally:
        job.close()


def test_a_node_that_is_cut_off_does_not_work_beside_the_next_world(tmp_path):
    job = Writers(tmp_path, "66", 2)
    try:
        first = job.world(2)["generation"]
        job.world(2, element=1)
        cut_off = job.pids()[1]
        job.controller.ask("inject", fault="lost-network", job="66", slot=1, seconds=300.0)
        new = job.world(1, after=first)
        last = job.lines(1)[-1]
        assert not is_alive(cut_off) and last["generation"] == first, job.job.logs
        begun = next(line for line in job.lines(0) if line["generation"] == new["generation"])
        assert last["at"] < begun["at"], "it has written nothing since the new world began"
        said = job.job.agents[1].log
        assert "the processes end" in said or "nobody has renewed their lease" in said, said
    finally:
        job.close()
