"""What agents choose while the controller is away: every agent's real `Participant`, over a simulated network."""

from __future__ import annotations

from random import Random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.company import CONTROLLER, Company
from tests.support.depth import cases
from unicron_ctl.shared.consensus import proposer
from unicron_ctl.shared.consensus.proposals import PROPOSERS
from unicron_ctl.shared.protocol import peer_messages

SOON = 2.0  # seconds from a death to the next step, without the groups' own time


def trains(company: Company, *slots: int):
    return lambda: company.going() == [set(slots)]


def test_the_controller_decides_while_it_is_there():
    company = Company(4)
    company.members[2].die()
    company.until(trains(company, 0, 1, 3))
    assert not company.agreed and not company.halts


@pytest.mark.parametrize("how", ["stopped", "killed", "cut off"])
def test_a_rank_dies_while_the_controller_is_away(how):
    """The next step comes soon, and the controller goes on with what was agreed when it is back."""
    company = Company(4)
    if how == "cut off":
        company.cut([CONTROLLER], range(4))
    else:
        company.head.leave(how)
    company.run(10)
    company.members[2].die()
    assert company.until(trains(company, 0, 1, 3)) < SOON
    assert {plan.generation for plan in company.agreed} == {2}
    company.run(30)
    company.cuts.clear()
    company.head.come_back()
    company.run(5)
    assert company.going() == [{0, 1, 3}] and company.head.plan.generation == 2, "nothing is broken again"
    assert all(agent.participant.agreed is None for agent in company.agents.values()), "the controller knows it"
    company.members[3].die()
    company.until(trains(company, 0, 1))
    assert company.head.plan.generation == 3


def test_one_death_after_the_other():
    company = Company(5)
    company.head.leave("stopped")
    for dead, rest in ((0, (1, 2, 3, 4)), (1, (2, 3, 4)), (4, (2, 3))):
        company.members[dead].die()
        company.until(trains(company, *rest))
        company.run(1)
    company.head.come_back()
    company.run(5)
    assert company.going() == [{2, 3}]


def test_the_next_one_leads_when_the_first_is_dead():
    company = Company(5)
    company.head.leave("killed")
    company.kill_agent(0)
    company.until(trains(company, 1, 2, 3, 4), limit=5)
    company.kill_agent(1)
    company.until(trains(company, 2, 3, 4), limit=5)


def test_two_of_two_are_a_majority_and_one_is_none():
    company = Company(2)
    company.head.leave("killed")
    company.members[1].die()
    company.until(trains(company, 0))
    other = Company(2)
    other.head.leave("killed")
    other.kill_agent(1)
    other.run(20)
    assert not other.agreed and other.members[0].status.state == "stopped", "it waits for the controller"
    other.head.come_back()
    other.until(trains(other, 0))


def test_without_its_leaders_a_job_waits():
    company = Company(PROPOSERS * 3)
    company.head.leave("killed")
    for element in range(PROPOSERS):
        company.kill_agent(element)
    company.run(20)
    assert not company.agreed
    company.head.come_back()
    company.until(trains(company, *range(PROPOSERS, PROPOSERS * 3)))


def test_the_smaller_half_does_not_go_on():
    company = Company(5)
    company.head.leave("killed")
    company.cut([0, 1], [2, 3, 4])
    for slot in range(5):  # the links between them are gone: collectives break on both sides
        company.members[slot].give_up("7.g1")
    company.until(trains(company, 2, 3, 4), limit=6)
    assert company.members[0].status.state == company.members[1].status.state == "stopped"


def test_whoever_hears_the_controller_leaves_it_to_it():
    """Only one of five does: the others are cut off from it, and so does not go on beside it."""
    company = Company(5)
    company.cut([CONTROLLER], [0, 1, 2, 3])
    company.members[2].die()
    company.run(20)
    assert not company.agreed and not company.going()
    company.cuts.clear()
    company.until(trains(company, 0, 1, 3, 4))


def test_an_agent_that_heard_nothing_of_it_follows_later():
    """It was cut off from everybody while the others agreed: its rank is left out, and does not hang."""
    company = Company(4)
    company.head.leave("killed")
    company.cut([3], [CONTROLLER, 0, 1, 2])
    company.members[1].die()
    company.until(trains(company, 0, 2), limit=6)
    company.run(3)
    company.cuts.clear()
    company.until(lambda: company.members[3].status.state == "left", limit=10)


def test_two_leaders_that_do_not_reach_each_other_both_follow_what_was_chosen():
    """One of them has accepted its own proposal, which nobody else has: the controller tells it of the other's."""
    company = Company(6)
    company.head.leave("killed")
    company.cut([0], [1])
    company.kill_agent(4)
    company.until(trains(company, 1, 2, 3, 5), limit=6)
    mine = company.agents[0].participant.agreed
    assert mine is not None and not mine.chosen and mine.generation == company.agreed[0].generation
    assert mine.plan.prefix != company.agreed[0].plan.prefix
    company.head.come_back()
    company.until(lambda: company.members[0].status.state == "left", limit=10)
    company.run(2)
    assert company.head.plan.prefix == company.agreed[0].plan.prefix


