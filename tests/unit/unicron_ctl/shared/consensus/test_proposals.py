"""The plan that a proposer makes of its peers' promises, and who is told what of it."""

from __future__ import annotations

import msgspec

from tests.support.consensus import company, plan, promise
from unicron_ctl.shared.consensus.proposals import (
    PROPOSERS,
    Membership,
    is_agents_prefix,
    is_whole,
    make_proposal,
    proposal_for,
    proposers_of,
)
from unicron_ctl.shared.protocol import shared_plans, structs, wire
from unicron_ctl.shared.protocol.peer_messages import Promise


def made(members: Membership, promises: dict[int, Promise], **more) -> wire.Plan | None:
    found = make_proposal(members, promises, 2, (3, 1), "agent1", **more)
    return None if found is None else found[1]


def test_more_than_half_of_the_agents_are_a_quorum():
    assert [company(count).quorum for count in (1, 2, 3, 4, 5, 6)] == [1, 2, 2, 3, 3, 4]


def test_those_may_propose_that_others_can_reach_the_lowest_first():
    peers = {element: structs.Peer(element, f"agent{element}", f"n{element}:1", "") for element in range(1, 9)}
    peers[2] = msgspec.structs.replace(peers[2], address="")
    found = proposers_of(plan(1, list(range(17, -1, -1))), peers.get, 2)
    assert [peer.element for peer in found] == [1, 3, 4, 5] and len(found) == PROPOSERS


def test_ranks_that_are_late_and_ranks_of_no_member_take_no_part():
    promises = {element: promise(element) for element in range(3)}
    stranger = promise(0).ranks[0]
    promises[2] = msgspec.structs.replace(promises[2], ranks={**promises[2].ranks, 9: stranger})
    found = made(company(3), promises, late=[1])
    assert found is not None and found.members == [0, 2]
    proposal, _ = make_proposal(company(3), promises, 2, (3, 1), "agent1", [1])
    assert [(one.slot, one.agent) for one in proposal.lost] == [(1, "agent1")]


def test_ranks_that_have_finished_are_not_lost_and_say_where_training_ends():
    for phase, iteration, wanted, going in (
        ("stepped", 7, 99, True),
        ("stepped", 8, 99, False),
        ("computing", 99, 8, True),
        ("computing", 3, 9, False),
    ):
        finished = {"state": "finished", "phase": phase, "iteration": iteration, "train_iterations": wanted}
        promises = {0: promise(0, iteration=8), 1: promise(1, **finished)}
        found = make_proposal(company(3), promises, 2, (3, 1), "agent0")
        assert (found is not None) == going, (phase, iteration)
        assert found is None or [one.slot for one in found[0].lost] == [2]


def test_without_a_store_or_a_rank_that_can_go_on_there_is_no_plan():
    assert made(company(3), {}) is None and made(company(2), {0: promise(0, done=[0, 0])}) is None
    assert made(company(3), {0: promise(0, state="running"), 1: promise(1, state="exited")}) is None
    without = {element: msgspec.structs.replace(promise(element), store="") for element in range(2)}
    assert made(company(3), without) is None
    fault = structs.Fault(type="E", text="", at=0.0, fatal=True)
    found = made(company(3), {0: promise(0, fault=fault), 1: promise(1)})
    assert found is not None and found.members == [1] and found.store == "n1:4000"


def test_the_store_is_that_of_an_agent_that_goes_on_where_there_is_one():
    late = {0: promise(0, state="exited"), 1: promise(1), 2: promise(2)}
    found = made(company(3), late)
    assert found is not None and found.store == "n1:4000"
    late[1] = msgspec.structs.replace(late[1], store="")
    late[2] = msgspec.structs.replace(late[2], store="")
    found = made(company(3), late)
    assert found is not None and found.store == "n0:4000"


