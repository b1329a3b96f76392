"""What the ranks of a script without a session keep in their nodes' memory, and what of it they have in common when
their world begins anew, as it was or otherwise."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.support.controller import Controller
from tests.support.jobs import HERE, Job
from tests.support.processes import of_a_world, wait_for
from tests.support.warm import Script
from unicron_transition.snapshot.image_format import inventory, read_page

pytestmark = pytest.mark.process
LIMIT = 120.0
ALL = [0, 1, 2, 3]


def world(folder: Path, nodes: list[str], per_node: int, *saves: tuple[int, list[int], bool]) -> list:
    """What each rank of a world on these nodes finds; then it saves (iteration, ranks, replicated) in turn. A node
    without a name has no memory."""
    processes = []
    for rank, environment in enumerate(of_a_world(len(nodes) * per_node)):
        memory = ""
        if node := nodes[rank // per_node]:
            memory = str(folder / node)
            Path(memory).mkdir(exist_ok=True)
        local = {"LOCAL_RANK": str(rank % per_node), "LOCAL_WORLD_SIZE": str(per_node), "UNICRON_MEMORY": memory}
        said = {"MEMORY_OUT": str(folder), "MEMORY_SAVES": json.dumps(saves), "OMP_NUM_THREADS": "1"}
        processes.append(Script(HERE / "memory_train.py", environment=environment | local | said))
    ended = [process.wait(LIMIT) for process in processes]
    assert [each.returncode for each in ended] == [0] * len(processes), ended
    return [json.loads((folder / f"loaded.{rank}").read_text()) for rank in range(len(processes))]


def own(iteration: int, ranks: list[int] = ALL) -> list:
    return [[iteration, [100.0 * rank + iteration] * 2] for rank in ranks]


@pytest.mark.wide
def test_each_rank_gets_its_own_of_the_newest_iteration_that_all_have(tmp_path):
    nodes = ["a", "b"]
    assert world(tmp_path, nodes, 2, (1, ALL, False), (2, ALL, False), (3, [0, 1, 2], False)) == [None] * 4
    assert world(tmp_path, nodes, 2) == own(2), "rank 3 was killed before its copy was whole"
    assert world(tmp_path, ["a"], 2, (5, [0, 1], False)) == [None] * 2, "of a world of another size"
    assert world(tmp_path, ["a", "b"], 1) == own(5, [0, 1]), "rank 1 ran in the other node, and gets it from there"
    assert world(tmp_path, ["a", "c"], 2) == [None] * 4, "a fresh node has nothing, so nothing is in common"


@pytest.mark.wide
def test_what_all_have_alike_is_enough_if_one_rank_has_it(tmp_path):
    assert world(tmp_path, ["a", "b"], 2, (1, ALL, True), (2, ALL, True)) == [None] * 4
    assert sorted(path.name for path in (tmp_path / "a").glob("*.image")) == ["user-0-0.image", "user-0-1.image"]
    assert world(tmp_path, ["a", "b", "c"], 1) == [[2, [2.0, 2.0]]] * 3, "a fresh node, in a larger world"
    shutil.rmtree(tmp_path / "a")
    assert world(tmp_path, ["b"], 1, (3, [0], True)) == [[2, [2.0, 2.0]]], "the node that was first is gone"
    assert world(tmp_path, ["b", "c"], 1) == [[3, [3.0, 3.0]]] * 2


@pytest.mark.wide
def test_ranks_whose_node_has_no_memory_take_part_and_get_what_the_others_have(tmp_path):
    assert world(tmp_path, ["a", ""], 1, (1, [0, 1], True)) == [None] * 2
    assert world(tmp_path, ["", "a"], 1) == [[1, [1.0, 1.0]]] * 2
    assert world(tmp_path, ["b", ""], 1, (2, [0, 1], False)) == [None] * 2
    assert world(tmp_path, ["b", ""], 1) == [None] * 2, "nobody has what was rank 1's"


@pytest.mark.wide
def test_each_rank_gets_its_own_from_whichever_node_has_it(tmp_path):
    """Copies are what an agent would have made of them; the world's nodes have changed places."""
    world(tmp_path, ["a", "b"], 2, (1, ALL, False), (2, ALL, False))
    (tmp_path / "c").mkdir()
    for path in (tmp_path / "a").glob("*.image"):
        path.rename(tmp_path / "c" / f"copy-{path.name}")
    assert world(tmp_path, ["b", "c"], 2) == own(2), "each node has what is the other's ranks'"
    (tmp_path / "d").mkdir()
    assert world(tmp_path, ["d", "c"], 2) == [None] * 4, "nobody has what was rank 2's"
    assert world(tmp_path, ["c", "b", "d"], 2) == [None] * 6, "the world is a larger one"


