"""The recovery manager that the leaderboard runs beside lm-resiliency, whose coordinator is replaced here."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.leaderboard.ranks.lm_link import Link
from benchmarks.leaderboard.systems.base import free_port

NODES = ["n0", "n1", "n2", "n3"]


class Coordinator:
    """Plans, kept by their generation."""

    plans: list[dict[str, Any]]

    def __init__(self, store: object, run_id: str) -> None:
        pass

    def publish_successor(self, **plan: Any) -> SimpleNamespace:
        assert plan["generation"] == len(self.plans)
        active, quarantined = list(plan["active_node_ids"]), list(plan["quarantined_node_ids"])
        if plan["replacement"]:
            slot, node = plan["replacement"]
            quarantined.append(active[slot])
            active[slot] = node
        self.plans.append({"active": active, "step": plan["request"].checkpoint_step})
        return SimpleNamespace(
            generation=len(self.plans), active_node_ids=tuple(active), quarantined_node_ids=tuple(quarantined)
        )


class World:
    """A manager, and the links of four ranks and their agents to it."""

    def __init__(self, module: ModuleType, folder: Path, port: int) -> None:
        self.plans = Coordinator.plans
        self._folder, self._port, self._module = folder, port, module
        self.manager = module.Manager(port, folder)
        self.agents = {node: Link(agent=node) for node in NODES}
        self.ranks = [self.rank(rank, node, 0) for rank, node in enumerate(NODES)]
        self.until(lambda: (folder / "manager.json").exists())

    def rank(self, rank: int, node: str, generation: int) -> Link:
        return Link(rank=rank, node=node, generation=generation, topology="four")

    def until(self, done: Callable[[], bool]) -> None:
        for _ in range(200):
            self.manager.turn()
            if done():
                return
        raise AssertionError("the manager did not")

    def saved(self, step: int, ranks: int = 4) -> None:
        place = self._folder / "gemini" / "runs" / "r" / "t" / f"step-{step}"
        place.mkdir(parents=True)
        for rank in range(ranks):
            (place / f"rank-{rank}.pt").touch()

    def steps(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in self._folder.glob("gemini/runs/r/t/step-*"))

    def restart(self) -> None:
        for each in (self.manager._server, *self.manager._links):
            each.close()
        self.manager = self._module.Manager(self._port, self._folder)


@pytest.fixture
def world(tmp_path, monkeypatch) -> Iterator[World]:
    monkeypatch.setattr(Coordinator, "plans", [], raising=False)
    theirs = ModuleType("lm_resiliency.integrations.torchrun")
    theirs.TorchrunRecoveryCoordinator, theirs.TorchrunRecoveryRequest = Coordinator, SimpleNamespace  # type: ignore[attr-defined]
    for name in ("lm_resiliency", "lm_resiliency.integrations"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
    monkeypatch.delitem(sys.modules, "benchmarks.leaderboard.ranks.lm_manager", raising=False)
    module = importlib.import_module("benchmarks.leaderboard.ranks.lm_manager")
    port = free_port()
    monkeypatch.setenv("LEADERBOARD_MANAGER", str(port))
    made = World(module, tmp_path, port)
    yield made
    made.manager._server.close()
    monkeypatch.delitem(sys.modules, module.__name__)


def broken(link: Link) -> None:
    assert link._socket is not None
    link._socket.close()


def test_a_killed_rank_is_started_again_on_its_node_from_the_newest_step_that_all_have(world) -> None:
    for step, ranks in ((7, 4), (8, 4), (9, 3)):
        world.saved(step, ranks)
    broken(world.ranks[2])
    world.until(lambda: bool(world.plans))
    assert world.plans == [{"active": NODES, "step": 8}]
    for link in (world.ranks[0], world.ranks[1]):  # they end because of that
        broken(link)
    ranks = [world.rank(rank, node, 1) for rank, node in enumerate(NODES)]
    for _ in range(10):
        world.manager.turn()
    assert len(world.plans) == 1
    broken(ranks[0])
    world.until(lambda: len(world.plans) == 2)


def test_a_standby_takes_the_place_of_a_lost_node_and_is_waited_for(world) -> None:
    broken(world.ranks[1])
    broken(world.agents["n1"])
    for _ in range(10):
        world.manager.turn()
    assert world.plans == []
    standby = Link(agent="n4")
    world.until(lambda: bool(world.plans))
    assert world.plans[0]["active"] == ["n0", "n4", "n2", "n3"] and standby._socket is not None


@pytest.mark.parametrize("standby, active", [(True, ["n0", "n1", "n4", "n3"]), (False, NODES)])
def test_the_rank_for_which_all_others_wait_is_replaced_if_there_is_a_standby(world, standby, active) -> None:
    links = [Link(agent="n4")] if standby else []
    for rank in (0, 1, 3):
        world.ranks[rank].say(timed_out=True)
    world.until(lambda: bool(world.plans))
    assert world.plans[0]["active"] == active and len(links) == standby


def test_its_state_outlives_it_and_links_are_made_again(world) -> None:
    world.saved(3)
    broken(world.ranks[0])
    world.until(lambda: bool(world.plans))
    before = json.loads((world._folder / "manager.json").read_text())
    world.restart()
    for link in world.agents.values():
        link.wait()
        link.say()
    ranks = [world.rank(rank, node, 1) for rank, node in enumerate(NODES)]
    for _ in range(10):
        world.manager.turn()
    assert before["generation"] == 1 and before["recovered"] == 3 and len(world.plans) == 1
    broken(ranks[3])
    world.until(lambda: len(world.plans) == 2)
    assert world.plans[1] == {"active": NODES, "step": 3}


def test_old_checkpoints_are_removed(world) -> None:
    for step in range(40):
        world.saved(step)
    world.manager._pruned = 0.0
    world.manager.turn()
    assert world.steps() == list(range(9, 40))