def test_the_plan_leaves_out_who_did_not_answer_and_who_cannot_go_on_and_names_them():
    promises = {
        0: promise(0, iteration=3, done=[0]),
        1: promise(1, state="exited", exit=structs.Exit(code=-9, at=0.0, lived=1.0), incarnation=2),
        3: promise(3, iteration=3, done=[1, 1]),
        4: promise(4, iteration=3, done=[5]),
    }
    peers = {element: structs.Peer(element, f"agent{element}", f"n{element}:1", "") for element in range(5)}
    members = Membership(plan(1, list(range(6))), peers, [peers[0]], 1)
    proposal, following = make_proposal(members, promises, 2, (1, 0), "agent0")
    assert following.members == [0, 4] and following.generation == 2 and following.store == "n0:4000"
    assert sorted(index for mine in following.assignment.values() for index in mine) == list(range(6))
    assert 5 in following.assignment[4]
    assert [(lost.slot, lost.agent, lost.incarnation) for lost in proposal.lost] == [
        (1, "agent1", 2),
        (2, "agent2", -1),
        (3, "agent3", 0),
        (5, "", -1),
    ]
    assert "4 of 6 agents" in following.reason


def test_agents_go_on_by_replicas_and_leave_the_rest_as_standbys():
    promises = {e: promise(e, done=[0, 2, 4] if e < 2 else [1, 3, 5]) for e in (0, 1, 2)}
    proposal, following = make_proposal(company(4, 2), promises, 2, (1, 0), "agent0")
    assert (following.members, following.replica) == ([0, 1], 2)
    assert following.assignment == {0: [0, 2, 4, 1, 3, 5]} and is_whole(proposal)
    assert [lost.slot for lost in proposal.lost] == [3], "slot 2 waits with its state"
    assert make_proposal(company(4, 2), {e: promise(e) for e in (0, 2)}, 2, (1, 0), "agent0") is None


def test_agents_deal_to_shard_groups_in_rounds():
    group = {"replica": 2, "layout": "F2", "micro_batches": 9}
    promises = {e: promise(e, done=[0, 1] if e < 2 else [2, 3], **group) for e in range(4)}
    _, following = make_proposal(company(6, 2), promises, 2, (1, 0), "agent0")
    assert following.assignment == {0: [0, 1, 4, 5, 8], 2: [2, 3, 6, 7]}


def test_each_agent_gets_the_micro_batches_of_its_replicas():
    crowd = company(2 * PROPOSERS + 2, 2)
    proposal, _ = make_proposal(crowd, {e: promise(e, iteration=1) for e in crowd.elements}, 2, (1, 0), "agent0")
    head = 2 * PROPOSERS
    for element in (head, head + 1):
        assert list(proposal_for(proposal, element, crowd).share.assignment) == [head]


def test_an_agent_that_may_not_propose_is_told_its_own_micro_batches():
    count, per_node = PROPOSERS + 2, 2
    peers = {element: structs.Peer(element, f"agent{element}", f"n{element}:1", "") for element in range(count)}
    before = plan(1, list(range(count * per_node)))
    members = Membership(before, peers, proposers_of(before, peers.get, per_node), per_node)
    status = {"state": "stopped", "broken": 1, "micro_batches": 24}
    promises = {
        element: Promise(
            generation=1,
            element=element,
            ballot=(1, 0),
            store="n0:4000",
            ranks={slot: structs.RankStatus(**status) for slot in (2 * element, 2 * element + 1)},
        )
        for element in range(count)
    }
    found = make_proposal(members, promises, 2, (1, 0), "agent0")
    assert found is not None and is_whole(found[0])
    own = proposal_for(found[0], PROPOSERS, members)
    assert sorted(own.share.assignment) == [8, 9] and not is_whole(own) and not own.share.peers
    assert [peer.element for peer in shared_plans.proposers(found[0].share)] == list(range(PROPOSERS))
    assert all(sorted(proposal_for(found[0], e, members).share.assignment) == list(range(12)) for e in range(PROPOSERS))
    fewer = make_proposal(members, {**promises, PROPOSERS: promise(0, state="exited")}, 2, (1, 0), "agent0")
    assert fewer is not None and not proposal_for(fewer[0], PROPOSERS, members).share.assignment, "it is left out"


def test_plans_of_agents_are_known_by_their_prefix():
    assert is_agents_prefix("7.g2.1.0") and not any(map(is_agents_prefix, ("7.g2", "7.g2.1.0.1", "7")))
    found = made(company(3), {element: promise(element) for element in range(3)})
    assert found is not None and found.prefix == "7.g2.3.1" and is_agents_prefix(found.prefix)
    assert shared_plans.whole(make_proposal(company(1), {0: promise(0)}, 2, (3, 1), "a")[0].share).members == [0]
