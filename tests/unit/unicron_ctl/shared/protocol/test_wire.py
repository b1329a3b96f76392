"""Messages on their way: plans are shared out and put together again, and what fits no schema is refused."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_ctl.shared.protocol import ranges, shared_plans, structs, wire
from unicron_detector import words

SLOTS = st.lists(st.integers(0, 200), unique=True)
PLANS = st.builds(
    wire.Plan,
    generation=st.integers(1, 2**40),
    members=SLOTS,
    store=st.sampled_from(["", "n0:4000", "[fe80::1]:99"]),
    prefix=st.text(max_size=20),
    boundary=st.booleans(),
    joiners=SLOTS,
    source=st.none() | st.integers(0, 200),
    step=st.none() | st.integers(0, 10**6),
    iteration=st.none() | st.integers(0, 10**6),
    assignment=st.dictionaries(st.integers(0, 200), st.lists(st.integers(0, 10**5), max_size=4)),
    reason=st.text(max_size=20),
    state=st.none() | st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
)


@given(PLANS, SLOTS)
def test_an_agent_gets_the_whole_plan_but_for_other_agents_micro_batches(plan, slots):
    sent = wire.encode(shared_plans.share(plan, shared_plans.common(plan), slots))
    got = shared_plans.whole(wire.decode(sent, wire.ToAgent))
    own = {slot: indices for slot, indices in plan.assignment.items() if slot in slots}
    assert got == msgspec.structs.replace(plan, assignment=own)


def test_an_agent_gets_the_micro_batches_of_each_replica_in_which_it_has_a_rank():
    plan = wire.Plan(
        generation=1, members=[0, 5, 2, 3], store="", prefix="", replica=2, assignment={0: [0, 2], 2: [1, 3]}
    )
    plans = [
        shared_plans.whole(shared_plans.share(plan, shared_plans.common(plan), slots))
        for slots in ([4, 5], [2], [6, 7], [3, 0])
    ]
    assert [one.assignment for one in plans] == [{0: [0, 2]}, {2: [1, 3]}, {}, {2: [1, 3], 0: [0, 2]}]
    assert all(one.members == plan.members and one.replica == 2 for one in plans)


def test_members_that_are_no_whole_replicas_are_refused(snapshot):
    common = msgspec.Raw(
        wire.encode(shared_plans.PlanCommon(generation=1, members=[(0, 2)], store="", prefix="", replica=2))
    )
    with pytest.raises(wire.BadMessage) as refused:
        shared_plans.whole(wire.PlanShare(common=common))
    assert str(refused.value) == snapshot


def test_only_those_who_lead_are_told_of_everybody():
    everybody = [structs.Peer(element, f"a{element}", f"n{element}:1", "k" * 40) for element in range(5)]
    plan = wire.Plan(generation=1, members=[0, 1], store="", prefix="")
    common = shared_plans.common(plan, everybody[:2])
    parts = [
        wire.decode(wire.encode(shared_plans.share(plan, common, [0], peers)), wire.ToAgent)
        for peers in (everybody, ())
    ]
    assert [shared_plans.proposers(part) for part in parts] == [everybody[:2]] * 2
    assert [part.peers for part in parts] == [everybody, []]


@given(SLOTS)
def test_slots_as_runs_and_back(slots):
    runs = words.runs(slots)
    assert shared_plans.expand(runs) == slots
    assert all(second[0] != first[1] + 1 for first, second in itertools.pairwise(runs)), "as few as can be"


def test_the_common_part_is_small_whatever_the_size_of_the_job():
    plan = wire.Plan(generation=3, members=list(range(16_384)), store="n0:4000", prefix="p", assignment={7: [1]})
    assert len(shared_plans.common(plan)) < 200


@pytest.mark.parametrize("members", [[(5, 3)], [(0, ranges.MOST_SLOTS)], [(0, 2**60)] * 3])
def test_runs_that_are_none_are_refused_before_they_cost_memory(members):
    common = msgspec.Raw(wire.encode(shared_plans.PlanCommon(generation=1, members=members, store="", prefix="")))
    with pytest.raises(wire.BadMessage, match=r"not valid runs of slots|<= 4294967295"):
        shared_plans.whole(wire.PlanShare(common=common))


@pytest.mark.parametrize("common", [b"\xc0", b"\x81\xa1x\x01", b"\x93\x01\x02\x03"])
def test_a_common_part_that_is_none_is_refused(common):
    with pytest.raises(wire.BadMessage):
        shared_plans.whole(wire.PlanShare(common=msgspec.Raw(common)))


def test_another_version_is_refused_with_what_to_do():
    with pytest.raises(wire.OtherRelease, match="upgrade this side"):
        wire.decode(wire.encode(wire.Ping(v=wire.VERSION + 1)), wire.ToAgent)


def test_hostile_bytes_are_refused():
    for data in (b"", b"\xc1", b"\x81" * 5000, b"\x91" * 5000, b"x" * (wire.MAX_BYTES + 1)):
        with pytest.raises(wire.BadMessage):
            wire.decode(data)


def test_a_merged_step_keeps_what_each_rank_computed():
    ranks = [
        structs.RankStep(slot=8, micro_batches=[0, 2], seconds=1.0, loss=5.0, phases=[0.1] * len(structs.PHASES)),
        structs.RankStep(slot=9, micro_batches=[1], seconds=1.0, loss=5.0, computed=[1, 1]),
    ]
    reports = [structs.StepReport(generation=2, iteration=3, total=4, at=1.0, ranks=ranks)]
    for sent in (
        wire.Steps(job="7", element=4, agent="a", reports=reports),
        wire.Status(job="7", element=4, agent="a", sent=1.0, steps=reports),
    ):
        assert wire.decode(wire.encode(sent)) == sent
