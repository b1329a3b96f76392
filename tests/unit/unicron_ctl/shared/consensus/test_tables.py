"""The tables of acceptor and proposer, and the rules that an agent keeps whatever it is told."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.consensus import ME, company, plan, promise, share
from unicron_ctl.shared.consensus import acceptor, proposer
from unicron_ctl.shared.consensus.acceptor import AcceptorAction as Act
from unicron_ctl.shared.consensus.acceptor import AcceptorEvent, AcceptorState
from unicron_ctl.shared.consensus.participant import ASK_SECONDS, ControllerSilence, Participant
from unicron_ctl.shared.consensus.proposals import has_stopped, make_proposal
from unicron_ctl.shared.protocol import peer_messages, shared_plans, structs


def test_the_acceptor_knows_what_to_do_in_every_state():
    assert set(acceptor.TABLE) == set(AcceptorState)
    assert all(set(row) == set(AcceptorEvent) for row in acceptor.TABLE.values())
    actions = {(state, event): action for state, row in acceptor.TABLE.items() for event, (_, action) in row.items()}
    accepting = [case for case, action in actions.items() if action is Act.ACCEPTED]
    assert accepting == [(AcceptorState.PROMISED, AcceptorEvent.ACCEPT)], "only what it has promised to take"
    spoke = [row[AcceptorEvent.CONTROLLER_SPOKE][0] for row in acceptor.TABLE.values()]
    assert spoke == [AcceptorState.IDLE] * 3, "the controller decides"


def test_a_proposer_comes_back_to_rest_from_everywhere():
    assert set(proposer.TABLE) == set(proposer.ProposerState)
    for start in proposer.ProposerState:
        reached, more = {start}, {start}
        while more:
            more = {to for at in more for to in proposer.TABLE[at].values()} - reached
            reached |= more
        assert proposer.ProposerState.IDLE in reached


def test_a_lower_ballot_is_refused_and_what_was_accepted_stays():
    one = acceptor.Acceptor()
    assert one.on_prepare((2, 1)) is Act.ASK_CONTROLLER and one.on_controller_silent() is Act.PROMISE
    assert one.on_prepare((1, 3)) is Act.NACK
    proposal = make_proposal(company(3), {0: promise(0), 1: promise(1)}, 2, (2, 1), "agent1")[0]
    assert one.on_accept(proposal) is Act.ACCEPTED
    assert one.on_controller_spoke() is Act.DECLINE and one.accepted == proposal
    assert one.on_accept(proposal) is Act.DECLINE, "the controller has spoken"


def test_a_prepare_that_comes_twice_is_answered_as_the_first_one():
    one = acceptor.Acceptor()
    assert one.on_prepare((2, 1)) is one.on_prepare((2, 1)) is Act.ASK_CONTROLLER
    assert one.on_prepare((2, 0)) is Act.NACK, "while the controller is asked for another one"
    assert one.on_controller_silent() is Act.PROMISE and one.highest == (2, 1)
    assert one.on_prepare((2, 1)) is Act.PROMISE and one.state is AcceptorState.PROMISED
    assert one.on_prepare((3, 0)) is Act.ASK_CONTROLLER and one.promised == (2, 1)
    assert one.on_prepare((2, 1)) is Act.NACK, "a higher one is prepared"
    assert one.on_controller_spoke() is Act.DECLINE and one.on_controller_spoke() is Act.IGNORE
    assert one.on_prepare((2, 1)) is Act.DECLINE and one.on_prepare((2, 0)) is Act.NACK
    assert one.on_prepare((3, 0)) is Act.NACK, "the controller has spoken since it was prepared"
    assert one.on_controller_silent() is Act.IGNORE


def test_how_long_the_controller_is_silent():
    one = ControllerSilence()
    assert one.may_ask(0.0) and not one.waiting and one.seconds(5.0) == 0.0
    one.on_question(5.0)
    one.on_question(6.0)
    assert one.waiting and not one.may_ask(9.0) and one.seconds(6.5) == 1.5
    one.on_answer(7.0)
    assert not one.waiting and one.seconds(9.0) == 0.0
    assert one.may_ask(7.0 + ASK_SECONDS) and not one.may_ask(6.9 + ASK_SECONDS)


def test_who_is_at_rest():
    def rests(state, **more):
        return has_stopped(structs.RankStatus(state=state, **more), 4)

    assert rests("stopped", broken=4) and rests("finished") and rests("exited") and rests("waiting")
    assert not rests("stopped", broken=3) and not rests("running", broken=4) and not rests("entering")
    assert rests("running", fault=structs.Fault(type="E", text="", at=0.0, fatal=True)), "its process ends"


def test_what_a_leader_sends_and_looks_at_grows_with_the_job_and_not_with_its_square(monkeypatch):
    """Half of 2,048 agents promise after the majority has, each by itself; then all stop, one after the other."""
    looks = []
    monkeypatch.setattr(
        proposer, "has_stopped", lambda status, broken: looks.append(status) or has_stopped(status, broken)
    )
    crowd = company(2048)
    one = proposer.Proposer(ME, crowd)
    one.on_request(1.0)
    for element in crowd.elements:
        one.on_promise(promise(element, state="running", broken=0), 1.1)
    assert one.state is proposer.ProposerState.HALTING
    halted = [element for element, message in one.outbox if isinstance(message, peer_messages.Halt)]
    assert sorted(halted) == crowd.elements, "each once"
    one.tick(1.5)
    again = len(one.outbox)
    for element in crowd.elements[:-1]:
        one.on_promise(promise(element), 1.6)
    assert one.state is proposer.ProposerState.HALTING and len(one.outbox) == again
    one.tick(1.9)
    assert [element for element, _ in one.outbox[again:]] == crowd.elements[-1:], "whoever has stopped has answered"
    one.on_promise(promise(2047), 1.9)
    assert one.state is proposer.ProposerState.ACCEPTING
    assert len(one.outbox) <= 5 * 2048 and len(looks) <= 5 * 2048


def test_a_leader_halts_all_again_when_it_hears_of_a_later_generation():
    crowd = company(4)
    one = proposer.Proposer(ME, crowd)
    one.on_request(1.0)
    for element in (0, 1, 2):
        one.on_promise(promise(element), 1.1)
    one.outbox.clear()
    one.on_promise(msgspec.structs.replace(promise(3), seen=2), 1.2)
    assert [(element, message.broken) for element, message in one.outbox] == [(0, 2), (1, 2), (2, 2), (3, 2)]
    assert one.state is proposer.ProposerState.HALTING, "who has stopped for the first one only is waited for"


def test_a_leader_names_the_lost_so_that_the_rest_of_their_replicas_stops():
    crowd = company(6, 2)
    one = proposer.Proposer(ME, crowd)
    one.on_request(1.0)
    for element in (0, 2, 3, 4):
        one.on_promise(promise(element, state="running", broken=0), 1.1)
    halts = [message for _, message in one.outbox if isinstance(message, peer_messages.Halt)]
    assert {tuple(message.lost) for message in halts} == {()}, "the others may still answer"
    one.outbox.clear()
    one.on_promise(promise(3, state="exited", broken=0), 1.2)
    assert [(element, message.lost) for element, message in one.outbox] == [(e, [3]) for e in (0, 2, 3, 4)]
    one.outbox.clear()
    one.tick(1.5)
    assert {tuple(message.lost) for _, message in one.outbox if isinstance(message, peer_messages.Halt)} == {(1, 3, 5)}


@pytest.fixture
def agent():
    """Generation 1; it has accepted a plan for 2 without having heard that it is chosen."""
    made = Participant(ME, 1)
    made.on_plan(share(plan(1, [0, 1, 2])))
    made.on_ranks({0: structs.RankStatus(state="stopped", broken=1, generation=1)}, "n0:4000", 0.0)
    made.on_status(0.0)
    made.on_message(peer_messages.Prepare(generation=1, element=1, ballot=(1, 1)), 1.0)
    proposal, _ = make_proposal(company(3), {0: promise(0), 1: promise(1)}, 2, (1, 1), "agent1")
    made.on_message(peer_messages.Accept(generation=1, element=1, ballot=(1, 1), proposal=proposal), 1.1)
    assert made.agreed is not None and not made.agreed.chosen
    made.on_controller(1.2)
    return made


@pytest.mark.parametrize(
    ("number", "prefix", "followed"),
    [(2, "", False), (2, "7.g2.2.2", True), (3, "", True)],
    ids=["its own other plan of this number", "what the others chose, of another ballot", "a later one"],
)
def test_which_plan_of_the_controller_takes_the_place_of_an_accepted_one(agent, number, prefix, followed):
    order = share(plan(number, [0, 2], prefix))
    answer = agent.on_plan(order)
    assert (answer is not None, agent.agreed is None) == (followed, followed)
    assert not followed or answer == shared_plans.whole(order), "the controller's plan, not the accepted one"


def test_the_controller_makes_the_plan_its_own(agent):
    same = msgspec.structs.replace(agent.agreed.plan, reason="adopted")
    assert agent.on_plan(share(same)) is not None, "the ranks are told, who were not before"
    assert agent.agreed is None
    assert agent.on_plan(share(plan(2, [0, 2]))) is None, "there is no other one of this number"


def test_a_plan_that_comes_after_the_controllers_is_not_followed(agent):
    accepted = agent.agreed.plan
    agent.on_plan(share(plan(3, [0, 2])))
    proposal, _ = make_proposal(company(3), {0: promise(0), 1: promise(1)}, 2, (1, 1), "agent1")
    assert shared_plans.whole(proposal.share).prefix == accepted.prefix
    agent.on_message(peer_messages.Learn(generation=1, element=1, proposal=proposal), 2.0)
    assert not agent.orders and agent.agreed is None


def test_the_ranks_are_told_who_is_lost():
    agent = Participant(ME, 1)
    agent.on_plan(share(plan(1, [0, 1, 2, 3], replica=2), 4))
    agent.on_ranks({0: structs.RankStatus(state="running", generation=1)}, "n0:4000", 0.0)
    agent.on_ranks({0: structs.RankStatus(state="stopped", broken=1, generation=1)}, "n0:4000", 0.1)
    agent.on_status(0.1)
    agent.on_message(peer_messages.Prepare(generation=1, element=2, ballot=(1, 2)), 1.0)
    agent.on_message(peer_messages.Halt(generation=1, element=2, ballot=(1, 2), broken=1, reason="r", lost=[1]), 1.1)
    assert [order.lost for order in agent.orders] == [[1]]


def test_a_controller_that_has_just_spoken_is_not_asked():
    """Thousands of agents report at once after a Break: the plan must not wait for as many answers."""
    agent = Participant(ME, 1)
    agent.on_plan(share(plan(1, [0, 1, 2])))
    stopped = {0: structs.RankStatus(state="stopped", broken=1, generation=1)}
    agent.on_controller(5.0)
    agent.on_ranks(stopped, "n0:4000", 5.1)
    assert not agent.on_status(5.1) and agent.on_status(6.1)
    agent.on_controller(6.2)
    assert not agent.on_status(6.3), "that was the answer"
