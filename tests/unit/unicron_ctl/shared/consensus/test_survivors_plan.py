"""The decision after a Break: exact partition, nothing of a survivor's thrown away, the commit rule; and where several
ranks make a replica, complete ones go on, and nobody is thrown away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_ctl.shared.consensus.survivors_plan import deal, decide, newest_state
from unicron_ctl.shared.protocol.structs import RankStatus, Shards
from unicron_transition.generations import layout

TOTAL = 8


def stopped(iteration: int, phase: str = "computing", done: Any = (), *shards: Shards, **more: Any) -> RankStatus:
    return RankStatus(state="stopped", iteration=iteration, phase=phase, done=list(done), shards=list(shards), **more)


def alike(slots: Any, iteration: int, phase: str = "computing", done: Any = (), **more: Any) -> dict[int, RankStatus]:
    """These slots have stopped in the same way."""
    return {slot: stopped(iteration, phase, done, **more) for slot in slots}


def is_partition(assignment: dict[int, list[int]], total: int = TOTAL) -> bool:
    return sorted(index for indices in assignment.values() for index in indices) == list(range(total))


class Case(NamedTuple):
    """Survivors' reports, and fields of the decision. found: None where nobody can go on. unusable: the slots. says:
    its reason, and why slots are unusable, are in tests/texts. more: further arguments of `decide`."""

    reports: Mapping[int, RankStatus]
    total: int
    found: dict[str, Any] | None
    unusable: tuple[int, ...] = ()
    says: bool = False
    more: dict[str, Any] = {}


PAIRS = {"size": 2, "former": [0, 1, 2, 3]}
SHARD_GROUP: dict[str, Any] = {"replica": 2, "layout": "F2"}
SINGLE: dict[str, Case] = {
    "before the reduce the dead rank's share is dealt round-robin": Case(
        {0: stopped(7, done=[0, 4]), 1: stopped(7, "reducing", [1, 5]), 3: stopped(7, done=[3])},
        8,
        {"step": None, "iteration": 7, "assignment": {0: [0, 4, 2], 1: [1, 5, 6], 3: [3, 7]}}
        | {"reused": 5, "recomputed": 1, "redistributed": 2},
        says=True,
        more={"lost_done": {2: [2]}, "lost_share": [2, 6], "lost_iteration": 7},
    ),
    "all are synced: they step, and nothing is computed again": Case(
        {0: stopped(7, "synced", [0, 2]), 2: stopped(7, "synced", [1])},
        4,
        {"step": 7, "iteration": 8, "assignment": deal(range(4), [0, 2]), "reused": 4, "recomputed": 0},
        more={"lost_done": {1: [3]}, "lost_iteration": 7},
    ),
    "whoever is synced follows those who have stepped": Case(
        {0: stopped(7, "stepped", [0]), 1: stopped(7, "synced", [1]), 2: stopped(8, done=[2])},
        3,
        {"step": 7, "iteration": 8, "assignment": {0: [0], 1: [1], 2: [2]}},
    ),
    "one is synced and another not: nobody steps": Case(
        {0: stopped(7, "synced", [0, 2]), 1: stopped(7, "reducing", [1, 3])},
        4,
        {"step": None, "assignment": {0: [0, 2], 1: [1, 3]}},
    ),
    "a finished member proves that the last iteration was committed": Case(
        {1: stopped(99, "synced", [1])}, 2, {"step": 99, "iteration": 100}, more={"finished_at": 100}
    ),
    "a rank too far behind counts as lost": Case(
        {0: stopped(7), 1: stopped(5, "synced")}, 4, {"members": [0]}, unusable=(1,), says=True
    ),
    "nobody is left": Case({}, 4, None),
    "nobody has a report that can be used": Case({0: stopped(3, done=[0, 0])}, 4, None),
    "the share of another iteration is not counted": Case(
        {0: stopped(7, done=[0]), 1: stopped(7)},
        4,
        {"reused": 1, "recomputed": 0, "redistributed": 0},
        more={"lost_done": {2: [2]}, "lost_share": [2], "lost_iteration": 6},
    ),
    **{
        f"micro-batches must be of the iteration, not {wrong}": Case(
            {0: stopped(7, done=wrong), 1: stopped(7, done=[3])},
            4,
            {"members": [1]},
            unusable=(0,),
            says=True,
        )
        for wrong in ([4], [-1], [1, 1])
    },
    "the first and the last micro-batch are of the iteration": Case(
        {0: stopped(7, done=[0, 3])}, 4, {"members": [0], "reused": 2}
    ),
    "the first iteration is like any other": Case(
        {0: stopped(0, "reducing", [0]), 1: stopped(0, "synced", [1])},
        2,
        {"members": [0, 1], "iteration": 0, "reused": 2},
    ),
    "the iteration that ends the training counts": Case(
        {0: stopped(99, "reducing", [0])}, 2, {"members": [0]}, more={"finished_at": 99}
    ),
    "a later one has ended the training": Case({0: stopped(99, "reducing", [0])}, 2, None, more={"finished_at": 100}),
    "a rank that has stepped has nothing of the next iteration, beside an unusable report too": Case(
        {0: stopped(7, "stepped", [0]), 1: stopped(8, done=[1, 1])},
        3,
        {"members": [0], "step": None, "iteration": 8, "reused": 0},
        unusable=(1,),
    ),
    "of two ranks with one micro-batch the first goes on": Case(
        {0: stopped(8, done=[0, 1]), 1: stopped(8, done=[2]), 2: stopped(8, done=[1])},
        3,
        {"members": [0, 1], "assignment": {0: [0, 1], 1: [2]}, "step": None},
        unusable=(2,),
    ),
    "and it makes the third one's report count, whatever its own iteration is": Case(
        {0: stopped(8, done=[0, 1]), 1: stopped(8, done=[2]), 2: stopped(8, done=[1])}
        | {3: stopped(7, "stepped", [1]), 4: stopped(7, "synced", [0])},
        3,
        {"members": [0, 1, 3, 4], "step": 7, "iteration": 8},
        unusable=(2,),
        says=True,
    ),
}
REPLICAS: dict[str, Case] = {
    "a loss takes out its replica, whose living rank is a standby": Case(
        alike((0, 1), 7, done=(0, 2)) | {2: stopped(7)},
        4,
        {"members": [0, 1], "standbys": [2], "step": None, "iteration": 7, "assignment": {0: [0, 2, 1, 3]}}
        | {"reused": 2, "redistributed": 2},
        says=True,
        more=PAIRS | {"lost_share": [1, 3], "lost_iteration": 7},
    ),
    "ranks of two broken replicas compose one and keep nothing: a mix cannot be taken apart": Case(
        {0: stopped(7, done=(0, 2)), 3: stopped(7, done=(1, 3))},
        4,
        {"members": [0, 3], "standbys": [], "assignment": {0: [0, 1, 2, 3]}, "reused": 0, "recomputed": 4},
        more=PAIRS | {"lost_iteration": 7},
    ),
    "a replica has what all of its ranks have": Case(
        {0: stopped(7, "reducing", (0, 2)), 1: stopped(7)} | alike((2, 3), 7, done=(1, 3)),
        4,
        {"assignment": {0: [0], 2: [1, 3, 2]}, "reused": 2},
        more=PAIRS,
    ),
    "a replica keeps the order of its head": Case(
        {0: stopped(7, done=(2, 0)), 1: stopped(7, done=(0, 2))},
        3,
        {"assignment": {0: [2, 0, 1]}},
        more={"size": 2, "former": [0, 1]},
    ),
    "and nothing of another iteration": Case(
        alike((0, 1), 7, "synced", (2,)) | alike((2, 3), 8, done=(1,)),
        4,
        {"assignment": {0: [0, 3], 2: [1, 2]}},
        more=PAIRS,
    ),
    "all ranks of all members are synced": Case(
        alike((0, 1), 7, "synced", (0,)) | alike((2, 3), 7, "synced", (1,)), 2, {"step": 7}, more=PAIRS
    ),
    "one of them is not: nobody steps": Case(
        alike((0, 1), 7, "synced", (0,)) | {2: stopped(7, "synced", (1,)), 3: stopped(7, "reducing", (1,))},
        2,
        {"step": None, "assignment": {0: [0], 2: [1]}},
        more=PAIRS,
    ),
    "a rank that has stepped proves the step for all, even as a standby": Case(
        alike((0, 1), 7, "synced", (0,)) | {2: stopped(7, "stepped", (1,))},
        2,
        {"members": [0, 1], "standbys": [2], "step": 7, "iteration": 8},
        more=PAIRS,
    ),
    "a composed replica that is synced steps: the reduce was complete at each place, whoever it was with": Case(
        {slot: stopped(7, "synced", (slot // 2,)) for slot in (0, 3, 4, 5)},
        3,
        {"members": [0, 3, 4, 5], "step": 7},
        more={"size": 2, "former": [0, 1, 2, 3, 4, 5]},
    ),
    "without a rank for each place nobody goes on": Case(alike((0, 2), 7), 4, None, more=PAIRS),
    "a composed replica of the broken generation is one: slot 2 is no mate of slot 3 any more": Case(
        alike((0, 3), 7, done=(0,)) | {4: stopped(7, done=(1,))},
        2,
        {"members": [0, 3], "standbys": [4], "assignment": {0: [0, 1]}},
        more={"size": 2, "former": [0, 3, 4, 5]},
    ),
    **{
        f"replicas that are not known ({former}) are those at home": Case(
            {slot: stopped(7, done=(slot // 2,)) for slot in (0, 1, 2, 4)},
            3,
            {"members": [0, 1], "standbys": [2, 4], "reused": 1},
            more={"size": 2, "former": former},
        )
        for former in ((), (0, 1, 2), (0, 1, 2, 4))
    },
    "the second replica at home": Case(
        {slot: stopped(7, done=(slot // 2,)) for slot in (2, 3)},
        3,
        {"members": [2, 3], "reused": 1},
        more={"size": 2},
    ),
    "two replicas with the same micro-batch do not both go on": Case(
        alike(range(4), 7, done=(0, 1)),
        4,
        {"members": [], "reused": 0, "recomputed": 0, "redistributed": 0},
        unusable=(2,),
        says=True,
        more=PAIRS,
    ),
    "shard groups get as many at a time as they compute at a time": Case(
        alike((0, 1), 7, done=(0, 1), **SHARD_GROUP) | alike((4, 5), 7, done=(4, 5), **SHARD_GROUP),
        9,
        {"assignment": {0: [0, 1, 2, 3, 8], 4: [4, 5, 6, 7]}, "reused": 4},
        more={"size": 2, "former": list(range(6))},
    ),
    "lanes that make no replica are not believed": Case(
        alike((0, 1), 7, replica=2, layout="F3") | alike((2, 3), 7, replica=2, layout="F3"),
        4,
        {"assignment": {0: [0, 2], 2: [1, 3]}},
        more=PAIRS,
    ),
    "the first iteration of replicas is like any other": Case(
        {slot: stopped(0, done=(slot // 2,)) for slot in range(4)},
        2,
        {"members": [0, 1, 2, 3], "iteration": 0, "assignment": {0: [0], 2: [1]}},
        more=PAIRS,
    ),
}


@pytest.mark.parametrize("case", [*SINGLE.values(), *REPLICAS.values()], ids=[*SINGLE, *REPLICAS])
def test_how_the_survivors_go_on(case: Case, snapshot) -> None:
    decision = decide(case.reports, case.total, **case.more)
    if case.found is None:
        assert decision is None
        return
    assert decision is not None and tuple(decision.unusable) == case.unusable
    assert {field: getattr(decision, field) for field in case.found} == case.found
    assert not decision.members or is_partition(decision.assignment, case.total)
    said = " ".join([decision.reason, *decision.unusable.values()])
    assert not case.says or said == snapshot


@st.composite
def consistent_survivors(draw):
    """Reports as the protocol can produce them: at most one iteration apart, everyone behind the first is synced."""
    total = draw(st.integers(1, 40))
    slots = draw(st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True))
    top = draw(st.integers(1, 50))
    some_stepped = draw(st.booleans())
    owner = {index: draw(st.sampled_from([*slots, None])) for index in range(total)}
    reports = {}
    for slot in slots:
        done = [index for index in range(total) if owner[index] == slot]
        if some_stepped and draw(st.booleans()):
            reports[slot] = stopped(top - 1, "synced", done)
        elif some_stepped and draw(st.booleans()):
            reports[slot] = stopped(top - 1, "stepped", done)
        else:
            reports[slot] = stopped(top, draw(st.sampled_from(["computing", "reducing", "synced"])), done)
    return total, top, reports


@given(consistent_survivors())
def test_the_assignment_is_a_partition_and_keeps_what_survivors_have(case):
    total, _, reports = case
    decision = decide(reports, total)
    assert decision is not None and decision.unusable == {}
    assert decision.members == sorted(reports)
    assert is_partition(decision.assignment, total)
    for slot, report in reports.items():
        if report.iteration == decision.iteration and report.phase != "stepped":
            assert set(report.done) <= set(decision.assignment[slot])
        elif report.phase == "synced":
            assert report.iteration == decision.step
        else:
            assert report.phase == "stepped" and report.iteration + 1 == decision.iteration
    remaining = [
        len(set(decision.assignment[slot]) - (set(r.done) if r.iteration == decision.iteration else set()))
        for slot, r in reports.items()
    ]
    assert max(remaining) - min(remaining) <= 1


@given(
    st.dictionaries(
        st.integers(0, 9),
        st.builds(
            stopped,
            st.integers(0, 3),
            st.sampled_from(["computing", "reducing", "synced", "stepped"]),
            st.lists(st.integers(-2, 9), max_size=6),
        ),
        max_size=6,
    ),
    st.integers(1, 8),
)
def test_reports_that_cannot_be_degrade_and_never_crash(reports, total):
    decision = decide(reports, total)
    if decision is None:
        return
    assert is_partition(decision.assignment, total)
    assert set(decision.members) | set(decision.unusable) == set(reports)
    assert not set(decision.members) & set(decision.unusable)
    for slot in decision.members:
        if reports[slot].iteration == decision.iteration and reports[slot].phase != "stepped":
            assert set(reports[slot].done) <= set(decision.assignment[slot])


@st.composite
def broken_generations(draw):
    """Reports as the protocol can produce them, of replicas that may be composed of any slots."""
    size = draw(st.sampled_from([1, 2, 3, 4]))
    lanes = draw(st.sampled_from([lanes for lanes in range(1, size + 1) if size % lanes == 0]))
    shape = {"replica": size, "layout": layout.Layout(size // lanes, shard=lanes).text}
    count = draw(st.integers(1, 4))
    places = [draw(st.permutations(range(count))) for _ in range(size)]
    former = layout.arrange([[places[p][d] * size + p for p in range(size)] for d in range(count)])
    top, stepped = draw(st.integers(1, 9)), draw(st.booleans())
    reports = {}
    for number, replica in enumerate(layout.replicas(former, size)):
        share = layout.deal(TOTAL, count, number, lanes)
        rounds = draw(st.integers(0, len(share)))
        for slot in replica:
            if draw(st.integers(0, 3)) == 0:
                continue
            if stepped:
                phase = draw(st.sampled_from(["synced", "stepped"]))
                reports[slot] = stopped(top - 1, phase, tuple(share), **shape)
            else:
                phase = draw(st.sampled_from(["computing", "reducing", "synced"]))
                done = share if phase != "computing" else share[: rounds * lanes * draw(st.integers(0, 1))]
                reports[slot] = stopped(top, phase, tuple(done), **shape)
    return size, lanes, former, reports


@given(broken_generations())
def test_members_are_complete_replicas_and_each_micro_batch_is_somebodys_once(case):
    size, lanes, former, reports = case
    found = decide(reports, TOTAL, size=size, former=former)
    living = [sum(slot % size == place for slot in reports) for place in range(size)]
    if found is None:
        assert min(living) == 0
        return
    assert found.unusable == {} and len(found.members) == size * min(living)
    assert sorted([*found.members, *found.standbys]) == sorted(reports)
    assert all([s % size for s in one] == list(range(size)) for one in layout.replicas(found.members, size))
    assert layout.heads(found.members, size) == sorted(layout.heads(found.members, size))
    assert is_partition(found.assignment) and list(found.assignment) == layout.heads(found.members, size)
    whole = [one for one in layout.replicas(former, size) if set(one) <= reports.keys()]
    after = layout.replicas(found.members, size)
    assert all(one in after for one in whole), "a healthy replica stays as it is"
    kept = {head: set[int]() for head in found.assignment}
    if found.step is None:
        for one in whole:
            if all(reports[slot].phase != "stepped" for slot in one):
                kept[one[0]] = set.intersection(*(set(reports[slot].done) for slot in one))
                assert kept[one[0]] <= set(found.assignment[one[0]])
        rounds = [-(-len(set(found.assignment[head]) - had) // lanes) for head, had in kept.items()]
        assert max(rounds) - min(rounds) <= 1, "what is left takes all replicas as long"
    else:
        assert all(reports[s].phase == "stepped" or reports[s].phase == "synced" for s in found.members)


# ---------------------------------------------------------------- distributed optimizer
def test_a_shard_beyond_the_count_is_none():
    reports = {0: stopped(7, "computing", (), shards(7, (0, 1, 2, 3)))}
    assert newest_state(reports, reports, 1) == ((1, 7), {0})
    reports = {0: stopped(7, "computing", (), shards(7, (0, 1, 3)))}
    assert newest_state(reports, reports, 1) == (None, set())


def shards(version: int, held: tuple[int, ...], base: int = 1, count: int = 3) -> Shards:
    return Shards(base, version, count, list(held))


def test_all_go_on_from_the_newest_state_of_which_every_shard_lives():
    """Three replicas of one rank, copies in a ring; slot 1 is lost. Slot 0 has not got the copies of version 8 yet."""
    old = {0: shards(7, (0, 2)), 2: shards(7, (2, 1))}
    reports = {
        0: stopped(7, "stepped", (0, 3), old[0], shards(8, (0,))),
        2: stopped(7, "stepped", (2, 5), old[2], shards(8, (2, 1))),
    }
    found = decide(reports, 6, former=[0, 1, 2])
    assert (found.state, found.iteration, found.step) == ((1, 8), 8, None)
    reports[2] = stopped(7, "synced", (2, 5), old[2])
    found = decide(reports, 6, former=[0, 1, 2])
    assert (found.state, found.iteration) == ((1, 7), 7), "the step of slot 0 proves nothing: version 8 is not complete"
    assert found.assignment == {0: [0, 3], 2: [2, 5, 1, 4]}, "what slot 0 had is in its step"
    assert "state after 7 steps" in found.reason


def test_without_a_complete_state_nobody_goes_on():
    reports = {0: stopped(7, "computing", (), shards(7, (0,))), 2: stopped(7, "computing", (), shards(7, (2,)))}
    assert decide(reports, 6, former=[0, 1, 2]) is None


def test_the_shards_must_cover_every_place():
    one = {0: stopped(7, "computing", (), shards(7, (0, 1), count=2))}
    both = one | {1: stopped(7, "computing", (), shards(7, (0,), count=2), shards(6, (0, 1), count=2))}
    assert newest_state(both, both, 2)[0] is None, "place 0 has no state 6, place 1 has not all of state 7"
    both[0].shards.append(shards(6, (0, 1), count=2))
    assert newest_state(both, both, 2) == ((1, 6), {0, 1})
    assert decide(both, 4, size=2, former=[0, 1, 2, 3]) is None, (
        "they are in iteration 7: others may have the rest of it"
    )
    for status in both.values():
        status.iteration = 6
    assert decide(both, 4, size=2, former=[0, 1, 2, 3]).state == (1, 6)
