"""Copies of shards in other nodes: where the ranks' own lie in one node, and how a job without a holder gets them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.support.world import FakeAgent, World
from unicron_ctl.controller.replication.cuts import SHARDS, newest_good, newest_whole
from unicron_ctl.shared.protocol import structs, wire
from unicron_transition.generations.sharding import state_base

MARK, BASE = "0000a", 1
NAME = state_base(BASE, int(MARK, 16))


class Node(FakeAgent):
    """An agent whose node has a memory; its ranks have a distributed optimizer."""

    memory = True

    def __init__(self, world: World, element: int, ranks: int, node: str = "", **settings):
        super().__init__(world, "1", element, node or f"n{element + 1}", ranks, **settings)

    def ready(self) -> None:
        for slot in self.slots:
            self.set(slot, state="waiting", sharded=True)

    def has(self, version: int, *parts: tuple[int, int], ways: int = 1, untrained: bool = False) -> None:
        """Images of a cut: (place, shard)."""
        for place, shard in parts:
            slot = shard * self.replica + place
            about = (slot, version, place, self.replica)
            self.images = [*self.images, structs.Image("shard", *about, shard, ways, BASE, MARK)]
            if untrained:
                self.images = [*self.images, structs.Image("untrained", *about, 0, 1, 0, "f00")]
        self.status()


def started(
    nodes: int, replica: int, ranks: int = 1, copies: int = 1, bare: int = -1, **settings
) -> tuple[World, list[Node]]:
    """bare: the element of a node without a memory."""
    world = World()
    agents = [Node(world, e, ranks, nodes=nodes, replica=replica) for e in range(nodes)]
    for agent in agents:
        agent.settings = replace(agent.settings, copies=copies, **settings)
        agent.memory = agent.element != bare
        agent.register()
        agent.ready()
    world.run(0.3)
    assert world.job().phase == "running"
    return world, agents


def told(agents: list[Node]) -> list[list[int]]:
    """To whom each gives."""
    return [[target.element for target in order.targets] for order in (agent.orders(wire.Cut)[0] for agent in agents)]


@pytest.mark.parametrize(
    ("job", "to"),
    [
        ({"nodes": 2, "replica": 2}, [[1], [0]]),
        ({"nodes": 3, "replica": 3, "copies": 2}, [[1, 2], [0, 2], [0, 1]]),
        ({"nodes": 2, "replica": 1, "ranks": 2, "spares": 1}, [[1], []]),
        ({"nodes": 3, "replica": 2, "bare": 2, "spares": 1}, [[1], [0], []]),
    ],
    ids=["one replica", "two copies", "replicas in one node: to the spare", "past a spare without a memory"],
)
def test_who_gives_its_shards_to_whom(job: dict[str, int], to: list[list[int]]):
    """Defect: one node without a memory, whatever it did, turned copies off for the whole job."""
    world, agents = started(**job)
    assert told(agents) == to and "no_copies" not in world.kinds()


def test_who_takes_nothing_from_a_node_is_passed_over_by_that_one():
    world, agents = started(nodes=3, replica=3)
    assert told(agents) == [[1], [2], [0]]
    agents[0].refusing = {"n2:70": structs.Failing(1, "timed out")}
    agents[0].status()
    world.run(2.0)
    first, second = agents[0].orders(wire.Cut)
    assert [target.element for target in second.targets] == [2] and second.iteration == first.iteration


def test_a_spare_that_comes_later_gets_copies_too():
    world = World()

    def node(element: int) -> Node:
        made = Node(world, element, 2, nodes=2, replica=1)
        made.settings = replace(made.settings, spares=1, min_nodes=1)
        return made

    first = node(0)
    first.register()
    first.ready()
    world.run(60.0)
    assert world.job().phase == "running" and not first.orders(wire.Cut)
    spare = node(1)
    spare.register()
    spare.ready()
    world.run(2.0)
    assert told([first]) == [[1]]


@pytest.mark.parametrize("job", [{"nodes": 2, "replica": 1, "ranks": 2}, {"nodes": 4, "replica": 2}], ids=str)
def test_where_partners_are_in_other_nodes_there_are_no_cuts(job: dict[str, int]):
    world, agents = started(**job)
    world.run(10.0)
    assert not any(agent.orders(wire.Cut) for agent in agents)


def test_a_member_without_a_memory_keeps_all_from_copies_for_nobody_has_its_shard_of_a_cut():
    world, agents = started(nodes=2, replica=2, bare=1)
    world.run(10.0)
    assert not any(agent.orders(wire.Cut) for agent in agents)
    (said,) = [event.record for event in world.log if event.kind == "no_copies"]
    assert (said.nodes, said.places) == (["n2"], [1])
    world, agents = started(nodes=2, replica=1, ranks=2, bare=1)
    world.run(10.0)
    assert "no_copies" not in world.kinds(), "partners in other nodes are enough"


def test_a_cut_is_good_when_every_shard_and_what_goes_with_it_is_in_enough_nodes():
    world, agents = started(nodes=2, replica=2)
    cut = agents[0].orders(wire.Cut)[0].iteration
    agents[0].has(cut, (0, 0), (1, 0), untrained=True)
    agents[1].has(cut, (1, 0), untrained=True)
    world.run(10.0)
    assert agents[0].orders(wire.Cut)[-1].iteration == cut, "that of place 0 lies in one node"
    agents[1].has(cut, (0, 0))
    world.run(2.0)
    assert agents[0].orders(wire.Cut)[-1].iteration == cut, "and what goes with it, still"
    agents[1].has(cut, (0, 0), untrained=True)
    world.run(2.0)
    last = agents[0].orders(wire.Cut)[-1]
    assert last.iteration > cut and last.good == cut


def lost(untrained: bool = False, memory: bool = True) -> tuple[World, list[Node], Node]:
    """Each of two nodes has one half of the model; the second one is gone, and another one is there instead."""
    world, agents = started(nodes=2, replica=2)
    agents[0].has(20, (0, 0), (1, 0), untrained=untrained)
    agents[1].has(20, (0, 0), (1, 0), untrained=untrained)
    world.run(1.0)
    return world, agents, lose_the_second(world, agents, memory)


def lose_the_second(world: World, agents: list[Node], memory: bool = True) -> Node:
    """Returns the one that is there instead."""
    agents[1].silent = True
    world.dead_nodes.add("n2")
    agents[0].set(0, state="stopped", broken=1, generation=1, iteration=23, shards=[structs.Shards(NAME, 23, 1, [0])])
    new = Node(world, 1, 1, "n5", nodes=2, replica=2)
    new.memory = memory
    world.run(60.0)
    new.register()
    new.ready()
    world.run(3.0)
    return new


def test_after_a_loss_each_shard_comes_to_a_rank_of_its_place_and_the_job_goes_back_to_it():
    world, agents, new = lost()
    assert world.job().phase == "forming"
    (here,) = {(o.image.place, o.holder.element) for o in agents[0].orders(wire.Fetch)}
    (there,) = {(o.image.place, o.holder.element, o.image.iteration) for o in new.orders(wire.Fetch)}
    assert here == (0, 0) and there == (1, 0, 20)
    held = [structs.Shards(NAME, 20, 1, [0])]
    agents[0].set(0, shards=[*held, structs.Shards(NAME, 23, 1, [0])])
    new.set(1, shards=held)
    world.run(2.0)
    plan = [event.record.plan for event in world.log if event.kind == "plan"][-1]
    assert plan.state == (NAME, 20) and plan.members == [0, 1] and world.job().phase != "forming"


def test_a_newcomer_without_a_memory_is_not_waited_for_to_get_a_shard():
    _, agents, new = lost(memory=False)
    assert not new.orders(wire.Fetch) and not agents[0].orders(wire.Fetch)


def test_what_goes_with_the_shards_comes_before_them():
    world, _, new = lost(untrained=True)
    assert {order.image.kind for order in new.orders(wire.Fetch)} == {"untrained"}
    new.has(20, (1, 0), untrained=True)
    new.images = [image for image in new.images if image.kind == "untrained"]
    new.status()
    world.run(3.0)
    assert new.orders(wire.Fetch)[-1].image.kind == "shard"


def test_a_state_of_which_nobody_has_what_goes_with_the_shards_is_passed_over_for_an_older_one():
    world, agents = started(nodes=2, replica=2)
    for agent in agents:
        agent.has(20, (0, 0), (1, 0), untrained=True)
        agent.has(30, (0, 0), untrained=True)
        agent.has(30, (1, 0))
    world.run(1.0)
    job = world.core.view.job(world.job())
    stored = SHARDS.stored_states(job)
    assert newest_good(job, stored) == newest_whole(stored) == 20
    new = lose_the_second(world, agents)
    fetched = [*agents[0].orders(wire.Fetch), *new.orders(wire.Fetch)]
    assert {(order.image.place, order.image.iteration) for order in fetched} == {(0, 20), (1, 20)}