def test_a_damaged_part_comes_from_its_next_source_or_all_take_an_older_state(tmp_path):
    world(tmp_path, ["a", "b"], 2, (1, ALL, False), (2, ALL, False))
    for node in ("c", "d"):
        shutil.copytree(tmp_path / "a", tmp_path / node)
        flip(newest_of(tmp_path / node, 0), node == "c")
    for path in (tmp_path / "d").glob("*.image"):
        path.rename(tmp_path / "b" / f"copy-{path.name}")
    assert world(tmp_path, ["b", "c"], 2) == own(2), "rank 0 got its own from the other node"
    flip(newest_of(tmp_path / "b", 0))
    assert world(tmp_path, ["b", "c"], 2) == own(1)


def newest_of(node: Path, place: int) -> Path:
    found = [each for each in inventory(node) if each.key.place == place]
    return max(found, key=lambda each: each.key.iteration).path


def flip(path: Path, really: bool = True) -> None:
    """One bit, in the middle of what it has."""
    found = read_page(path)
    data = bytearray(path.read_bytes())
    data[found.offset + found.data_bytes // 2] ^= 0x10 * really
    path.write_bytes(data)


class Saving:
    """Nodes under real agents, whose script keeps its state in memory. No world is smaller: it would begin anew with
    parts of its own."""

    def __init__(self, folder: Path, nodes: int, ranks: int, **settings: str):
        self.folder = folder
        (folder / "controller").mkdir()
        self.controller = Controller(folder / "controller", "forming_settle_seconds = 1")
        settings |= {"MEMORY_OUT": str(folder), "UNICRON_MODE": "restart", "UNICRON_RANKS_PER_NODE": str(ranks)}
        settings["UNICRON_MIN_NODES"] = str(nodes)
        command = [sys.executable, str(HERE / "memory_train.py")]
        self.job = Job(folder, self.controller.address, "81", nodes, command, **settings)

    def __enter__(self) -> Saving:
        return self

    def __exit__(self, *_: object) -> None:
        self.job.close()
        self.controller.close()

    def begun(self, rank: int) -> list[list[int]]:
        """(iteration, process) of each of its processes."""
        path = self.folder / f"begun.{rank}"
        return [[int(word) for word in line.split()] for line in path.read_text().splitlines()] if path.exists() else []

    def wait_begun(self, ranks: int, times: int = 1) -> list[int]:
        """With what they have begun the last time."""
        for rank in range(ranks):
            wait_for(lambda rank=rank: len(self.begun(rank)) >= times, f"rank {rank} began", now=self.told)
        return [self.begun(rank)[-1][0] for rank in range(ranks)]

    def told(self) -> str:
        return f"{self.job.logs}\n{self.controller.log[-3000:]}"

    def memory(self, node: str) -> Path:
        return next(Path(self.job.environment["UNICRON_MEMORY_DIR"]).glob(f"unicron.*.{node}.*"))

    def keeps(self, after: int, *nodes: str) -> None:
        """Wait until each of these nodes has something of a later iteration."""
        newest = lambda node: max((one.key.iteration for one in inventory(self.memory(node))), default=-1)  # noqa: E731
        wait_for(lambda: all(newest(node) > after for node in nodes), f"more than {after} is kept", now=self.told)

    def copies(self, node: str) -> dict[int, set[int]]:
        """iteration -> ranks of which a node has copies."""
        found: dict[int, set[int]] = {}
        for one in inventory(self.memory(node)):
            if one.path.name.startswith("copy-"):
                found.setdefault(one.key.iteration, set()).add(one.key.place)
        return found

    def copied(self, *nodes: tuple[str, set[int]]) -> int:
        """Wait until each of these nodes has what the ranks have kept of one iteration, and return that."""

        def common() -> set[int]:
            every = [{at for at, ranks in self.copies(node).items() if ranks >= wanted} for node, wanted in nodes]
            return set.intersection(*every)

        wait_for(common, lambda: f"copies in {nodes}", now=self.told)
        return max(common())

    def power_failure(self, element: int, node: str) -> None:
        self.job.agents[element].kill()
        shutil.rmtree(self.memory(node))

    def end(self) -> None:
        (self.folder / "stop").touch()
        assert set(self.job.wait()) == {0} and "bad message" not in self.told()


def test_a_node_is_lost_and_its_ranks_go_on_from_the_copies_in_the_next_one(tmp_path):
    """Two ranks a node, each with a state of its own."""
    with Saving(tmp_path, nodes=2, ranks=2, MEMORY_OWN="1") as job:
        assert job.wait_begun(4) == [0] * 4
        cut = job.copied(("n0", {2, 3}), ("n1", {0, 1}))
        job.power_failure(1, "n1")
        job.job.start(1, SLURMD_NODENAME="n5")
        again = job.wait_begun(4, 2)
        assert len(set(again)) == 1 and again[0] >= cut > 0, "each rank has checked that it is its own"
        job.end()


@pytest.mark.long
def test_another_element_takes_over_rank_numbers_move_and_a_damaged_copy_is_not_used(tmp_path):
    """The first node is lost: the second one's ranks are the first now, and their states go to the new one's."""
    with Saving(tmp_path, nodes=2, ranks=1, MEMORY_OWN="1", SLURM_ARRAY_TASK_COUNT="3") as job:
        assert job.wait_begun(2) == [0] * 2
        first = job.copied(("n0", {1}), ("n1", {0}))
        job.power_failure(0, "n0")
        job.job.start(2)
        again = job.wait_begun(2, 2)
        assert len(set(again)) == 1 and again[0] >= first
        wait_for(lambda: job.copied(("n1", {1}), ("n2", {0})) > again[0], "copies of the new world", now=job.told)
        job.job.agents.pop(2).kill()
        for found in inventory(job.memory("n1")):
            if found.path.name.startswith("copy-") and found.key.iteration == max(job.copies("n1")):
                flip(found.path)
        shutil.rmtree(job.memory("n2"))
        job.job.start(0, SLURMD_NODENAME="n6")
        third = job.wait_begun(2, 3)
        assert len(set(third)) == 1 and "do not match their checksum" in job.job.logs
        job.end()


def test_under_an_agent_a_killed_job_goes_on_with_what_it_kept(tmp_path):
    """Data-parallel: all ranks have the same, so nothing is copied while it lies in two nodes."""
    with Saving(tmp_path, nodes=2, ranks=1) as job:
        job.wait_begun(2)
        job.keeps(6, "n0", "n1")
        for rank in (0, 1):
            os.kill(job.begun(rank)[0][1], signal.SIGKILL)
        again = job.wait_begun(2, 2)
        assert again[0] == again[1] > 5
        job.keeps(again[0] + 1, "n0", "n1")
        assert not job.copies("n0") and not job.copies("n1")
        job.power_failure(0, "n0")
        job.job.start(0, SLURMD_NODENAME="n5")
        third = job.wait_begun(2, 3)
        assert third[0] == third[1] > again[0], "the other node had it"
        job.end()