@pytest.mark.parametrize(
    ("one", "other"), [({0, 2}, {1, 3}), ({0, 5, 6, 7}, {1, 2, 3, 8})], ids=["5 agents", "9 agents"]
)
def test_a_voter_that_follows_one_plan_does_not_accept_an_older_one(one, other):
    """Both halves need the vote of the agent between them. The proposal of the first is lost on its way to it."""
    company = Company(len(one | other) + 1)
    company.head.leave("killed")
    company.members[4].die()
    reached = one

    def lost(source, target, message) -> bool:
        ends = {source, target} - {4}
        if (ends & one and ends & other) or not ends <= reached:
            return True
        return reached is one and target == 4 and isinstance(message, peer_messages.Accept)

    company.lost = lost
    company.run(3.0)
    assert not company.agreed, "it waits for the vote"
    reached = other
    company.until(trains(company, *other), limit=8)
    reached = one | other
    company.run(6.0)
    assert company.going() == [other] and len({agreed.plan.prefix for agreed in company.agreed}) == 1


@pytest.mark.parametrize(("count", "decides"), [(4, False), (5, True)])
def test_a_vote_that_was_given_up_is_missing(count: int, decides: bool):
    """The last agent's rank is dead, and another one is cut off. The controller has asked for that agent's vote."""
    company = Company(count)
    company.members[count - 1].die()
    company.head.leave("killed")
    company.agents[count - 1].participant.cede_votes(1)
    company.cut([1], range(count))
    company.run(10.0)
    assert bool(company.agreed) == decides
    assert company.going() == ([{0, 2, 3}] if decides else [])


def goes_on(company: Company) -> None:
    """All is well again: whoever is left trains, under one plan, and that stays so."""
    company.loss, company.delay = 0.0, (0.001, 0.02)
    company.cuts.clear()

    def well() -> bool:
        left = {m.slot for m in company.members.values() if not m.dead and m.status.state != "left"}
        return company.going() == ([left] if left else [])

    company.run(2)
    company.until(well, limit=60)
    company.run(2)
    assert well(), company.states()


SEEDS = st.integers(0, 2**32)
SLOT = st.integers(0, 5)
FAULTS = st.one_of(
    st.tuples(st.just("rank"), SLOT),
    st.tuples(st.just("agent"), SLOT),
    st.tuples(st.just("stopped"), st.none()),
    st.tuples(st.just("killed"), st.none()),
    st.tuples(st.just("back"), st.none()),
    st.tuples(st.just("halves"), st.sets(st.integers(CONTROLLER, 5), min_size=1, max_size=5)),
    st.tuples(st.just("link"), st.tuples(st.integers(CONTROLLER, 5), SLOT)),
    st.tuples(st.just("mended"), st.none()),
)
STORY = st.lists(st.tuples(st.floats(0.0, 3.0), FAULTS), max_size=10)


def strike(company: Company, what: str, whom) -> None:
    count = len(company.agents)
    match what:
        case "rank":
            company.members[whom % count].die()
        case "agent":
            company.kill_agent(whom % count)
        case "stopped" | "killed":
            company.head.leave(what)
        case "back":
            company.head.come_back()
        case "halves":
            one = {element for element in whom if element < count}
            company.cut(one, {CONTROLLER, *range(count)} - one)
        case "link":
            company.cut([whom[0]] if whom[0] < count else [], [whom[1] % count])
        case "mended":
            company.cuts.clear()


@settings(max_examples=cases(100), deadline=None)
@given(st.integers(1, 6), STORY, SEEDS, st.sampled_from([0.0, 0.1, 0.4]), st.booleans())
def test_whatever_happens_one_job_goes_on_and_never_two(count, story, seed, loss, away):
    """`Company.check` holds at every change."""
    company = Company(count, Random(seed), loss, twice=0.2)
    company.delay = (0.001, 0.3) if loss else company.delay
    if away:
        company.head.leave("stopped")
    for pause, (what, whom) in story:
        strike(company, what, whom)
        company.run(pause)
    company.head.come_back()
    goes_on(company)


@settings(max_examples=cases(100), deadline=None)
@given(st.integers(3, 5), SEEDS, st.sampled_from([0.3, 0.6, 1.5]))
def test_leaders_that_get_in_each_others_way_choose_one_plan(count, seed, delay):
    """Messages come late, doubled, in any order or not at all, links come and go, and everybody wants to lead."""
    random = Random(seed)
    company = Company(count, random, loss=0.2, twice=0.3)
    company.head.leave("killed")
    company.delay = (0.001, delay)
    company.members[count - 1].die()
    with mock.patch.object(proposer, "PAUSE_SECONDS", 0.0):
        for _ in range(30):
            company.cut([random.randrange(count)], [random.randrange(count)])
            if random.random() < 0.3:
                company.cuts.clear()
            request = peer_messages.PlanRequest(generation=1, element=count - 1)
            company.agents[random.randrange(count)].receive(request)
            company.run(0.3)
    goes_on(company)
