"""A distributed optimizer's shards in the memory that real agents own: all ranks are lost, or the one node that had
them, and the job goes on without a file, to the same last bit."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.flips import flip
from tests.support.halves import SHARED_EXPERTS
from tests.support.jobs import World
from unicron_transition.snapshot.image_format import ImagePage, inventory

pytestmark = pytest.mark.process
SETTINGS = {"TINY_ITERATIONS": "100000", "TINY_SLOW": "0.05", "TINY_DISTOPT": "1"}


class Nodes(World):
    """With what lies in their memory."""

    def memory(self, node: str) -> Path:
        return next(Path(self.array.environment["UNICRON_MEMORY_DIR"]).glob(f"unicron.*.{node}.*"))

    def copies(self, node: str, *parts: tuple[int, int]) -> list[ImagePage]:
        """The newest cut of which a node has all these (place, shard) of others', and what goes with them, if there is
        one."""
        kinds = {"shard", "untrained"} if self.array.environment.get("TINY_FROZEN") == "1" else {"shard"}
        by_version: dict[int, list[ImagePage]] = {}
        for one in inventory(self.memory(node)):
            if one.path.name.startswith("copy-"):
                by_version.setdefault(one.key.iteration, []).append(one)
        for _, found in sorted(by_version.items(), reverse=True):
            shards = {(one.key.place, one.key.shard) for one in found if one.key.kind == "shard"}
            if shards == set(parts) and {one.key.kind for one in found} == kinds:
                return found
        return []

    def copied(self, node: str, *parts: tuple[int, int]) -> int:
        self.trained(1)
        self.wait(lambda: self.copies(node, *parts), f"copies of {parts} in {node}")
        return self.copies(node, *parts)[0].key.iteration

    def trained(self, iteration: int) -> None:
        self.wait(lambda: self.job().get("iteration", 0) >= iteration, f"iteration {iteration}")

    def power_failure(self, element: int, node: str) -> None:
        self.agents[element].kill()
        shutil.rmtree(self.memory(node))

    def on_again(self, more: int) -> dict:
        """Wait until it has trained so many iterations in another generation; returns the first plan for that."""
        self.wait(lambda: len([e for e in self.events("step") if e["generation"] > 1]) > more, "on again")
        return next(event["plan"] for event in self.events("plan") if event["plan"]["generation"] > 1)


def losses(rows: list[dict]) -> dict[int, float]:
    return {row["iteration"]: row["loss"] for row in rows}


def same(first: dict[int, float], again: dict[int, float]) -> None:
    """What was computed twice came out the same, to the last bit; nothing if the copy was of the last boundary."""
    both = first.keys() & again.keys()
    assert (both or min(again) == max(first) + 1) and {i: again[i] for i in both} == {i: first[i] for i in both}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"TINY_FROZEN": "1"}, marks=pytest.mark.wide),
        pytest.param(SHARED_EXPERTS, marks=pytest.mark.wide),
    ],
    ids=["trained", "frozen", "experts"],
)
def test_a_node_that_alone_had_half_of_the_model_is_lost(tmp_path: Path, kind: dict[str, str]) -> None:
    """One replica over two nodes: each shard has one holder."""
    with Nodes(tmp_path, nodes=2, **{"TINY_LAYOUT": "2 1 1"} | SETTINGS | kind) as job:
        cut = max(job.copied("n0", (1, 0)), job.copied("n1", (0, 0)))
        job.trained(cut + 5)
        job.power_failure(1, "n1")
        before = job.array.losses(0)
        job.array.start(1, SLURMD_NODENAME="n5")
        plan = job.on_again(before[-1]["iteration"] - cut + 3)
        assert cut <= plan["state"][1] == plan["iteration"] <= before[-1]["iteration"] + 1
        again = losses(job.array.losses(0)[len(before) :])
        assert min(again) == plan["iteration"]
        same(losses(before), again)
        assert job.job()["ledger_violations"] == 0
        incarnations = [rank["incarnation"] for element in job.job()["elements"] for rank in element["ranks"]]
        assert incarnations == [0, 0], "the survivor went back without a new process"


@pytest.mark.wide
def test_the_one_node_with_all_replicas_is_lost_and_the_spare_has_their_shards(tmp_path: Path) -> None:
    """Slurm starts its element on another node; whichever of the two goes on has them, or gets them."""
    ranks = {"UNICRON_RANKS_PER_NODE": "2", "UNICRON_SPARES": "1", "TINY_LAYOUT": "1 1 1"}
    with Nodes(tmp_path, nodes=2, **ranks, **SETTINGS) as job:
        job.wait(lambda: job.job().get("members") in ([0, 1], [2, 3]), "one node trains")
        (first, spare) = (0, 1) if job.job()["members"] == [0, 1] else (1, 0)
        cut = job.copied(f"n{spare}", (0, 0), (0, 1))
        job.trained(cut + 5)
        job.power_failure(first, f"n{first}")
        before = job.array.losses(2 * first)
        job.array.start(first, SLURMD_NODENAME="n5")
        plan = job.on_again(before[-1]["iteration"] - cut + 3)
        assert cut <= plan["state"][1] == plan["iteration"] <= before[-1]["iteration"]
        head = plan["members"][0]
        again = losses(job.array.losses(head)[len(before) if head == 2 * first else 0 :])
        assert min(again) == plan["iteration"]
        same(losses(before), again)


@pytest.mark.long
def test_a_copy_of_which_a_bit_has_flipped_is_seen_and_never_trained_with(tmp_path: Path) -> None:
    with Nodes(tmp_path, nodes=2, TINY_LAYOUT="2 1 1", **SETTINGS) as job:
        job.trained(max(job.copied("n0", (1, 0)), job.copied("n1", (0, 0))) + 3)
        job.power_failure(1, "n1")
        for found in inventory(job.memory("n0")):
            if found.path.name.startswith("copy-"):
                flip(found.path)
        job.array.start(1, SLURMD_NODENAME="n5")
        job.wait(lambda: "do not match their checksum" in job.agents[0].log, "the damage is seen")
        plan = job.on_again(2)
        assert plan["iteration"] == 0, "there is no other copy and no file"


def test_all_ranks_are_killed_and_go_on_from_their_agents_memory(tmp_path: Path) -> None:
    with Nodes(tmp_path, nodes=2, TINY_LAYOUT="1 1 1", **SETTINGS) as job:
        job.trained(5)
        for slot in (0, 1):
            os.kill(job.rank(slot)["pid"], signal.SIGKILL)
        plan = job.on_again(3)
        before = max(e["iteration"] for e in job.events("step") if e["generation"] == 1)
        assert plan["iteration"] > before and "memory has the state" in plan["reason"], "no iteration is lost"
