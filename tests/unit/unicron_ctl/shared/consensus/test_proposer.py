"""One proposer, told what others say and what time it is: when it sends again, waits, gives up and goes on.

The clock begins at 0, as a monotonic one may, so that each span ends exactly at its bound.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tests.support.consensus import ME, company, promise
from unicron_ctl.shared.consensus.proposals import Membership, make_proposal, proposal_for
from unicron_ctl.shared.consensus.proposer import (
    BALLOT_SECONDS,
    GATHER_SECONDS,
    PAUSE_SECONDS,
    RESEND_SECONDS,
    REST_ITERATIONS,
    REST_SECONDS,
    TEACH_SECONDS,
    Proposer,
    ProposerState,
)
from unicron_ctl.shared.protocol import peer_messages, shared_plans, structs
from unicron_ctl.shared.protocol.peer_messages import Accept, Halt, Learn, Prepare, Promise, Proposal

IDLE, PREPARING, HALTING = ProposerState.IDLE, ProposerState.PREPARING, ProposerState.HALTING
ACCEPTING, TEACHING = ProposerState.ACCEPTING, ProposerState.TEACHING


def requested(members: Membership, at: float = 0.0) -> Proposer:
    one = Proposer(ME, members)
    one.on_request(at)
    return one


def promised(one: Proposer, *elements: int, at: float = 0.0, **ranks: Any) -> None:
    for element in elements:
        one.on_promise(promise(element, **ranks), at)


def sent(one: Proposer) -> list[tuple[type, int]]:
    """What it sends, and to whom; empties its outbox."""
    found = [(type(message), element) for element, message in one.outbox]
    one.outbox.clear()
    return found


def with_accepted(element: int, number: int, ballot: tuple[int, int] = (1, 1), of: int | None = None) -> Promise:
    """A promise of an agent that has accepted a plan of that number; of: as that agent was told of it."""
    made = make_proposal(company(5), {0: promise(0), 1: promise(1)}, number, ballot, "agent1")
    assert made is not None
    proposal: Proposal = made[0]
    accepted = proposal if of is None else proposal_for(proposal, of, company(5))
    return msgspec.structs.replace(promise(element), accepted=accepted)


# ---------------------------------------------------------------- sending again
def test_whoever_has_not_answered_is_asked_again_after_a_moment():
    one = requested(company(5))
    assert sent(one) == [(Prepare, element) for element in range(5)]
    promised(one, 1)
    one.tick(RESEND_SECONDS - 0.05)
    assert sent(one) == []
    one.tick(RESEND_SECONDS)
    assert sent(one) == [(Prepare, element) for element in (0, 2, 3, 4)]
    one.tick(RESEND_SECONDS + 0.1)
    assert sent(one) == []
    one.on_nack((9, 1), 1.0)
    one.tick(20.0)
    assert one.state is IDLE and sent(one) == [], "nothing is under way"


def test_ranks_that_still_run_are_told_again_and_agents_that_have_not_promised_are_asked():
    one = requested(company(3))
    promised(one, 0)
    promised(one, 1, state="running", broken=0)
    sent(one)
    one.tick(RESEND_SECONDS)
    assert one.state is HALTING and sent(one) == [(Halt, 1), (Prepare, 2)]


# ---------------------------------------------------------------- giving up
def test_a_higher_ballot_ends_ones_own_and_the_next_is_above_all_that_were_heard_of():
    one = requested(company(3))
    number = one._ballot[0]
    one.on_nack((number, -1), 1.0)
    one.on_nack((number, 0), 1.0)
    assert one.state is PREPARING, "a lower one, and its own"
    one.on_nack((number + 6, 1), 1.0)
    assert one.state is IDLE
    one.on_request(1.0 + PAUSE_SECONDS - 0.25)
    assert one.state is IDLE
    one.on_request(1.0 + PAUSE_SECONDS)
    assert one.state is PREPARING and one._ballot == (number + 7, ME.element)


def test_a_ballot_of_which_nothing_comes_is_given_up():
    one = requested(company(3))
    one.tick(BALLOT_SECONDS - 0.25)
    assert one.state is PREPARING
    one.tick(BALLOT_SECONDS)
    assert one.state is IDLE
    one = requested(company(3), 1.0)
    promised(one, 0, 1, 2, at=2.0)
    assert one.state is ACCEPTING
    one.tick(2.0 + BALLOT_SECONDS - 0.25)
    assert one.state is ACCEPTING
    one.tick(2.0 + BALLOT_SECONDS)
    assert one.state is IDLE


def test_whoever_hears_the_controller_ends_the_ballot_once():
    alive = msgspec.structs.replace(promise(1), controller_alive=True)
    one = requested(company(3))
    one.on_promise(msgspec.structs.replace(alive, ballot=(7, 7)), 0.0)
    assert one.state is PREPARING, "of another ballot"
    one.on_promise(alive, 0.0)
    assert one.state is IDLE
    one.on_promise(alive, 1.0)
    one.on_request(PAUSE_SECONDS)
    assert one.state is PREPARING, "its word on a ballot that was given up delays no other"


def test_promises_of_another_ballot_do_not_count():
    one = requested(company(3))
    for element in range(3):
        one.on_promise(msgspec.structs.replace(promise(element), ballot=(7, 7)), 0.0)
    assert one.state is PREPARING
    promised(one, 0)
    assert one.state is PREPARING, "one is no quorum"
    promised(one, 1)
    assert one.state is HALTING


def test_where_no_rank_can_go_on_the_ballot_is_given_up():
    one = requested(company(3))
    promised(one, 0, 1, 2, state="exited")
    assert one.state is IDLE


# ---------------------------------------------------------------- what was accepted before
def test_the_highest_ballots_plan_is_proposed_again_the_whole_of_it_where_there_is_one():
    one = requested(company(5))
    one.on_promise(with_accepted(0, 2, (1, 1)), 0.0)
    one.on_promise(with_accepted(1, 3, (2, 1), of=4), 0.0)
    one.on_promise(with_accepted(2, 3, (2, 1)), 0.0)
    assert one.state is ACCEPTING and one._proposal is not None and one._proposal.ballot == one._ballot
    assert shared_plans.whole(one._proposal.share).generation == 3
    one = requested(company(5))
    one.on_promise(with_accepted(0, 2, (1, 1)), 0.0)
    one.on_promise(with_accepted(1, 3, (2, 1), of=4), 0.0)
    promised(one, 2)
    assert one.state is IDLE, "nobody here has the whole of the highest one"


def test_the_plan_has_a_number_above_all_that_anybody_has_heard_of():
    one = requested(company(5))
    for element in range(3):
        one.on_promise(msgspec.structs.replace(promise(element, broken=4), seen=4), 0.0)
    assert one.state is HALTING
    one.on_promise(msgspec.structs.replace(with_accepted(3, 7), ranks=promise(3, broken=4).ranks), 0.0)
    one.tick(GATHER_SECONDS)
    assert one._proposal is not None and shared_plans.whole(one._proposal.share).generation == 8
    one = requested(company(3))
    for element in range(3):
        one.on_promise(msgspec.structs.replace(promise(element, broken=4), seen=4), 0.0)
    assert one._proposal is not None and shared_plans.whole(one._proposal.share).generation == 5


# ---------------------------------------------------------------- halting
def test_the_others_may_still_promise_for_a_moment_and_all_at_once_need_none():
    one = requested(company(3))
    promised(one, 0, 1)
    one.tick(GATHER_SECONDS - 0.05)
    assert one.state is HALTING
    one.tick(GATHER_SECONDS)
    assert one.state is ACCEPTING
    one = requested(company(3), 5.0)
    promised(one, 0, 1, 2, at=5.0)
    assert one.state is ACCEPTING


def test_ranks_are_waited_for_until_they_have_stopped_or_their_time_is_over():
    for iteration_seconds, seconds in ((0.5, REST_SECONDS), (4.0, REST_ITERATIONS * 4.0)):
        one = requested(company(3), 1.0)
        promised(one, 0, 1, at=1.0)
        promised(one, 2, at=1.0, state="running", broken=0, iteration_seconds=iteration_seconds)
        one.tick(1.0 + seconds - 0.25)
        assert one.state is HALTING, iteration_seconds
        one.tick(1.0 + seconds)
        assert one.state is ACCEPTING, iteration_seconds
        assert one._proposal is not None and [lost.slot for lost in one._proposal.lost] == [2]
    one = requested(company(3))
    promised(one, 0, 1)
    promised(one, 2, state="running", broken=0)
    promised(one, 2, at=0.1)
    assert one.state is ACCEPTING


def test_a_long_wait_for_ranks_is_no_ballot_of_which_nothing_comes():
    one = requested(company(3))
    promised(one, 0, 1)
    promised(one, 2, state="running", broken=0, iteration_seconds=10.0)
    one.tick(BALLOT_SECONDS + 1.0)
    assert one.state is HALTING


def test_who_promises_late_is_halted_once():
    one = requested(company(5))
    for element in range(3):
        one.on_promise(msgspec.structs.replace(promise(element, state="running", broken=0), seen=1), 0.0)
    sent(one)
    late = msgspec.structs.replace(promise(3, state="running", broken=0), seen=1)
    one.on_promise(late, 0.1)
    assert sent(one) == [(Halt, 3)]
    one.on_promise(late, 0.2)
    assert sent(one) == [], "its ranks have changed, and it knows of the Break"


def test_ranks_of_no_member_are_not_waited_for():
    one = requested(company(3))
    promised(one, 0, 1)
    stranger = structs.RankStatus(state="running")
    one.on_promise(msgspec.structs.replace(promise(2), ranks={**promise(2).ranks, 7: stranger}), 0.0)
    assert one.state is ACCEPTING


def test_the_rest_of_a_replica_is_told_who_is_lost_and_who_came_after_all():
    def halted(one: Proposer) -> list[list[int]]:
        found = [message.lost for _, message in one.outbox if isinstance(message, Halt)]
        one.outbox.clear()
        return found

    one = requested(company(6, 2))
    promised(one, 0, 1, 2, 3, state="running", broken=0)
    assert halted(one) == [[], [], [], []]
    for state, lost in (("waiting", [1]), ("running", []), ("exited", [1]), ("finished", []), ("entering", [])):
        promised(one, 1, at=0.1, state=state, broken=0)
        told = halted(one)
        assert told == ([] if state == "entering" else 4 * [lost]), state
    fault = structs.Fault(type="E", text="", at=0.0, fatal=True)
    promised(one, 1, at=0.1, state="running", broken=0, fault=fault)
    assert halted(one) == 4 * [[1]], "its process ends"
    one.tick(GATHER_SECONDS)
    assert [1, 4, 5] in halted(one), "who has not answered by now is lost"
    promised(one, 4, at=0.5, state="running", broken=0)
    assert [1, 5] in halted(one)
    alone = requested(company(3))
    promised(alone, 0, 1, state="exited")
    assert halted(alone) == [[], []], "no replica needs to be told"


def test_a_new_ballot_knows_nothing_of_the_lost_of_the_one_before():
    one = requested(company(4, 2))
    promised(one, 0, 1, 2, state="running", broken=0)
    one.tick(GATHER_SECONDS)
    one.on_nack((9, 1), 1.0)
    one.on_request(5.0)
    one.outbox.clear()
    for element in (0, 1, 2):
        one.on_promise(msgspec.structs.replace(promise(element, state="running", broken=0), ballot=one._ballot), 5.0)
    assert [message.lost for _, message in one.outbox if isinstance(message, Halt)] == [[], [], []]
    one.outbox.clear()
    one.tick(5.5)
    assert [3] in [message.lost for _, message in one.outbox if isinstance(message, Halt)]


# ---------------------------------------------------------------- accepting and teaching
def accepted(one: Proposer, *elements: int, at: float = 1.0, ballot: tuple[int, int] | None = None) -> None:
    for element in elements:
        one.on_accepted(peer_messages.Acceptance(generation=1, element=element, ballot=ballot or one._ballot), at)


def test_what_a_quorum_accepts_is_chosen_and_taught_until_all_know_it():
    one = requested(company(5))
    accepted(one, 0, 1, 2)
    promised(one, 0, 1, 2, 3, 4)
    assert one.state is ACCEPTING
    sent(one)
    accepted(one, 0, 1, 2, at=0.1, ballot=(7, 7))
    accepted(one, 0, 1, at=0.1)
    assert one.state is ACCEPTING and one.chosen is None
    one.tick(1.5)
    assert sent(one) == [(Accept, element) for element in (2, 3, 4)]
    accepted(one, 2, at=1.5)
    assert one.state is TEACHING and one.chosen is one._proposal
    assert sent(one) == [(Learn, element) for element in range(5)], "also those that have accepted"
    accepted(one, 0, 4, at=1.5)
    one.tick(2.0)
    assert sent(one) == [(Learn, element) for element in (1, 2, 3)]
    accepted(one, 1, 2)
    assert one.state is TEACHING
    accepted(one, 3)
    assert one.state is IDLE
    one.on_request(100.0)
    assert one.state is IDLE, "this generation's plan is chosen"


def test_agents_that_do_not_answer_are_taught_for_a_while():
    one = requested(company(3))
    promised(one, 0, 1, 2)
    accepted(one, 0, 1, at=1.0)
    assert one.state is TEACHING
    one.tick(1.0 + TEACH_SECONDS - 0.25)
    assert one.state is TEACHING
    one.tick(1.0 + TEACH_SECONDS)
    assert one.state is IDLE
