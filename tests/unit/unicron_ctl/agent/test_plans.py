"""What follows for a node from the plans that its ranks were given."""

from __future__ import annotations

from transition.memory.images import SHARD, STATE, Key
from unicron_ctl.agent.plans import PLANS_HELD, Plans
from unicron_ctl.protocol import sharing, wire


def share(generation: int, members: list[int], replica: int = 1) -> wire.PlanShare:
    plan = wire.Plan(generation, members, "n1:1", "p", replica=replica)
    return sharing.share(plan, sharing.common(plan), members)


def test_only_the_last_plans_are_held() -> None:
    plans = Plans([0, 1])
    held = {generation: share(generation, [0, 1]) for generation in range(1, PLANS_HELD + 3)}
    for generation, part in held.items():
        plans.hold(part, generation)
    found = [generation for generation in held if plans.share(generation) is not None]
    assert found == list(held)[-PLANS_HELD:]
    assert plans.share(found[0]) is held[found[0]]


def test_the_nodes_that_train_a_place_take_turns_to_write_its_state() -> None:
    nodes = [Plans(slots) for slots in ([0, 1], [2, 3], [4, 5])]
    places = [Key(STATE, slot=0, iteration=7, place=place, size=2) for place in (0, 1)]
    for generation, members, first in ((1, [0, 1, 2, 3, 4, 5], 0), (2, [2, 3, 4, 5], 1), (3, [4, 5], 2)):
        for node in nodes:
            node.hold(share(generation, members, replica=2), generation)
        turns = [None] * first + [tuple(range(first, node)) for node in range(first, 3)]
        assert [[node.turn(key) for node in nodes] for key in places] == [turns, turns]
    nodes[0].hold(share(4, [1, 4]), 4)
    assert [nodes[0].turn(key) for key in places] == [None, ()], "it trains the other half alone"


def test_a_shard_is_written_where_its_rank_trains() -> None:
    here, there = Plans([0, 1]), Plans([2, 3])
    shard = Key(SHARD, slot=2, iteration=7, shard=2, count=4)
    assert (here.turn(shard), there.turn(shard)) == (None, ())
    there.hold(share(1, [0, 1, 3]), 1)
    assert there.turn(shard) is None


def test_without_a_plan_every_node_has_its_say() -> None:
    assert Plans([4, 5]).turn(Key(STATE, slot=4, iteration=0)) == ()
