"""Nodes that reach the controller and not each other: when agents are asked about each other, who is asked about whom,
and what the answers come to."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.suspects import NOW, Company
from tests.support.world import FakeSlurm, World
from unicron_ctl.controller.failure_detector import network_partitions
from unicron_ctl.controller.failure_detector.network_partitions import (
    ENTER_SECONDS,
    MOST_ASKED,
    MOST_NAMED,
    NEXT_TO_IT,
    PARTED_SECONDS,
    SURVEY_SECONDS,
    check_partitions,
    fewest_to_leave_out,
    on_reached,
    start_survey,
)
from unicron_ctl.controller.model.finding import Finding
from unicron_ctl.controller.model.job_state import Identity, Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.live import Survey
from unicron_ctl.controller.model.view import Outcome
from unicron_ctl.shared.protocol import wire


@pytest.fixture
def job(company: Company) -> JobView:
    return company.view.job(company.view.state.jobs["1"])


def enlarge(company: Company, job: JobView, count: int) -> None:
    """The job has so many elements."""
    for element in range(len(job.state.agents), count):
        agent = replace(company.agent(), element=element, slots=[element], node=f"m{element}", door=f"m{element}:1")
        company.view.live.add(agent)
        job.state.agents[element] = replace(job.state.agents[0], node=agent.node)
    job.state.members = {slot: Identity("", 0) for slot in range(count)}


# ---------------------------------------------------------------- when
def test_one_survey_at_a_time_is_begun_and_one_at_a_moment(company: Company, job: JobView):
    for tried, number, returning, begins in (
        (NOW - 1.0, 0, None, True),
        (NOW, 0, None, False),
        (NOW - 1.0, 5, None, False),
        (NOW - 1.0, 5, {1}, True),
    ):
        survey = Survey(last_attempt=tried, number=number, left_out_answers=returning)
        out = start_survey(company.view, job, survey)
        assert (len(out.sends) == 5) == begins and bool(survey.asked) == begins, (tried, number, returning)
        assert survey.rounds_done == int(begins) and (survey.left_out_answers is None) == (begins or returning is None)


def test_answers_are_waited_for_as_long_as_some_are_missing_and_a_moment_at_most(company: Company, job: JobView):
    for asked, ago, is_open in (
        ({1: [0]}, SURVEY_SECONDS, True),
        ({1: [0]}, SURVEY_SECONDS + 0.25, False),
        ({}, 0.25, False),
    ):
        survey = Survey(number=7, begun=NOW - ago, asked=asked)
        check_partitions(company.view, job, survey)
        assert survey.open == is_open, (asked, ago)


def test_a_job_that_does_not_get_into_a_generation_is_asked_in_as_many_rounds_as_it_takes(
    company: Company, job: JobView
):
    job.stalled, state = 0.0, job.state
    for phase, awaited, waited, generation, left, ago, begins in (
        (Phase.ENTERING, {0}, ENTER_SECONDS + 0.25, 3, 0, 9.0, True),
        (Phase.ENTERING, {0}, ENTER_SECONDS, 3, 0, 9.0, False),
        (Phase.ENTERING, set[int](), ENTER_SECONDS + 0.25, 3, 0, 9.0, False),
        (Phase.RUNNING, {0}, ENTER_SECONDS + 0.25, 3, 0, 9.0, False),
        (Phase.ENTERING, {0}, ENTER_SECONDS + 0.25, 4, 0, 9.0, False),
        (Phase.ENTERING, {0}, ENTER_SECONDS + 0.25, 4, 2, 9.0, True),
        (Phase.ENTERING, {0}, ENTER_SECONDS + 0.25, 4, 2, SURVEY_SECONDS, False),
        (Phase.ENTERING, {0}, ENTER_SECONDS + 0.25, 4, 2, SURVEY_SECONDS + 0.25, True),
    ):
        state.phase, state.since, state.generation, job.awaited = phase, NOW - waited, 4, awaited
        survey = Survey(generation=generation, rounds_left=left, begun=NOW - ago)
        check_partitions(company.view, job, survey)
        assert survey.open == begins, (phase, awaited, waited, generation, left, ago)
        assert not begins or (survey.rounds_left, survey.generation) == (max(1, left) - 1, 4)


def test_elements_that_were_left_out_are_asked_about_now_and_then(company: Company, job: JobView):
    for parted, again, asks in (({1: "n2"}, NOW, True), ({1: "n2"}, NOW + 0.25, False), ({}, NOW, False)):
        job.state.parted, survey = parted, Survey(retry_at=again)
        check_partitions(company.view, job, survey)
        assert survey.asked == ({1: [0, 2, 3, 4]} if asks else {}), (parted, again)
        assert not asks or survey.retry_at == NOW + PARTED_SECONDS


# ---------------------------------------------------------------- who is asked about whom
def test_each_agent_of_a_small_job_is_asked_about_all_others_beginning_with_the_next(company: Company, job: JobView):
    assert network_partitions._round(job, Survey(), []) == {
        0: [1, 2, 3, 4],
        1: [2, 3, 4, 0],
        2: [3, 4, 0, 1],
        3: [4, 0, 1, 2],
        4: [0, 1, 2, 3],
    }
    job.state.members = {slot: Identity("", 0) for slot in range(MOST_ASKED)}
    job.state.joining = {MOST_ASKED: Identity("", 0)}
    assert {len(others) for others in network_partitions._round(job, Survey(), []).values()} == {MOST_ASKED}


@pytest.mark.parametrize(("count", "rounds"), [(MOST_ASKED + 2, 1), (105, 1), (106, 2), (130, 2)])
def test_the_rounds_of_a_large_job_ask_about_each_pair(job: JobView, count: int, rounds: int):
    job.state.members = {slot: Identity("", 0) for slot in range(count)}
    assert network_partitions._rounds(job) == rounds
    pairs, named = set[frozenset[int]](), list(range(MOST_NAMED))
    for turn in range(rounds):
        found = network_partitions._round(job, Survey(rounds_done=turn), named)
        assert max(map(len, found.values())) <= MOST_ASKED
        assert all(set(named) - {element} <= set(others) for element, others in found.items())
        assert all(element not in others for element, others in found.items())
        unnamed = network_partitions._round(job, Survey(rounds_done=turn), list(range(MOST_NAMED + 1)))
        assert max(map(len, unnamed.values())) <= MOST_ASKED - MOST_NAMED, "too many are named"
        pairs |= {frozenset((element, other)) for element, others in unnamed.items() for other in others}
    assert pairs == {frozenset(pair) for pair in combinations(range(count), 2)}


def test_who_is_waited_for_is_asked_about_first_in_a_large_job(company: Company, job: JobView):
    enlarge(company, job, 130)
    survey = Survey()
    start_survey(company.view, job, survey, [60])
    assert all(60 in others for element, others in survey.asked.items() if element != 60)


def test_of_a_large_job_those_are_asked_about_first_that_rings_and_trees_connect():
    ways = network_partitions._ways(129)
    assert ways[: NEXT_TO_IT + 2] == [*range(1, NEXT_TO_IT + 1), 32, 64] and sorted(ways) == list(range(1, 65))


def test_who_is_silent_or_has_no_door_is_not_asked_or_asked_about(company: Company, job: JobView):
    company.agent(1).expired = True
    company.agent(2).door = ""
    company.view.live.remove("1", 3)
    survey = Survey()
    out = start_survey(company.view, job, survey)
    assert survey.asked == {0: [1, 4], 2: [4, 0, 1], 4: [0, 1]}
    assert [send.message for send in out.sends][1:2] == [
        wire.Reach(number=survey.number, targets=[company.agent(e).door for e in (4, 0, 1)])
    ]
    for element in (0, 2, 4):
        company.agent(element).door = ""
    company.agent(1).door = ""
    survey = Survey()
    assert not start_survey(company.view, job, survey).sends and not survey.open, "nobody can be asked about"
    assert survey.last_attempt == NOW, "Defect: each of thousands of ranks that hung made the questions anew"


def test_in_a_large_job_the_others_are_asked_about_those_that_were_left_out(company: Company, job: JobView):
    for count, asked in ((MOST_ASKED + 1, {1: [0, *range(2, MOST_ASKED + 1)]}), (MOST_ASKED + 2, None)):
        enlarge(company, job, count)
        job.state.parted, survey = {1: "n2"}, Survey()
        check_partitions(company.view, job, survey)
        assert survey.asked == (asked or {element: [1] for element in range(count) if element != 1})


# ---------------------------------------------------------------- answers
def test_only_silence_is_a_cut_and_only_an_answer_to_the_present_round_counts(company: Company, job: JobView):
    words = ["silent", "refused", "unknown"]
    for number, asked, said, cut in (
        (7, [1, 2, 3], words, {(0, 1)}),
        (8, [1, 2, 3], words, set()),
        (7, [1, 2], words, set()),
        (7, None, words, set()),
    ):
        survey = Survey(number=7, asked={} if asked is None else {0: asked})
        on_reached(survey, company.agent(), wire.ReachAnswer(job="1", element=0, agent="a", number=number, words=said))
        assert survey.unreachable == cut and (0 in survey.asked) == (asked is not None and not cut), (number, asked)
    survey = Survey(number=0, asked={0: [1, 2, 3]})
    on_reached(survey, company.agent(), wire.ReachAnswer(job="1", element=0, agent="a", number=0, words=words))
    assert not survey.unreachable, "no round is out"
    survey = Survey(number=7, asked={0: [1, 2, 3]}, left_out_answers=set())
    on_reached(survey, company.agent(), wire.ReachAnswer(job="1", element=0, agent="a", number=7, words=words))
    assert survey.left_out_answers == {0}


def concluded(company: Company, job: JobView, survey: Survey) -> Outcome:
    survey.number, survey.begun = 7, NOW - SURVEY_SECONDS - 0.25
    return check_partitions(company.view, job, survey)


def test_a_cut_is_asked_about_once_more_and_what_both_rounds_found_leaves_nodes_out(
    company: Company, job: JobView, snapshot
):
    survey = Survey(unreachable={(0, 1), (0, 2), (3, 4)})
    assert not concluded(company, job, survey).findings
    assert survey.asked == {0: [1, 2], 3: [4]} and survey.last_unreachable == {(0, 1), (0, 2), (3, 4)}
    survey.unreachable = {(0, 1), (0, 2), (4, 3)}
    (finding,) = concluded(company, job, survey).findings
    assert (finding.element, finding.node, finding.slots, finding.by) == (0, "n1", (0,), "witnesses")
    assert finding.evidence == snapshot
    assert not survey.open and not concluded(company, job, Survey()).findings


def left_out(company: Company, job: JobView, cut: set[tuple[int, int]]) -> list[Finding]:
    return concluded(company, job, Survey(unreachable=cut, last_unreachable=cut)).findings


def test_who_is_silent_to_this_controller_too_or_no_member_is_not_left_out(company: Company, job: JobView):
    assert [finding.element for finding in left_out(company, job, {(2, 0)})] == [2]
    company.suspect(2)
    assert not left_out(company, job, {(2, 0)})
    company.view.suspicions.open.clear()
    company.suspect(2, job="2")
    assert left_out(company, job, {(2, 0)}), "another job's element of that number is silent"
    job.state.members = {slot: who for slot, who in job.state.members.items() if slot != 2}
    assert not left_out(company, job, {(2, 0)}) and not left_out(company, job, {(0, 2)})


def test_a_finding_names_up_to_eight_of_the_others_whoever_asked(company: Company, job: JobView):
    enlarge(company, job, 10)
    (finding,) = left_out(company, job, {(0, other) for other in range(1, 10)})
    assert finding.evidence.startswith("n1 and n2, n3, n4, n5, m5, m6, m7, m8 do not reach")
    (finding,) = left_out(company, job, {(1, 0), (0, 2)})
    assert finding.evidence.startswith("n1 and n2, n3 do not reach")


def test_the_fewest_are_left_out_without_which_the_rest_reach_each_other():
    for pairs, gone in (
        (set[tuple[int, int]](), set[int]()),
        ({(0, 1)}, {1}),
        ({(2, other) for other in (0, 1, 3)}, {2}),
        ({(a, b) for a in range(3) for b in (3, 4)}, {3, 4}),
        ({(0, 1), (1, 2), (2, 3), (3, 4)}, {1, 3}),
        ({(0, 1), (2, 3), (2, 4)}, {1, 2}),
    ):
        assert fewest_to_leave_out(pairs) == gone, pairs


def returned(company: Company, job: JobView, survey: Survey) -> list[int]:
    return [record.element for _, _, record in concluded(company, job, survey).records if record.kind == "rejoined"]


def test_an_element_returns_that_was_asked_itself_and_reaches_all_others(company: Company, job: JobView):
    job.state.parted = {1: "n2", 2: "n3"}
    assert returned(company, job, Survey(left_out_answers={1, 2})) == [1, 2]
    assert returned(company, job, Survey(left_out_answers={1, 2}, unreachable={(1, 0)})) == [2]
    assert returned(company, job, Survey(left_out_answers={1})) == [1]
    survey = Survey(left_out_answers=set())
    assert returned(company, job, survey) == [] and survey.left_out_answers is None


def test_an_element_of_a_large_job_returns_when_all_others_have_answered_that_they_reach_it(
    company: Company, job: JobView
):
    job.state.parted = {1: "n2", 2: "n3"}
    assert returned(company, job, Survey(left_out_answers={0, 3})) == [1, 2]
    assert returned(company, job, Survey(left_out_answers={0, 3}, unreachable={(0, 2)})) == [1]
    assert returned(company, job, Survey(left_out_answers={0, 3}, asked={4: [1, 2]})) == []
    company.agent(1).expired = True
    company.view.live.remove("1", 2)
    assert returned(company, job, Survey(left_out_answers={0, 3})) == []


def test_who_is_left_alone_returns(company: Company, job: JobView):
    """Nobody is there whom it would not reach."""
    job.state.parted = {1: "n2"}
    for element in (0, 2, 3, 4):
        company.agent(element).expired = True
    records = check_partitions(company.view, job, Survey()).records
    assert [(record.kind, record.element) for _, _, record in records] == [("rejoined", 1)]
    for element in (0, 2, 3, 4):
        company.agent(element).expired = False
    job.state.members, survey = {}, Survey()
    check_partitions(company.view, job, survey)
    assert survey.asked == {1: [0, 2, 3, 4]}, "nobody is a member, and agents are there"


# ---------------------------------------------------------------- real agents
def on_slurm(count: int) -> World:
    world = World(FakeSlurm(count + 1))
    world.slurm.submit("1", count)
    for agent in world.start_job(nodes=count):
        agent.set(agent.slots[0], phase="reducing")
    world.run(1.0)
    return world


def cut(world: World, *pairs: tuple[int, int]) -> None:
    world.cuts |= {frozenset((world.agents[a].node, world.agents[b].node)) for a, b in pairs}


def hang(world: World) -> None:
    """Its ranks cannot get into a generation: everybody waits in the collective that builds it."""
    for agent in world.agents:
        agent.obedient = False
        agent.die(agent.slots[0]) if agent.element == len(world.agents) - 1 else None
    world.run(0.5)
    for agent in world.agents[:-1]:
        agent.set(agent.slots[0], state="stopped", broken=world.job().broken)
    world.run(0.3)
    for agent in world.agents[:-1]:
        agent.set(agent.slots[0], state="entering", entering=world.job().generation)


def test_one_of_two_nodes_that_do_not_reach_each_other_is_left_out_and_nobody_is_blamed():
    world = on_slurm(5)
    cut(world, (0, 1))
    hang(world)
    world.run(6.0)
    parted = [failure for failure in world.job().failures if failure.record.kind_of_failure == "network"]
    assert [failure.record.slots for failure in parted] == [[1]] and list(world.job().parted) == [1]
    assert "n1" in parted[0].record.reason and "n2" in parted[0].record.reason
    for agent in world.agents:
        agent.obedient = True
        agent.set(agent.slots[0], state="stopped", broken=world.job().broken) if agent.element in (0, 2, 3) else None
    world.run(3.0)
    assert {0, 2, 3} <= set(world.job().members) and 1 not in world.job().members
    taken = [call for call in world.slurm.calls if call[0] in ("down", "drain", "requeue", "requeue_hold")]
    assert not taken and not world.core.state.history.states.get(("1", 1))


def without_one() -> World:
    """Element 1 of four, which element 0 does not reach, is no member any more."""
    world = on_slurm(4)
    cut(world, (0, 1))
    hang(world)
    world.run(6.0)
    assert list(world.job().parted) == [1]
    return world


def test_a_node_that_was_left_out_comes_back_when_it_is_reached():
    world = without_one()
    world.run(12.0)
    assert list(world.job().parted) == [1], "it is asked again, and still cut off"
    world.cuts.clear()
    world.run(7.0)
    assert not world.job().parted


def test_a_node_that_was_left_out_and_whose_agent_ended_has_not_come_back():
    world = without_one()
    world.agents[1].silent = True
    world.dead_nodes.add(world.agents[1].node)
    world.slurm.node_states[world.agents[1].node] = {"DOWN", "NOT_RESPONDING"}
    world.run(12.0)
    assert list(world.job().parted) == [1] and not [e for e in world.log if e.kind == "rejoined"]


def test_a_node_that_a_large_job_left_out_comes_back_when_all_others_reach_it():
    world = on_slurm(130)
    cut(world, (0, 60))  # far from each other, also in rings and trees
    hang(world)
    world.run(15.0)
    (out,) = world.job().parted
    assert out in (0, 60)
    world.run(12.0)
    assert list(world.job().parted) == [out], "one of the others does not reach it"
    world.cuts.clear()
    world.run(7.0)
    assert not world.job().parted
    asked = [message.targets for _, message in world.sent if isinstance(message, wire.Reach)]
    assert max(map(len, asked)) <= MOST_ASKED


@given(st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda pair: pair[0] != pair[1])))
def test_those_who_are_left_reach_each_other(pairs):
    gone = fewest_to_leave_out(pairs)
    assert not any((a, b) in pairs or (b, a) in pairs for a, b in combinations(set(range(7)) - gone, 2))


def test_who_is_left_out_costs_a_few_steps_for_each_pair():
    """Defect: all elements were looked at for each one that is left out, 10^8 steps for half of 16,384."""

    class Element(int):
        looks = 0

        def __hash__(self):
            Element.looks += 1
            return int.__hash__(self)

    pairs = {(Element(2 * n), Element(2 * n + 1)) for n in range(600)}
    Element.looks = 0
    assert fewest_to_leave_out(pairs) == set(range(1, 1200, 2))
    assert Element.looks < 20 * len(pairs)
