"""What goes wrong with copies of the training state: all who have a part of it are lost, an agent ends in the middle of
a transfer, a node has no room. The job goes on each time, and says from what."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tests.support.halves import SETTINGS, Halves
from unicron_transition.snapshot import folders

pytestmark = pytest.mark.process
SLOWLY = {"UNICRON_MEMORY_RATE": "0.1"}  # MB a second: a transfer takes long enough to be hit
LITTLE = 1 << 16  # bytes of a file: no image fits, and all else does


def drafts(job: Halves, node: str) -> list[Path]:
    """What a node is receiving."""
    return list(job.memory(node).glob("copy-*.new"))


@pytest.mark.wide  # as in test_remembered_shards, where both holders of a shard are lost
def test_where_all_who_had_a_part_of_the_state_are_lost_the_job_goes_on_from_the_file_and_says_so(
    tmp_path: Path,
) -> None:
    """Three parts, each in its node and in the next: two neighbours are lost, and the part of the first with them."""
    files = {"TINY_CHECKPOINTS": str(tmp_path / "checkpoints"), "TINY_CHECKPOINT_EVERY": "4"}
    with Halves(tmp_path, nodes=3, **SETTINGS | {"TINY_LAYOUT": "1 3 1"} | files) as job:
        job.wait(lambda: folders.whole(tmp_path / "checkpoints"), "a checkpoint")
        job.wait(lambda: job.copies("n0", 2) and job.copies("n1", 0) and job.copies("n2", 1), "a copy of each part")
        cut = max(found.key.iteration for found in job.copies("n2", 1))
        job.wait(lambda: job.trains([0, 1, 2], cut + 2), "on")
        for element in (0, 1):
            job.power_failure(element, f"n{element}")
        for element in (0, 1):
            job.array.start(element, SLURMD_NODENAME=f"n{element + 5}")
        plan = job.on_again()
        assert plan["iteration"] > 0 and plan["iteration"] % 4 == 0, "a file's"
        assert f"from iteration {plan['iteration']}" in plan["reason"] and "is left behind" in plan["reason"]
        assert job.job()["ledger_violations"] == 0


@pytest.mark.parametrize(
    "element",
    [pytest.param(0, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.wide)],
    ids=["sender", "receiver"],
)
def test_an_agent_is_killed_in_the_middle_of_a_transfer(tmp_path: Path, element: int) -> None:
    """Slot 0's half is on its way to n1. What has not come whole is gone, and the job goes on from what its nodes have
    in memory; then copies are made again."""
    with Halves(tmp_path, nodes=2, **SETTINGS | SLOWLY) as job:
        job.wait(lambda: job.trains([0, 1], 1), "training")
        half = job.wait(lambda: drafts(job, "n1"), "n1 is receiving")
        assert not job.copies("n1", 0)
        trained = job.array.losses(element)[-1]["iteration"]
        job.agents[element].kill()
        job.array.start(element)
        plan = job.on_again()
        assert plan["iteration"] >= trained, "no file, and nothing from the beginning"
        assert job.job()["ledger_violations"] == 0
        job.wait(lambda: job.copies("n1", 0) and job.copies("n0", 1), "whole copies")
        assert not any(path.exists() for path in half)


@pytest.mark.long
def test_a_node_without_room_for_copies_says_so_once_and_the_job_trains_on(tmp_path: Path) -> None:
    """The limit is the kernel's own, on what the receiving agent may write; its rank's memory has room."""
    with Halves(tmp_path, nodes=2, **SETTINGS) as job:
        job.both_copied()
        agent = job.agents[1].process.pid
        resource.prlimit(agent, resource.RLIMIT_FSIZE, (LITTLE, resource.RLIM_INFINITY))
        job.wait(lambda: failed(job) >= 1, "a copy comes to nothing, and is counted")
        newest = job.copies("n1", 0)[-1].key.iteration
        job.wait(lambda: failed(job) >= 3, "it is tried again")
        least = job.job()["iteration"] + 3
        job.wait(lambda: job.trains([0, 1], least), "the job trains on")
        assert job.copies("n1", 0)[-1].key.iteration == newest, "what was good is kept"
        assert job.agents[1].log.count("there is no room for") == 1
        assert job.agents[0].log.count("couldn't give a copy of the training state to element 1") == 1
        assert job.job()["ledger_violations"] == 0 and not job.failures()
        resource.prlimit(agent, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        job.wait(lambda: job.copies("n1", 0)[-1].key.iteration > newest, "there is room again")


def failed(job: Halves) -> int:
    """Images of the first node's that came to nothing on their way."""
    return job.job()["elements"][0]["copies_failed"]
