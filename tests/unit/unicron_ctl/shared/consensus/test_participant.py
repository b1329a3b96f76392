"""One agent's part: what it answers to others and tells its ranks, and when it asks for a plan."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.consensus import ME, company, plan, promise, share
from unicron_ctl.shared.consensus.acceptor import AcceptorState
from unicron_ctl.shared.consensus.participant import (
    ASK_SECONDS,
    AWAY_SECONDS,
    REPEAT_SECONDS,
    TELL_SECONDS,
    TICK_SECONDS,
    Participant,
)
from unicron_ctl.shared.consensus.proposals import make_proposal, proposal_for
from unicron_ctl.shared.protocol import shared_plans, structs, wire
from unicron_ctl.shared.protocol.peer_messages import (
    Accept,
    Acceptance,
    Ballot,
    Halt,
    Learn,
    Nack,
    PlanRequest,
    Prepare,
    Promise,
    Proposal,
)

STOPPED = structs.RankStatus(state="stopped", broken=1, generation=1)
RUNNING = structs.RankStatus(state="running", generation=1)
BALLOT: Ballot = (1, 1)
FOURTH = structs.Peer(3, "agent3", "n3:1", "key3")


def participant(rank: structs.RankStatus = STOPPED, me: structs.Peer = FOURTH) -> Participant:
    """An agent in generation 1 of four, of which three may propose. The controller was asked for an answer at 0."""
    one = Participant(me, 1)
    one.on_plan(share(plan(1, [0, 1, 2, 3])))
    one.on_ranks({me.element: rank}, "n0:4000", 0.0)
    one.on_status(0.0)
    one.outbox.clear()
    return one


def heard(one: Participant, message: Any, at: float = 1.0) -> list[Any]:
    """What it answers, but for its own requests."""
    one.outbox.clear()
    one.on_message(message, at)
    answers = [sent for _, sent in one.outbox if not isinstance(sent, PlanRequest)]
    one.outbox.clear()
    return answers


def prepare(ballot: Ballot = BALLOT, generation: int = 1) -> Prepare:
    return Prepare(generation=generation, element=ballot[1], ballot=ballot)


def proposed(number: int = 2, ballot: Ballot = BALLOT) -> Proposal:
    made = make_proposal(company(3), {0: promise(0), 1: promise(1)}, number, ballot, "agent1")
    assert made is not None
    return made[0]


def accept(proposal: Proposal) -> Accept:
    return Accept(generation=1, element=proposal.ballot[1], ballot=proposal.ballot, proposal=proposal)


def learn(proposal: Proposal, element: int = 1) -> Learn:
    return Learn(generation=1, element=element, proposal=proposal)


def promising() -> Participant:
    """It has promised (1, 1): the controller has been silent for long enough."""
    one = participant()
    assert [type(answer) for answer in heard(one, prepare())] == [Promise]
    return one


# ---------------------------------------------------------------- the controller
def test_whoever_asked_is_told_once_the_controller_speaks():
    one = participant()
    heard(one, prepare((3, 1)), 0.1)
    one.on_controller(0.2)
    ((to, answer),) = one.outbox
    assert to.element == 1 and answer.controller_alive and answer.ballot == (3, 1)
    one.outbox.clear()
    one.on_controller(0.3)
    assert not one.outbox, "nobody waits for its promise"
    Participant(ME, 1).on_controller(0.1)


def test_an_agent_asks_the_controller_only_while_something_needs_it():
    assert participant().should_ask(5.0) is False, "it is asked already"
    one = participant(RUNNING)
    assert not one.should_ask(5.0) and not one.on_status(5.0) and one.seconds_to_tick(5.0) == float("inf")
    assert not one.status_due
    assert heard(one, prepare(), 5.0) == [] and one.status_due, "the controller is asked before a promise"
    assert one.should_ask(5.0) and one.seconds_to_tick(5.0) == ASK_SECONDS
    one.status_due = False
    one.on_status(5.0)
    assert one.seconds_to_tick(5.0) == TICK_SECONDS
    heard(one, prepare((2, 1)), 5.1)
    assert not one.status_due, "it waits for the answer"
    stopped = participant()
    stopped.on_controller(0.1)
    assert stopped.seconds_to_tick(0.1) == ASK_SECONDS
    assert Participant(ME, 1).seconds_to_tick(0.0) == float("inf")


def test_a_plan_that_was_chosen_is_followed_by_no_other_of_its_number():
    one = promising()
    heard(one, learn(proposed()))
    assert one.agreed is not None and one.agreed.chosen
    assert one.on_plan(share(plan(2, [0, 2], "7.g2.2.2"))) is None and one.agreed is not None
    same = msgspec.structs.replace(one.agreed.plan, reason="adopted")
    assert one.on_plan(share(same)) is None and one.agreed is None, "the ranks follow it, and the controller knows"


def test_plans_below_what_was_agreed_on_are_too_late():
    one = promising()
    heard(one, accept(proposed(number=5)))
    assert one.on_plan(share(plan(4, [0, 1]))) is None and one.agreed is not None
    assert one.on_plan(share(plan(1, [0, 1, 2, 3]))) is None
    fresh = participant()
    assert fresh.on_plan(share(plan(1, [0, 1, 2, 3]))) is not None, "its own again"
    assert fresh.on_plan(share(plan(1, [0, 1], "7.other"))) is None


def test_a_plan_for_an_iteration_boundary_counts_once_a_rank_enters_it():
    one = participant(RUNNING)
    one.on_plan(share(plan(2, [0, 1, 2, 3], boundary=True)))
    one.on_ranks({}, "n0:4000", 1.0)
    one.on_ranks({3: RUNNING}, "n0:4000", 1.0)
    heard(one, prepare(generation=2))
    assert not one.status_due, "it is not in it"
    one.on_ranks({3: structs.RankStatus(state="entering", generation=1, entering=3)}, "n0:4000", 1.0)
    one.on_ranks({3: structs.RankStatus(state="entering", generation=1, entering=2)}, "n0:4000", 1.0)
    heard(one, prepare(generation=2))
    assert one.status_due


def test_a_new_agent_is_in_no_generation():
    one = Participant(ME, 1)
    one.on_plan(share(plan(1, [0, 1, 2, 3], boundary=True)))
    one.on_ranks({}, "n0:4000", 0.0)
    assert heard(one, prepare()) == [] and not one.status_due and not one.known


# ---------------------------------------------------------------- promises and votes
def test_a_promise_goes_out_once_the_controller_has_been_silent_for_long_enough_and_whenever_ranks_change():
    one = participant()
    assert heard(one, prepare((4, 2)), AWAY_SECONDS - 0.05) == []
    one.tick(AWAY_SECONDS)
    ((to, answer),) = [(peer, sent) for peer, sent in one.outbox if isinstance(sent, Promise)]
    assert to.element == 2 and answer.ballot == (4, 2) and answer.ranks == {3: STOPPED} and answer.seen == 1
    one.outbox.clear()
    one.on_ranks({3: structs.RankStatus(state="stopped", broken=6, generation=1)}, "n0:4000", 1.0)
    ((to, answer),) = [(peer, sent) for peer, sent in one.outbox if isinstance(sent, Promise)]
    assert to.element == 2 and answer.seen == 6
    one.outbox.clear()
    one.tick(1.1)
    assert not [sent for _, sent in one.outbox if isinstance(sent, Promise)], "once"
    one.on_controller(1.2)
    one.outbox.clear()
    one.on_ranks({3: STOPPED}, "n0:4000", 1.3)
    assert not one.outbox, "the controller lives"


def test_a_vote_that_was_given_up_answers_nobody_until_a_plan_is_learned():
    for ceded, answers in ((0, [Promise]), (1, []), (2, [])):
        one = participant()
        one.cede_votes(ceded)
        assert [type(answer) for answer in heard(one, prepare())] == answers and one.over == ceded
        assert [type(answer) for answer in heard(one, accept(proposed()))] == (answers and [Acceptance])
    heard(one, learn(proposed()))
    assert [type(answer) for answer in heard(one, prepare((2, 2)))] == [Learn]


def test_what_it_accepts_it_tells_the_controller_as_not_chosen_yet():
    one = promising()
    assert not one.status_due
    (answer,) = heard(one, accept(proposed()))
    assert isinstance(answer, Acceptance) and answer.ballot == BALLOT and one.status_due
    assert one.agreed is not None and not one.agreed.chosen
    one.status_due = False
    (answer,) = heard(one, accept(proposed(ballot=(0, 2))))
    assert isinstance(answer, Nack) and answer.ballot == BALLOT and not one.status_due


def test_a_halt_is_followed_where_its_ballot_was_promised():
    for ballot, state, orders in (((1, 1), None, 1), ((2, 2), None, 0), ((1, 1), AcceptorState.IDLE, 0)):
        one = promising()
        instance = one._instances[1]
        instance.acceptor.state = state or instance.acceptor.state
        answers = heard(one, Halt(generation=1, element=1, ballot=ballot, broken=3, reason="r"))
        assert len(one.orders) == orders and [answer.seen for answer in answers] == orders * [3], (ballot, state)
    assert heard(promising(), Halt(generation=9, element=1, ballot=BALLOT, broken=3, reason="r")) == []


# ---------------------------------------------------------------- what was learned
def test_a_plan_that_is_learned_is_followed_once():
    one = promising()
    (answer,) = heard(one, learn(proposed()))
    over, following = one.orders
    assert isinstance(answer, Acceptance) and answer.ballot == BALLOT and one.status_due
    assert isinstance(over, wire.Break) and over.generation == 1 and over.lost == [2]
    assert isinstance(following, wire.Plan) and following.generation == 2
    assert one.agreed is not None and one.agreed.chosen and one.agreed.lost[0].slot == 2
    assert [type(sent) for sent in heard(one, learn(proposed()))] == [Acceptance] and len(one.orders) == 2


def test_a_plan_is_not_followed_where_the_controller_has_sent_the_ranks_elsewhere():
    one = promising()
    one.on_break(wire.Break(generation=2, lost=[], reason="r"))
    assert [type(sent) for sent in heard(one, learn(proposed()))] == [Acceptance] and not one.orders and not one.agreed
    heard(one, learn(proposed(number=3)))
    assert len(one.orders) == 2
    one = promising()
    one.on_plan(share(plan(2, [0, 1])))
    heard(one, learn(proposed(number=3)))
    assert not one.orders, "of a generation that is over here"


def test_an_agent_that_is_behind_is_told_what_was_chosen():
    """Whoever has the whole of it sends that; whoever has its own part votes as it has voted."""
    whole, mine = proposed(), proposal_for(proposed(), 2, company(3))
    part = msgspec.structs.replace(mine, share=msgspec.structs.replace(mine.share, assignment={}))
    later = proposed(ballot=(9, 2))
    other = msgspec.structs.replace(later, share=shared_plans.share(*_other(later)))
    for learned, message, answers in (
        (whole, prepare((2, 2)), [Learn]),
        (part, prepare((2, 2)), [Promise]),
        (part, accept(whole), [Acceptance]),
        (part, accept(other), [Nack]),
        (part, Halt(generation=1, element=1, ballot=BALLOT, broken=1, reason="r"), []),
    ):
        one = promising()
        heard(one, learn(learned))
        found = heard(one, message)
        assert [type(sent) for sent in found] == answers, (learned is whole, message)
        assert not isinstance(message, Prepare) or learned is whole or found[0].accepted == part
        assert not isinstance(found[0] if found else None, Promise) or not found[0].controller_alive
    one = promising()
    one.on_plan(share(plan(2, [0, 1])))
    for message in (prepare((2, 2)), accept(whole), Halt(generation=1, element=1, ballot=BALLOT, broken=1, reason="r")):
        (answer,) = heard(one, message)
        assert isinstance(answer, Promise) and answer.controller_alive, "the controller has led it on"


def test_a_proposer_that_has_learned_a_plan_answers_requests_with_it():
    for learned, answers in ((proposed(), [Learn]), (None, [])):
        leader = participant(me=ME)
        if learned is not None:
            heard(leader, learn(learned))
        found = heard(leader, PlanRequest(generation=1, element=1))
        assert [type(sent) for sent in found if isinstance(sent, Learn)] == answers
        proposer = leader._instances[1].proposer
        assert proposer is not None and (proposer.state == "preparing") == (learned is None)
    leader = participant(RUNNING, me=ME)
    leader.on_plan(share(plan(2, [0, 1])))
    assert heard(leader, PlanRequest(generation=1, element=1)) == [], "that generation is over here"


def _other(proposal: Proposal) -> tuple[wire.Plan, Any, list[int]]:
    made = msgspec.structs.replace(shared_plans.whole(proposal.share), prefix="7.g2.9.2")
    return made, shared_plans.common(made, shared_plans.proposers(proposal.share)), made.members


# ---------------------------------------------------------------- asking for a plan
def requests(one: Participant, at: float) -> list[int]:
    """Whom it asks for a plan now."""
    one.outbox.clear()
    one.tick(at)
    found = [peer.element for peer, sent in one.outbox if isinstance(sent, PlanRequest)]
    one.outbox.clear()
    return found


def test_proposers_are_asked_one_after_the_other_while_none_answers():
    one = participant()
    assert requests(one, TELL_SECONDS - 0.05) == []
    assert requests(one, TELL_SECONDS) == [0]
    assert requests(one, TELL_SECONDS + REPEAT_SECONDS - 0.05) == []
    assert requests(one, TELL_SECONDS + REPEAT_SECONDS) == [1]
    one.on_message(Nack(generation=1, element=1, ballot=(1, 1)), 1.0)
    assert requests(one, 2.0) == [1], "that one has answered"
    one.on_message(Nack(generation=1, element=7, ballot=(1, 1)), 2.25)
    assert [requests(one, at) for at in (3.0, 4.0)] == [[2], [0]], "that was no proposer"


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, True),
        ({"state": "running", "broken": 0}, False),
        ({"broken": 0}, False),
        ({"broken": 2}, True),
        ({"state": "exited", "exit": structs.Exit(code=1, at=0.0, lived=1.0)}, True),
        ({"state": "finished", "exit": structs.Exit(code=0, at=0.0, lived=1.0)}, False),
    ],
)
def test_a_plan_is_needed_where_a_member_has_died_or_stopped(changes: dict[str, Any], needs: bool):
    rank = structs.RankStatus(**{"state": "stopped", "broken": 1, "generation": 1, **changes})
    assert participant(rank)._needs_plan == needs


def test_ranks_of_no_member_need_no_plan():
    one = participant()
    one.on_ranks({7: STOPPED}, "n0:4000", 0.0)
    assert not one._needs_plan and not Participant(ME, 1)._needs_plan


def test_an_agent_that_is_no_proposer_answers_no_request():
    one = participant()
    one.on_message(PlanRequest(generation=1, element=1), 1.0)
    assert all(instance.proposer is None for instance in one._instances.values())
    for message in (
        promise(0),
        Acceptance(generation=1, element=0, ballot=(1, 0)),
        Nack(generation=1, element=0, ballot=(9, 0)),
    ):
        one.on_message(message, 1.0)
    leader = participant(me=ME)
    heard(leader, PlanRequest(generation=1, element=1))
    assert leader._instances[1].proposer is not None and leader._instances[1].proposer.state == "preparing"
    assert leader.seconds_to_tick(1.0) == TICK_SECONDS
    leader.on_ranks({0: RUNNING}, "n0:4000", 1.0)
    leader._silence.on_answer(1.1)
    assert leader.seconds_to_tick(1.1) == TICK_SECONDS, "its ballot is under way"


def test_a_generation_begins_with_the_first_proposer_and_once():
    one = participant()
    requests(one, 1.0)
    requests(one, 2.0)
    one.on_plan(share(plan(1, [0, 1, 2, 3])))
    assert requests(one, 3.0) == [2], "the same generation goes on"
    one.on_plan(share(plan(2, [0, 1, 2, 3])))
    one.on_ranks({3: structs.RankStatus(state="stopped", broken=2, generation=2)}, "n0:4000", 3.1)
    assert [peer.element for peer, sent in one.outbox if isinstance(sent, PlanRequest)] == [0]
    assert list(one._instances) == [1, 2]
