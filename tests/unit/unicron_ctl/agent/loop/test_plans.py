"""What follows for a node from the plans that its ranks were given."""

from __future__ import annotations

from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from unicron_ctl.agent.loop.plans import LONG_WAIT_SECONDS, PLANS_HELD, Plans, wait_long
from unicron_ctl.shared.protocol import shared_plans, structs, wire
from unicron_transition.snapshot.image_format import SHARD, STATE, Key


def share(generation: int, members: list[int], replica: int = 1, **more: Any) -> wire.PlanShare:
    plan = wire.Plan(generation, members, "n1:1", "p", replica=replica, **more)
    return shared_plans.share(plan, shared_plans.common(plan), members)


def test_only_the_last_plans_are_held() -> None:
    plans = Plans([0, 1])
    held = {generation: share(generation, [0, 1]) for generation in range(1, PLANS_HELD + 3)}
    for generation, part in held.items():
        plans.add_plan(part, generation)
    found = [generation for generation in held if plans.share(generation) is not None]
    assert found == list(held)[-PLANS_HELD:]
    assert plans.share(found[0]) is held[found[0]]


def test_the_nodes_that_train_a_place_take_turns_to_write_its_state() -> None:
    nodes = [Plans(slots) for slots in ([0, 1], [2, 3], [4, 5])]
    places = [Key(STATE, slot=0, iteration=7, place=place, size=2) for place in (0, 1)]
    for generation, members, first in ((1, [0, 1, 2, 3, 4, 5], 0), (2, [2, 3, 4, 5], 1), (3, [4, 5], 2)):
        for node in nodes:
            node.add_plan(share(generation, members, replica=2), generation)
        turns = [None] * first + [tuple(range(first, node)) for node in range(first, 3)]
        assert [[node.writers_before(key) for node in nodes] for key in places] == [turns, turns]
    nodes[0].add_plan(share(4, [1, 4]), 4)
    assert [nodes[0].writers_before(key) for key in places] == [None, ()], "it trains the other half alone"


def test_a_shard_is_written_where_its_rank_trains() -> None:
    here, there = Plans([0, 1]), Plans([2, 3])
    shard = Key(SHARD, slot=2, iteration=7, shard=2, count=4)
    assert (here.writers_before(shard), there.writers_before(shard)) == (None, ())
    there.add_plan(share(1, [0, 1, 3]), 1)
    assert there.writers_before(shard) is None


def test_without_a_plan_every_node_has_its_say() -> None:
    node, key = Plans([4, 5]), Key(STATE, slot=4, iteration=0)
    node.add_plan(share(1, [0, 1, 4, 5]), 1)
    assert node.writers_before(key) == (0,), "the first node of the plan writes first"
    assert Plans([4, 5]).writers_before(key) == ()


def test_where_nobody_trains_who_has_a_copy_comes_after_all_who_trained_the_place() -> None:
    nodes = [Plans([slot]) for slot in range(5)]
    for node in nodes:
        node.add_plan(share(1, [0, 1, 2, 3], replica=2), 1)
    first, second = (Key(STATE, slot=0, iteration=7, place=place, size=2) for place in (0, 1))
    assert [node.writers_before_at_rest(first) for node in nodes] == [(), (0, 2), (0,), (0, 2), (0, 2)]
    assert [node.writers_before_at_rest(second) for node in nodes] == [(1, 3), (), (1, 3), (1,), (1, 3)]
    here, gone = (Key(SHARD, slot=slot, iteration=7, shard=slot, count=5) for slot in (1, 4))
    assert [node.writers_before_at_rest(here) for node in nodes] == [(1,), (), (1,), (1,), (1,)]
    assert [node.writers_before_at_rest(gone) for node in nodes] == [None] * 5, "the plan goes on without that one"


@pytest.mark.parametrize(
    ("states", "before", "ended_before"),
    [
        (["running", "exited"], "writers_before_at_work", "writers_before_at_work"),
        (["stopped", "waiting"], "writers_before_at_rest", "writers_before_at_rest"),
        (["waiting", "starting"], "all_other_writers", "writers_before_at_rest"),
        (["waiting", "exited"], None, "writers_before_at_rest"),
        (["finished"], None, "writers_before_at_rest"),
    ],
)
def test_how_a_node_writes_its_part_of_what_ends_in_the_middle(states, before, ended_before) -> None:
    plans = Plans([0, 1])

    def found(ended: bool) -> str | None:
        saving = plans.saving(states, ended)
        assert saving is None or saving.rests == (saving.before != plans.writers_before_at_work)
        assert saving is None or saving.prunes == (not ended and saving.before != plans.all_other_writers)
        return saving.before.__name__ if saving is not None else None

    alone = before if before in ("writers_before_at_work", "writers_before_at_rest") else None
    assert [found(False), found(True)] == [alone, alone], "no plan yet"
    plans.add_plan(share(1, [0, 1, 2]), 1)
    assert [found(False), found(True)] == [before, ended_before]
    plans.add_plan(share(2, [2]), 2)
    assert [found(False), found(True)] == [alone, alone], "the others go on without it"


