"""No two halves: whether those who are silent may train on by themselves, and what shows that they do not."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tests.support.suspects import NOW, Company
from unicron_ctl.controller.failure_detector import quorum
from unicron_ctl.controller.failure_detector.quorum import (
    check_free_votes,
    last_vote,
    majority_may_run,
    missing_elements,
    no_majority_missing,
    plan_may_have_begun,
    shown_dead,
    waits_for_majority,
)
from unicron_ctl.controller.model.job_state import Identity, JobState, Phase
from unicron_ctl.controller.model.live import ProgressWatch, look_again
from unicron_ctl.shared.protocol import structs, wire


@pytest.fixture
def job(company: Company) -> JobState:
    return company.view.state.jobs["1"]


OF_SLURM = (  # reasons of its own, one of them behind an admin's
    "Low RealMemory (reported:1 < 100.00% of configured:2)",
    "gres/gpu count reported lower than configured (0 < 8)",
    "Node unexpectedly rebooted",
    "Kill task failed",
    "Prolog error",
    "Reboot timed out",
    "fan 2, seen to : Not responding",
)


def plan_of(*members: int, generation: int = 9) -> wire.Plan:
    return wire.Plan(generation=generation, members=list(members), store="n1:4000", prefix=f"1.g{generation}.1.0")


def use_plain_programs(job: JobState) -> None:
    job.settings = msgspec.structs.replace(job.settings, mode=structs.RESTART)


# ---------------------------------------------------------------- who is missing
def test_a_member_is_missing_that_neither_speaks_nor_is_shown_dead(company: Company, job: JobState):
    view, agent, record = company.view, company.agent(), job.agents[0]
    assert missing_elements(view, job) == []
    company.suspect()
    assert missing_elements(view, job) == [0]
    for gone, missing in (("silent", [0]), ("agent died", []), ("node ended", []), ("finished", []), ("", [0])):
        record.gone = gone
        assert missing_elements(view, job) == missing, gone
    view.suspicions.open.clear()
    for what, name, value in (
        (agent, "expired", True),
        (agent.status, "leaving", "stopped by SIGTERM"),
        (agent, "agent", "another"),
    ):
        before = getattr(what, name)
        setattr(what, name, value)
        assert missing_elements(view, job) == [0], name
        setattr(what, name, before)
    view.live.remove("1", 0)
    assert missing_elements(view, job) == [0]
    company.slurm.queue["1", 0].update(state="PENDING", node=None)
    company.list_slurm()
    assert missing_elements(view, job) == [], "Slurm shows its end"
    del job.agents[0]
    assert missing_elements(view, job) == [0]


def test_an_agent_in_whose_place_another_came_is_dead_unless_slurm_lost_sight_of_its_node(
    company: Company, job: JobState
):
    """Slurm starts an element elsewhere also when it hears nothing of the node any more."""
    old = job.agents[0].agent
    job.agents[0] = replace(job.agents[0], agent="new", node="n10")
    company.suspect()
    company.slurm.reasons["n1"] = ""
    for before, states, reason, missing in (
        ("n10", "IDLE,NOT_RESPONDING", "", []),
        ("n1", "IDLE", "", []),
        ("n77", "IDLE", "", []),
        ("n1", "IDLE,NOT_RESPONDING", "", [0]),
        ("n1", "DOWN", "Not responding", [0]),
        ("n1", "DOWN", "rack 3 has burnt", []),
    ):
        job.superseded = {old: before}
        company.slurm.reasons["n1"] = reason
        company.list_slurm(n1=states, n10="IDLE,NOT_RESPONDING" if before == "n10" else "IDLE")
        assert missing_elements(company.view, job) == missing, (before, states, reason)
    job.superseded = {}
    assert missing_elements(company.view, job) == [], "on the same node"


# ---------------------------------------------------------------- whose votes they may have
def test_half_of_a_generation_is_no_majority_and_one_more_is(company: Company, job: JobState):
    for element, may_run in ((0, False), (1, False), (2, True)):
        company.suspect(element)
        assert no_majority_missing(company.view, job) != may_run
        assert majority_may_run(company.view, job) == may_run, element
    assert no_majority_missing(company.view, job, []), "as the caller has found them"
    use_plain_programs(job)
    assert not no_majority_missing(company.view, job) and not majority_may_run(company.view, job)
    company.view.suspicions.open.pop(("1", 2))
    assert no_majority_missing(company.view, job)
    job.members = {slot: who for slot, who in job.members.items() if slot < 4}
    assert no_majority_missing(company.view, job), "two of four"


def test_two_halves_take_two_agents(company: Company, job: JobState):
    company.suspect(job="3")
    assert not majority_may_run(company.view, company.view.state.jobs["3"]), "it is on a single node"
    job.members = {slot: who for slot, who in job.members.items() if slot < 2}
    for element in (0, 1):
        company.suspect(element)
    assert majority_may_run(company.view, job)


def test_the_count_holds_in_every_generation_that_somebody_may_be_in(company: Company, job: JobState):
    agents = {element: record.agent for element, record in job.agents.items()}
    for element in (0, 1):
        company.suspect(element)
    assert no_majority_missing(company.view, job)
    job.former = [{element: agents[element] for element in (0, 1, 2)}]
    assert not no_majority_missing(company.view, job), "two of three of the generation before"
    job.former = []
    job.offer = plan_of(0, 1, 4)
    job.joining = {4: job.members[4]}
    job.members = {slot: who for slot, who in job.members.items() if slot < 4}
    assert not no_majority_missing(company.view, job), "two of three of the one that is offered"
    job.offer = plan_of(0, 1, 2, 3, 4)
    assert no_majority_missing(company.view, job)


def test_agents_that_died_may_have_voted_for_those_who_are_silent(company: Company, job: JobState):
    company.view.live.remove("1", 2)
    job.agents[2].gone = "agent died"
    company.suspect(0)
    assert no_majority_missing(company.view, job)
    company.suspect(1)
    assert not no_majority_missing(company.view, job)
    company.view.suspicions.open.clear()
    assert no_majority_missing(company.view, job), "nobody is missing"


def test_an_agent_votes_here_whose_rank_goes_on_or_that_has_given_its_vote_up(company: Company, job: JobState):
    for element in (0, 1):
        company.suspect(element)
    agent, members, lost = company.agent(2), job.members, Identity("", 0)
    assert job.plan is not None
    for name, gone in (("lost", {2: lost}), ("condemned", {2: "it hangs"}), ("parted", {2: "n3"})):
        setattr(job, name, gone)
        for over, votes_here in ((job.plan.generation - 1, False), (job.plan.generation, True)):
            agent.status.over = over
            assert no_majority_missing(company.view, job) == votes_here, (name, over)
        agent.status.over = 0
        setattr(job, name, {})
        assert no_majority_missing(company.view, job)
    job.former = [job.agents_of(members)]
    job.members = {slot: who for slot, who in members.items() if slot != 2}
    job.broken = 1
    assert not no_majority_missing(company.view, job)
    job.joining = {2: members[2]}
    assert no_majority_missing(company.view, job)


def test_the_last_generation_in_which_an_agent_may_have_a_vote(company: Company, job: JobState):
    agent = company.agent()
    for plan, inside, broken, last in (
        (plan_of(0), True, 7, 9),
        (plan_of(0), True, 10, 10),
        (plan_of(0), False, 7, 7),
        (None, True, 7, 7),
        (None, False, 0, 0),
    ):
        job.plan, job.broken = plan, broken
        agent.slots = [0] if inside else [77]
        assert last_vote(job, agent) == last, (inside, broken)


def test_an_agent_that_has_accepted_a_plan_of_the_silent_ones_has_voted_for_them(company: Company, job: JobState):
    for element in (0, 1):
        company.suspect(element)
    assert job.plan is not None
    here = job.plan.generation

    def told(since: int, *members: int) -> bool:
        plan = plan_of(*members)
        company.agent(2).status.agreed = wire.Agreement(
            generation=plan.generation, since=since, plan=plan, lost=[], reason="", by="", chosen=False
        )
        return not no_majority_missing(company.view, job)

    assert told(here, 0, 1) and told(here + 1, 0, 1)
    assert not told(here - 1, 0, 1), "a later plan of this controller's was made since"
    assert not told(here, 0, 1, 3), "a member of it goes on here"
    job.plan = None
    assert told(here - 1, 0, 1)


def test_a_plan_has_begun_unless_a_member_is_here_or_all_are_dead(company: Company, job: JobState):
    view = company.view
    for silent, lost, pinged, begun in (
        ([], [], 5, False),
        ([0, 1], [], 5, True),
        ([0], [], 5, False),
        ([0], [1], 5, True),
        ([0], [], 4, True),
    ):
        view.suspicions.open.clear()
        for element in silent:
            company.suspect(element)
        job.lost = {slot: Identity("", 0) for slot in lost}
        company.agent(1).status.pinged = pinged
        assert plan_may_have_begun(view, job, plan_of(0, 1), ping=5) == begun, (silent, lost, pinged)
    for gone, begun in (("silent", True), ("agent died", False)):
        for element in (0, 1):
            view.live.remove("1", element)
            job.agents[element].gone = gone if element else "agent died"
        assert plan_may_have_begun(view, job, plan_of(0, 1)) == begun, gone
    assert plan_may_have_begun(view, job, plan_of(7)), "nobody knows that member"
    job.members = {slot: who for slot, who in job.members.items() if slot < 4}
    assert plan_may_have_begun(view, job, plan_of(4)), "its agent speaks, and is not in it"


def test_that_a_majority_may_run_is_looked_for_now_and_then(company: Company, job: JobState):
    view, progress = company.view, ProgressWatch(majority_until=NOW + 0.25)
    known = view.job(job)
    assert waits_for_majority(view, known, progress)
    progress.majority_until = NOW
    assert not waits_for_majority(view, known, progress) and not progress.majority_until
    for element in (0, 1, 2):
        company.suspect(element)
    assert waits_for_majority(view, known, progress) and progress.majority_until == look_again(NOW, 5)


# ---------------------------------------------------------------- votes that are given up
def test_agents_without_a_rank_that_goes_on_are_asked_for_their_votes(company: Company, job: JobState):
    view, job.lost = company.view, {2: Identity("", 0)}
    settings = job.settings
    known, agent = view.job(job), company.agent(2)
    for phase, silent, over, check_at, plain, asked in (
        (Phase.BREAKING, (0, 1), 0, NOW, False, True),
        (Phase.FORMING, (0, 1), 0, NOW, False, True),
        (Phase.ENTERING, (0, 1), 0, NOW, False, True),
        (Phase.RUNNING, (0, 1), 0, NOW, False, False),
        (Phase.BREAKING, (0, 1), 0, NOW + 0.25, False, False),
        (Phase.BREAKING, (0,), 0, NOW, False, False),
        (Phase.BREAKING, (0, 1, 3), 1, NOW, False, False),
        (Phase.BREAKING, (0, 1, 3), 0, NOW, True, False),
    ):
        view.suspicions.open.clear()
        for element in silent:
            company.suspect(element)
        job.phase, agent.status.over, job.settings = phase, over, settings
        if plain:
            use_plain_programs(job)
        progress = ProgressWatch(votes_check_at=check_at)
        orders = check_free_votes(view, known, progress).orders
        assert [(order.agent.element, order.message) for order in orders] == asked * [(2, wire.Ping(over=1))], phase
        looked = phase is not Phase.RUNNING and check_at == NOW and not plain
        assert (progress.votes_check_at == look_again(NOW, 5)) == looked


# ---------------------------------------------------------------- what shows the end of an element
def test_what_shows_that_nothing_of_an_element_lives(company: Company, job: JobState, snapshot):
    slurm, said = company.slurm, []
    for states, reason, element, shown in (
        ("IDLE", "", {}, False),
        ("IDLE", "", {"state": "PENDING", "node": None}, True),
        ("IDLE", "", {"node": "n10"}, True),
        ("IDLE", "", {"state": "COMPLETED"}, True),
        ("IDLE", "", {"state": "COMPLETING"}, False),
        ("IDLE,POWERING_UP", "", {"state": "PENDING", "node": None}, False),
        ("IDLE,NOT_RESPONDING", "rack 3 has burnt", {"state": "PENDING", "node": None}, False),
        ("DOWN", "rack 3 has burnt", {}, True),
        ("DOWN", "fan 2 : rack 3 has burnt", {}, True),
        ("DOWN", "fan 2 : Not responding", {}, False),
        ("DOWN", "unicron[node_problem]: lost heartbeat of 1_0", {}, False),
        *(("DOWN,NOT_RESPONDING", reason, {}, False) for reason in OF_SLURM),
        ("DOWN,DRAIN", "rack 3 has burnt", {}, False),
        ("DOWN,POWERED_DOWN", "", {}, True),
        ("IDLE,POWERED_DOWN", "", {}, True),
        ("DOWN,POWERING_UP", "rack 3 has burnt", {}, False),
    ):
        slurm.reasons["n1"] = reason
        slurm.queue["1", 0].update({"state": "RUNNING", "node": "n1", **element})
        company.list_slurm(n1=states)
        said += [text] if (text := shown_dead(company.view, job, 0)) else []
        assert bool(text) == shown, (states, reason, element)
    assert said == snapshot
    slurm.reasons["n1"], company.view.state.out_of_service = "rack 3 has burnt", {"n1"}
    company.list_slurm(n1="DOWN")
    assert shown_dead(company.view, job, 0), "a person's reason has replaced that of this controller"


def test_an_elements_end_is_shown_by_what_slurm_said_since_and_of_its_own_node(company: Company, job: JobState):
    view, record, asked_at = company.view, job.agents[0], NOW - 1.0
    entry = company.slurm.queue.pop(("1", 0))
    company.list_slurm(asked_at)
    assert not shown_dead(view, job, 0), "Slurm does not show the element"
    company.slurm.queue["1", 0] = {**entry, "state": "PENDING", "node": None}
    company.list_slurm(asked_at)
    assert shown_dead(view, job, 0, asked_at - 0.25) and not shown_dead(view, job, 0, asked_at)
    record.confirmed = False
    assert not shown_dead(view, job, 0), "Slurm has not shown it on that node"
    record.confirmed, record.node = True, "n77"
    assert not shown_dead(view, job, 0), "Slurm does not know that node"
    del job.agents[0]
    assert not shown_dead(view, job, 0)
    job.agents[0] = replace(record, node="n1")
    view.slurm.seen = None
    assert not shown_dead(view, job, 0)


def test_the_command_by_which_a_person_says_that_a_node_is_dead(company: Company):
    down = "`scontrol update NodeName=n1 State=DOWN Reason=...`"
    assert quorum.declare_dead_command(company.view, "n1") == down
    company.list_slurm(n1="IDLE,DRAIN")
    undrain = "`scontrol update NodeName=n1 State=UNDRAIN`, then "
    assert quorum.declare_dead_command(company.view, "n1") == undrain + down
    assert "UNDRAIN" not in quorum.declare_dead_command(company.view, "n77")
    assert not quorum.slurm_hears_nothing(company.view, "n77")
