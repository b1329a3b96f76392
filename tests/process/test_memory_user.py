"""What the ranks of a script without a session keep in their nodes' memory, and what of it they have in common when
their world begins anew, as it was or otherwise."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.controller import Controller
from tests.support.jobs import HERE, Job
from tests.support.processes import of_a_world, wait_for
from tests.support.warm import Script

pytestmark = pytest.mark.process
LIMIT = 120.0
ALL = [0, 1, 2, 3]


def world(folder: Path, nodes: list[str], per_node: int, *saves: tuple[int, list[int], bool]) -> list:
    """What each rank of a world on these nodes finds; then it saves (iteration, ranks, replicated) in turn."""
    processes = []
    for rank, environment in enumerate(of_a_world(len(nodes) * per_node)):
        memory = folder / nodes[rank // per_node]
        memory.mkdir(exist_ok=True)
        local = {"LOCAL_RANK": str(rank % per_node), "LOCAL_WORLD_SIZE": str(per_node), "UNICRON_MEMORY": str(memory)}
        said = {"REMEMBERS_OUT": str(folder), "REMEMBERS_SAVES": json.dumps(saves), "OMP_NUM_THREADS": "1"}
        processes.append(Script(HERE / "remembers.py", environment=environment | local | said))
    ended = [process.wait(LIMIT) for process in processes]
    assert [each.returncode for each in ended] == [0] * len(processes), ended
    return [json.loads((folder / f"loaded.{rank}").read_text()) for rank in range(len(processes))]


def own(iteration: int, ranks: list[int] = ALL) -> list:
    return [[iteration, [100.0 * rank + iteration] * 2] for rank in ranks]


def test_each_rank_gets_its_own_of_the_newest_iteration_that_all_have(tmp_path):
    nodes = ["a", "b"]
    assert world(tmp_path, nodes, 2, (1, ALL, False), (2, ALL, False), (3, [0, 1, 2], False)) == [None] * 4
    assert world(tmp_path, nodes, 2) == own(2), "rank 3 was killed before its copy was whole"
    assert world(tmp_path, ["a"], 2, (5, [0, 1], False)) == [None] * 2, "of a world of another size"
    assert world(tmp_path, ["a", "b"], 1) == [None] * 2, "rank 1 ran in the other node"
    assert world(tmp_path, ["a", "c"], 2) == [None] * 4, "a fresh node has nothing, so nothing is in common"


def test_what_all_have_alike_is_enough_if_one_rank_has_it(tmp_path):
    assert world(tmp_path, ["a", "b"], 2, (1, ALL, True), (2, ALL, True)) == [None] * 4
    assert sorted(path.name for path in (tmp_path / "a").glob("*.image")) == ["user-0-0.image", "user-0-1.image"]
    assert world(tmp_path, ["a", "b", "c"], 1) == [[2, [2.0, 2.0]]] * 3, "a fresh node, in a larger world"
    shutil.rmtree(tmp_path / "a")
    assert world(tmp_path, ["b"], 1, (3, [0], True)) == [[2, [2.0, 2.0]]], "the node that was first is gone"
    assert world(tmp_path, ["b", "c"], 1) == [[3, [3.0, 3.0]]] * 2


def test_under_an_agent_a_killed_job_goes_on_with_what_it_kept(tmp_path):
    (tmp_path / "controller").mkdir()
    controller = Controller(tmp_path / "controller", "forming_settle_seconds = 1")
    command = [sys.executable, str(HERE / "saves_on.py")]
    job = Job(tmp_path, controller.address, "81", 2, command, SAVES_OUT=str(tmp_path), UNICRON_MODE="restart")
    try:

        def begun(rank: int) -> list[list[int]]:
            path = tmp_path / f"begun.{rank}"
            return (
                [[int(word) for word in line.split()] for line in path.read_text().splitlines()]
                if path.exists()
                else []
            )

        wait_for(lambda: begun(0) and begun(1), "both have begun", now=lambda: job.logs)
        time.sleep(2.0)
        for rank in (0, 1):
            os.kill(begun(rank)[0][1], signal.SIGKILL)
        wait_for(lambda: len(begun(0)) > 1 and len(begun(1)) > 1, "both have begun again", now=lambda: job.logs)
        assert begun(0)[1][0] == begun(1)[1][0] > 5
        (tmp_path / "stop").touch()
        assert job.wait() == [0, 0] and "bad message" not in job.logs + controller.log
    finally:
        job.close()
        controller.close()