@pytest.mark.parametrize("goes_on", [0, 1])
def test_an_offer_that_is_not_taken_changes_no_turn(goes_on: int) -> None:
    """Defects: Slurm ended two nodes at once; the first to be heard was to leave, the other to go on. The first wrote
    nothing of what it alone had. Then it did, but if it was the first node, both wrote the same files."""
    nodes = [Plans([slot]) for slot in range(2)]
    for node in nodes:
        node.add_plan(share(1, [0, 1], replica=1), 1)
        node.on_entered(1)
        node.add_plan(share(2, [goes_on], boundary=True), 2)
    state = Key(STATE, slot=1, iteration=7)
    shards = [Key(SHARD, slot=slot, iteration=7, shard=slot, count=2) for slot in (0, 1)]
    saving = [node.saving(["running"], False) for node in nodes]
    assert [[each.before(key) for key in (state, *shards)] for each in saving if each] == [
        [(), (), None],
        [(0,), None, ()],
    ]
    nodes[goes_on].on_entered(2)
    assert nodes[goes_on].saving(["running"], False).before(state) == ()
    assert nodes[1 - goes_on].saving(["stopped"], False).before(state) == (goes_on,), "it has left: it comes after"


def test_a_newcomer_with_an_offer_comes_after_those_that_train() -> None:
    """Also if they have taken it, and it has not heard of that."""
    nodes = [Plans([slot]) for slot in range(3)]
    for node in nodes[:2]:
        node.add_plan(share(1, [0, 1]), 1)
        node.on_entered(1)
    for node in nodes:
        node.add_plan(share(2, [0, 1, 2], boundary=True), 2)
    key = Key(STATE, slot=0, iteration=7)
    for taken in (1, 2):
        for node in nodes[:2]:
            node.on_entered(taken)
        assert [node.writers_before_at_work(key) for node in nodes] == [(), (0,), (0, 1)]


def test_a_generation_that_breaks_takes_its_offer_with_it() -> None:
    """Of the next plan only the members write, which need not have said yet that they run."""
    nodes = [Plans([slot]) for slot in range(3)]
    for node in nodes:
        node.add_plan(share(1, [0, 1, 2]), 1)
        node.on_entered(1)
        node.add_plan(share(2, [2], boundary=True), 2)
        node.add_plan(share(3, [1, 2]), 3)
    key = Key(STATE, slot=0, iteration=7)
    assert [node.writers_before_at_work(key) for node in nodes[1:]] == [(), (1,)]


def test_whose_ranks_begin_anew_comes_after_all_others() -> None:
    nodes = [Plans([slot]) for slot in range(3)]
    for node in nodes:
        node.add_plan(share(1, [0, 1], replica=1), 1)
    key = Key(STATE, slot=0, iteration=7)
    assert [node.all_other_writers(key) for node in nodes] == [(1,), (0,), (0, 1)]
    nodes[0].add_plan(share(2, [0]), 2)
    assert nodes[0].all_other_writers(key) == (), "there is nobody else"


def test_the_job_s_log_is_told_of_each_new_world_once_and_why(snapshot: SnapshotAssertion) -> None:
    """Defect: the world was halved, and only `explain` said so."""
    first, second = Plans([0, 1]), Plans([2, 3])

    def news(generation: int, members: list[int], broken_by: str = "") -> list[str]:
        for node in (first, second):
            node.add_plan(share(generation, members), generation)
            if broken_by:
                node.on_break(broken_by)
        return [line for node in (first, second) for line in (node.on_entered(generation), node.on_entered(generation))]

    assert news(1, [0, 1, 2, 3]) == [""] * 4, "the first one is no news"
    said = [news(2, [0, 1, 2, 3], "slot 2 exited with -6"), news(3, [2, 3], "n1 is gone")]
    assert [[bool(line) for line in lines] for lines in said] == [[True, *[False] * 3], [False, False, True, False]]
    second.on_break("slot 2 exited with 1")
    second.add_plan(share(4, [2, 3], source=2, reason="lost n1; 1 node is ready"), 4)
    assert [*said, second.on_entered(4)] == snapshot, "formed anew: its plan says why"
    assert first.on_entered(0) == "" and second.on_entered(5) == "", "what the agents agree on they say themselves"


@pytest.mark.parametrize(
    ("states", "age", "long"),
    [
        (["waiting", "waiting"], LONG_WAIT_SECONDS, True),
        (["waiting", "waiting"], LONG_WAIT_SECONDS - 1.0, False),
        (["waiting", "running"], LONG_WAIT_SECONDS, False),
        (["waiting", "exited"], LONG_WAIT_SECONDS, False),
    ],
)
def test_ranks_wait_long_once_all_of_them_have_been_ready_for_a_minute(states: list[str], age: float, long: bool):
    statuses = [structs.RankStatus(state=state, changed=1000.0 - 300.0 * (not at)) for at, state in enumerate(states)]
    assert wait_long(statuses, 1000.0 + age) is long
