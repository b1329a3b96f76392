"""Slurmds are tried while all is well: only a port that has answered can refuse."""

from __future__ import annotations

from tests.support.world import FakeSlurm, World
from unicron_ctl.controller.failure_detector import ending_nodes
from unicron_ctl.controller.model.requests import Knock
from unicron_ctl.shared.protocol.reach import Reach


def holding(nodes: int) -> tuple[World, list[Knock]]:
    """A job of as many nodes, and the tries of slurmds that have not ended."""
    world, under_way = World(FakeSlurm(nodes)), list[Knock]()
    world.slurm.submit("1", nodes)
    perform = world._perform
    world._perform = lambda request: under_way.append(request) if isinstance(request, Knock) else perform(request)
    world.start_job(nodes=nodes)
    world.run(1.0)
    return world, under_way


def rounds(world: World, under_way: list[Knock], answer: Reach | None = Reach.REACHED) -> list[list[Knock]]:
    """Ends tries with this answer until there are no more. Returns those that were under way at a time."""
    found = []
    while under_way:
        found.append(list(under_way))
        under_way.clear()
        for knock in found[-1]:
            world.core.on_knock(knock, answer)
        world.run(0.1)
    return found


def test_few_slurmds_are_tried_at_once_and_each_until_it_has_answered():
    world, under_way = holding(30)
    found = rounds(world, under_way, None)
    assert max(map(len, found)) == ending_nodes.GREETINGS and len({knock for some in found for knock in some}) == 30
    assert not world.core.view.live.greeted and not world.core.view.live.slurmds, "a try that failed says nothing"
    world.run(ending_nodes.GREET_AGAIN_SECONDS / 2)
    assert not under_way
    world.run(ending_nodes.GREET_AGAIN_SECONDS / 2)
    assert len({knock for some in rounds(world, under_way) for knock in some}) == 30
    assert world.core.view.live.slurmds == {f"n{n}": f"n{n}:slurmd" for n in range(1, 31)}
    world.run(2 * ending_nodes.GREET_AGAIN_SECONDS)
    assert not under_way, "what is known is not asked again"


def test_a_try_of_a_node_in_service_says_nothing_about_a_later_return():
    world, under_way = holding(3)
    rounds(world, under_way)
    assert not world.core.slurm.gate.reached


def test_nothing_is_tried_while_nobody_is_heard():
    world, under_way = holding(3)
    rounds(world, under_way, Reach.SILENT)
    for agent in world.agents:
        agent.silent = agent.cut = True
    world.run(ending_nodes.GREET_AGAIN_SECONDS + 20.0)
    assert world.core.view.alone and not under_way


def test_after_a_restart_slurmds_are_tried_when_slurm_has_said_where_the_nodes_are():
    world = World(FakeSlurm(5))
    world.slurm.submit("1", 5)
    world.start_job(nodes=5)
    world.run(2.0)
    world.slurm.refuse = "squeue: no answer"
    world.restart()
    world.run(3.0)
    assert len(list(world.core.view.live.agents())) == 5 and not world.core.view.live.slurmds
    world.slurm.refuse = ""
    world.run(3.0)
    assert len(world.core.view.live.slurmds) == 5
