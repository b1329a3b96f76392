"""The training state outlives the ranks in their nodes' memory: all of them die, and the job goes on from there."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.jobs import Agent, World, json_lines
from transition.memory.images import inventory

pytestmark = pytest.mark.process
ITERATIONS = 12


class Remembering(World):
    """Each node has a memory of its own."""

    def memory(self, element: int) -> Path:
        folder = self.array.folder / f"memory{element}"
        folder.mkdir(exist_ok=True)
        return folder

    def start_agent(self, element: int, **settings: str) -> Agent:
        return super().start_agent(element, UNICRON_MEMORY=str(self.memory(element)), **settings)

    def newest(self, element: int) -> int:
        """The iteration of the newest whole image of a node."""
        return max((found.key.iteration for found in inventory(self.memory(element))), default=-1)


def killed_at_once(job: Remembering, slots: range) -> list[int]:
    """SIGKILL to all ranks; returns what each node had in memory then."""
    for slot in slots:
        os.kill(job.rank(slot)["pid"], signal.SIGKILL)
    return [job.newest(element) for element in job.agents]


def test_all_ranks_die_and_the_job_goes_on_from_memory(tmp_path):
    settings = {"TINY_ITERATIONS": str(ITERATIONS), "TINY_SLOW": "0.05"}
    with Remembering(tmp_path, nodes=2, **settings) as job:
        job.wait(lambda: job.trains([0, 1], 5), "6 iterations")
        killed_at_once(job, range(2))
        job.wait(lambda: job.job()["ended"], "the job is trained to its end")
        assert job.job()["ended"]["code"] == 0 and job.job()["ledger_violations"] == 0
        print(job.array.logs[-3000:])
        print([e for e in job.events()] if hasattr(job, "events") else "")
    for slot in (0, 1):
        print(json_lines(tmp_path / f"losses.{slot}"))
    assert 0
