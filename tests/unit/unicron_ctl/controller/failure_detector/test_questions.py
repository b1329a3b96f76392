"""A node under question: when it is opened, what each round shows, when it is lost and when the question ends."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

from tests.support.suspects import NOW, STATE_WAIT, Company
from unicron_ctl.controller.failure_detector import ending_nodes
from unicron_ctl.controller.failure_detector.ending_nodes import (
    GREET_AGAIN_SECONDS,
    GREETINGS,
    LEFTOVER_SECONDS,
    REACHED_SECONDS,
    ROUNDS,
    UNREACHED_SECONDS,
    check_ending_nodes,
    greet_slurmds,
    on_knock,
    open_ending_node,
    slurmd_known,
)
from unicron_ctl.controller.failure_detector.probes import ANSWER_SECONDS, ROUND_SECONDS
from unicron_ctl.controller.model.finding import Finding
from unicron_ctl.controller.model.job_state import Ending
from unicron_ctl.controller.model.node_state import NodeState
from unicron_ctl.controller.model.requests import Knock
from unicron_ctl.controller.model.suspicion import EndingNode, Suspicions
from unicron_ctl.controller.model.view import Outcome
from unicron_ctl.shared.protocol.reach import Reach
from unicron_ctl.shared.slurm.drains import LOST_NODE

GRACE = 5.0  # the default restart_grace
SILENT = "own=SS 2=SS 3=SS"


@pytest.fixture
def company() -> Company:
    """Element 0's agent has died, and Slurm still runs the element on n1."""
    made = Company()
    made.view.state.jobs["1"].agents[0].gone = "agent died"
    made.view.live.remove("1", 0)
    return made


def question(company: Company, answers: str = SILENT, asked: float = 1.0, **changes: Any) -> EndingNode:
    """n1 is under question, and two rounds of ten seconds have shown that nobody answers. changes: of its fields."""
    view, record = company.view, company.view.state.jobs["1"].agents[0]
    view.suspicions = Suspicions(asked_again=True, leftovers_check_at=NOW + 100.0)
    found = EndingNode("1", 0, record.agent, "n1", NOW - 30.0, (record.door, "n1:slurmd"))
    found.opened, found.until, found.unreached, found.unreached_since = NOW - 20.0, NOW + 30.0, ROUNDS - 1, NOW - 10.0
    view.suspicions.ending_nodes["n1"] = found
    company.ask(found, answers, asked)
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def checked(company: Company) -> list[Finding]:
    out = Outcome()
    check_ending_nodes(company.tick(), out)
    return out.findings


# ---------------------------------------------------------------- which slurmds are known to answer
def test_a_few_slurmds_are_tried_at_once_when_they_are_due(company: Company):
    view, live = company.view, company.view.live
    for known, under_way, due, tried in (
        ({}, 0, NOW, ["n1", "n2"]),
        ({}, GREETINGS - 1, NOW, ["n1"]),
        ({}, GREETINGS, NOW, []),
        ({}, 0, NOW + 0.25, []),
        ({"n1": "n1:slurmd"}, 0, NOW, ["n2"]),
        ({"n1": "elsewhere:1"}, 0, NOW, ["n1", "n2"]),
    ):
        live.slurmds, live.greeted = dict(known), {f"m{number}" for number in range(under_way)}
        live.greet_at = OrderedDict({"n1": due, "n77": due, "n2": due, "n3": NOW + 9.0})
        assert greet_slurmds(view).requests == [Knock(node, f"{node}:slurmd") for node in tried], (known, under_way)
        again = [node for node, at in live.greet_at.items() if at == NOW + GREET_AGAIN_SECONDS]
        assert set(tried) <= set(again) <= {"n1", "n77", "n2"}, "those that are not due keep their time"
    live.greeted, live.slurmds = set(), {}
    for alone, seen in ((NOW, view.slurm.seen), (None, None)):
        live.greet_at = OrderedDict({"n1": NOW})
        view.suspicions.alone_since, view.slurm.seen = alone, seen
        assert not greet_slurmds(view).requests


def test_only_a_slurmd_that_answered_there_is_known(company: Company):
    view = company.view
    view.live.slurmds = {"n2": "n2:slurmd"}
    for answer, known in ((Reach.REFUSED, False), (None, False), (Reach.REACHED, True)):
        view.live.greeted = {"n1"}
        on_knock(view, Knock("n1", "n1:slurmd"), answer)
        assert slurmd_known(view, "n1", "n1:slurmd") == known and not view.live.greeted
    assert not slurmd_known(view, "n1", "n1:other") and not slurmd_known(view, "n3", "")
    view.state.nodes["n3"] = NodeState(slurmd="n3:slurmd")
    assert slurmd_known(view, "n3", "n3:slurmd"), "an earlier controller has reached it"


def test_the_log_tells_the_next_controller_where_the_slurmd_of_a_node_under_question_has_answered(company: Company):
    def recorded() -> list[str]:
        question(company)
        out = Outcome()
        check_ending_nodes(company.tick(), out)
        return [record.address for _, _, record in out.records if record.kind == "slurmd_reached"]

    assert recorded() == ["n1:slurmd"]
    company.view.state.nodes["n1"] = NodeState(slurmd="n1:slurmd")
    assert recorded() == []
    company.view.state.nodes.clear()
    company.view.live.slurmds.clear()
    assert recorded() == []


# ---------------------------------------------------------------- which nodes are under question
def test_a_refusal_of_slurmd_when_the_agent_died_calls_for_a_control(company: Company):
    for answers, refused in (("own=XX", True), ("own=XS", False), ("2=XX", False)):
        company.view.suspicions = Suspicions()
        suspicion = company.suspect(1, answers=answers)
        open_ending_node(company.view, suspicion)
        ending = company.view.suspicions.ending_nodes["n2"]
        assert ending.refused == refused and company.view.suspicions.given_up["1", 1] is ending
        assert ending.since == suspicion.since and ending.opened == NOW
        again = company.suspect(1, seconds=5.0, answers=answers)
        open_ending_node(company.view, again)
        assert company.view.suspicions.ending_nodes["n2"] is ending, "it is under question already"
    company.view.suspicions = Suspicions()
    company.view.state.jobs["1"].agents[1].node = "n77"
    open_ending_node(company.view, company.suspect(1, answers="own=XX"))
    assert not company.view.suspicions.ending_nodes and not company.view.suspicions.given_up, "Slurm does not know it"


def test_a_restarted_controller_asks_once_more_about_nodes_on_which_agents_died(company: Company):
    view, job = company.view, company.view.state.jobs["1"]
    view.suspicions.leftovers_check_at = NOW + 100.0
    seen = view.slurm.seen
    for ago, listing, gone, over, opened in (
        (GRACE, seen, "agent died", False, []),
        (GRACE + 0.25, None, "agent died", False, []),
        (GRACE + 0.25, seen, "stopped by SIGTERM", False, []),
        (GRACE + 0.25, seen, "agent died", True, []),
        (GRACE + 0.25, seen, "agent died", False, ["n1"]),
    ):
        view.suspicions = Suspicions(leftovers_check_at=NOW + 100.0)
        view.started_at, view.slurm.seen, job.agents[0].gone = NOW - ago, listing, gone
        job.ended = Ending(0, "", NOW) if over else None
        checked(company)
        assert list(view.suspicions.ending_nodes) == opened, (ago, gone, over)
    assert view.suspicions.ending_nodes["n1"].since == view.started_at
    view.suspicions.ending_nodes.clear()
    checked(company)
    assert not view.suspicions.ending_nodes, "once"


def test_nodes_on_which_slurm_still_runs_what_has_left_are_asked_about_now_and_then(company: Company):
    view, job = company.view, company.view.state.jobs["1"]
    for gone, over, check_at, reached_at, opened in (
        ("stopped by SIGTERM", False, NOW, NOW - 100.0, ["n1"]),
        ("stopped by SIGTERM", False, NOW + 0.25, NOW - 100.0, []),
        ("stopped by SIGTERM", False, NOW, NOW - REACHED_SECONDS, ["n1"]),
        ("stopped by SIGTERM", False, NOW, NOW - REACHED_SECONDS + 0.25, []),
        ("stopped by SIGTERM", True, NOW, NOW - 100.0, []),
        ("finished", False, NOW, NOW - 100.0, []),
    ):
        view.suspicions = Suspicions(asked_again=True, leftovers_check_at=check_at, answered={"n1": reached_at})
        job.agents[0].gone, job.ended = gone, Ending(0, "", NOW) if over else None
        checked(company)
        assert list(view.suspicions.ending_nodes) == opened, (gone, over, check_at, reached_at)
        assert view.suspicions.leftovers_check_at == (NOW + LEFTOVER_SECONDS if check_at == NOW else check_at)
        assert not view.suspicions.given_up, "it is not silent"
    job.ended, job.agents[0].gone = None, "stopped by SIGTERM"
    ending = question(company)
    company.view.suspicions.leftovers_check_at = NOW
    checked(company)
    assert view.suspicions.ending_nodes == {"n1": ending}
    view.suspicions = Suspicions(asked_again=True)
    company.slurm.queue["1", 0].update(state="COMPLETED")
    company.list_slurm()
    checked(company)
    assert not view.suspicions.ending_nodes


# ---------------------------------------------------------------- how a question ends quietly
def test_a_question_goes_on_while_slurm_runs_there_what_an_agent_left_early(company: Company):
    view, job = company.view, company.view.state.jobs["1"]
    record = job.agents[0]
    entry = company.slurm.queue["1", 0]
    usual = {"gone": "agent died", "node": "n1", "confirmed": True}
    for state, changes, over, known, goes_on in (
        ("RUNNING", {}, False, True, True),
        ("COMPLETING", {}, False, True, True),
        ("COMPLETED", {}, False, True, False),
        ("RUNNING", {"gone": "finished"}, False, True, False),
        ("RUNNING", {"node": "n10"}, False, True, False),
        ("RUNNING", {"confirmed": False}, False, True, False),
        ("RUNNING", {}, True, True, False),
        ("RUNNING", {}, False, False, False),
    ):
        entry["state"] = state
        company.list_slurm()
        for name, value in {**usual, **changes}.items():
            setattr(record, name, value)
        job.ended = Ending(0, "", NOW) if over else None
        question(company)
        jobs = dict(view.state.jobs)
        if not known:
            del view.state.jobs["1"]
        checked(company)
        view.state.jobs = jobs
        assert ("n1" in view.suspicions.ending_nodes) == goes_on, (state, changes, over, known)
        assert (view.suspicions.answered == {"n1": NOW}) != goes_on


def test_a_question_ends_in_doubt_for_the_node(company: Company):
    """An agent's word closes nothing: it may lie about another user's element."""
    view = company.view
    neighbour = company.agent(1)
    for changes, heard, goes_on in (
        ({"answers": "own=SR 2=SS 3=SS"}, None, False),
        ({"answers": "own=RS 2=SS 3=SS"}, None, False),
        ({"answers": "own=SS 2=RR 3=SS"}, None, True),
        ({"answers": "own=UU 2=RR 3=SS"}, None, True),
        ({"answers": "2=SS 3=SS"}, None, True),
        ({"until": NOW}, None, True),
        ({"until": NOW - 0.25}, None, False),
        ({"until": None}, None, True),
        ({}, NOW - 20.0, True),
        ({}, NOW - 19.75, False),
    ):
        found = question(company, **changes)
        neighbour.last_heard = heard or NOW
        view.live.by_node = {"n1": {("1", 1)}} if heard else {}
        checked(company)
        assert ("n1" in view.suspicions.ending_nodes) == goes_on, (changes, heard)
        assert changes.get("until", NOW) is not None or found.until == NOW + STATE_WAIT
    neighbour.status.leaving = "stopped by SIGTERM"
    neighbour.last_heard = NOW
    view.live.by_node = {"n1": {("1", 1)}}
    question(company)
    checked(company)
    assert view.suspicions.ending_nodes, "that was its last word"


def test_a_node_that_is_out_of_service_is_not_asked_about_unless_it_was_drained_as_lost(company: Company):
    """One that was drained because it was lost while others ran there is set down when they are gone."""
    lost = f"{LOST_NODE}: lost heartbeat of 2_0"
    for states, known, out in (
        ("IDLE", NodeState(), False),
        ("IDLE,DRAIN", NodeState(), True),
        ("IDLE,POWERING_UP", NodeState(), True),
        ("IDLE", NodeState(downed=True, reason=lost), True),
        ("IDLE,DRAIN", NodeState(downed=True, drained=True, reason=lost), False),
        ("DOWN,DRAIN", NodeState(downed=True, drained=True, reason=lost), True),
        ("IDLE,DRAIN", NodeState(downed=True, drained=True, reason="unicron[checks]: a GPU is broken"), True),
        ("IDLE,DRAIN", NodeState(drained=True, reason=lost), True),
        ("IDLE,DRAIN", NodeState(downed=True, reason=lost), True),
    ):
        company.view.state.nodes["n1"] = known
        company.list_slurm(n1=states)
        question(company)
        checked(company)
        assert ("n1" not in company.view.suspicions.ending_nodes) == out, (states, known)
    assert ending_nodes._out_of_service(company.view, "n77"), "Slurm does not know it any more"


def test_nothing_counts_while_the_controller_hears_nobody_or_doubts_itself(company: Company):
    found = question(company)
    company.view.suspicions.alone_since = NOW - 3.0
    assert not checked(company) and not found.number and not found.answers and found.until == NOW + STATE_WAIT
    found = question(company)
    company.view.suspicions.doubt = "most are silent"
    assert not checked(company) and found.unreached == 0 and found.counted and found.until == NOW + STATE_WAIT
    assert found.number, "it is probed all the same"


# ---------------------------------------------------------------- what the rounds say
def test_the_node_is_lost_after_three_rounds_that_span_six_seconds(company: Company):
    for rounds, seconds, lost in (
        (ROUNDS - 1, UNREACHED_SECONDS, True),
        (ROUNDS - 1, UNREACHED_SECONDS - 0.25, False),
        (ROUNDS - 2, UNREACHED_SECONDS, False),
        (ROUNDS + 2, 60.0, True),
    ):
        found = question(company, unreached=rounds, unreached_since=NOW - seconds)
        findings = checked(company)
        assert bool(findings) == lost and found.unreached == rounds + 1, (rounds, seconds)
        assert found.unreached_since == NOW - seconds and found.counted
    (finding,) = findings
    assert (finding.what, finding.source, finding.by) == ("node ended", "peer", "own sockets and witnesses")
    assert (finding.element, finding.node) == (0, "n1") and f"in {ROUNDS + 3} rounds" in finding.evidence
    assert "within 60.0 s" in finding.evidence
    assert not checked(company), "a round counts once"


def test_the_first_round_without_an_answer_begins_the_time_and_an_answer_ends_it(company: Company):
    found = question(company, unreached=0, unreached_since=NOW - 60.0)
    checked(company)
    assert (found.unreached, found.unreached_since) == (1, NOW - 1.0)
    for answers in ("own=SS 2=RS 3=SS", "own=SS 2=SR 3=SS", "own=SS b0=SR b1=SS"):
        found = question(company, answers)
        assert not checked(company) and (found.unreached, found.counted) == (0, True), answers


def test_what_shows_in_a_round_that_nobody_answers(company: Company):
    """This controller's sockets, and two witnesses, or Slurm where they cannot say it."""
    view = company.view
    for answers, asked, states, known, control, shown in (
        (SILENT, 1.0, "IDLE", True, None, True),
        ("2=SS 3=SS", 1.0, "IDLE", True, None, False),
        ("own=UU 2=SS 3=SS", 1.0, "IDLE", True, None, False),
        ("own=SS 2=SS", ANSWER_SECONDS, "IDLE", True, None, False),
        ("own=SS 2=SS", ANSWER_SECONDS - 0.25, "IDLE,NOT_RESPONDING", True, None, False),
        ("own=SS 2=SS", ANSWER_SECONDS, "IDLE,NOT_RESPONDING", True, None, True),
        ("own=SS", 0.25, "IDLE,NOT_RESPONDING", True, None, True),
        ("own=SS", 0.25, "IDLE", True, None, False),
        ("own=XX 2=XX 3=XX", 1.0, "IDLE", True, Reach.REACHED, True),
        ("own=XX 2=XX 3=XX", 1.0, "IDLE", True, Reach.SILENT, False),
        ("own=XX 2=XX 3=XX", 1.0, "IDLE", True, None, False),
        ("own=XX 2=XX 3=XX", 1.0, "IDLE", False, Reach.REACHED, False),
        ("own=XS 2=SS 3=SS", 1.0, "IDLE", True, None, False),
        ("own=SS 2=XS 3=SS", 1.0, "IDLE", True, None, False),
        ("own=SS b0=SS b1=SS", 1.0, "IDLE", True, None, True),
        ("own=UU b0=XX b1=XX", 1.0, "IDLE", True, Reach.REACHED, False),
    ):
        view.live.slurmds = {"n1": "n1:slurmd"} if known else {}
        company.list_slurm(n1=states)
        found = question(company, answers, asked, control=control)
        assert bool(checked(company)) == shown and found.unreached == ROUNDS - 1 + shown, (answers, asked, states)
        assert found.refused == answers.startswith("own=XX")
    found = question(company, refused=True)
    checked(company)
    assert found.refused, "it has refused once"


def test_slurms_word_has_to_be_newer_than_the_question(company: Company):
    for opened, lost in ((NOW - 1.25, True), (NOW - 1.0, False)):
        company.list_slurm(NOW - 1.0, n1="IDLE,NOT_RESPONDING")
        question(company, "own=SS", opened=opened)
        findings = checked(company)
        assert [finding.by for finding in findings] == lost * ["own sockets and Slurm (NOT_RESPONDING)"], opened


def test_an_agent_there_that_is_not_judged_is_waited_for(company: Company):
    view = company.view
    company.agent(1).last_heard = NOW - 20.0
    for suspected, here, lost in ((False, False, True), (True, False, False), (False, True, False)):
        question(company)
        view.live.by_node = {"n1": {("1", 1)}} if here else {}
        if suspected:
            company.suspect(2).node = "n1"
        company.suspect(3)
        assert bool(checked(company)) == lost, (suspected, here)


def test_all_elements_whose_agents_ended_there_are_lost_with_the_node(company: Company):
    view = company.view
    other = view.state.jobs["2"].agents[0]
    other.node, other.gone = "n1", "agent died"
    company.slurm.queue["2", 0].update(node="n1")
    company.list_slurm()
    question(company)
    assert [(finding.job, finding.element) for finding in checked(company)] == [("1", 0), ("2", 0)]
    company.slurm.queue["1", 0].update(state="PENDING", node=None)
    company.list_slurm()
    found = question(company)
    assert not checked(company) and found.key == ("2", 0) and found.agent == other.agent, "it speaks for the node now"
    assert found.unreached == 0 and found.begun == NOW


def test_a_new_round_begins_every_two_seconds_once_the_own_sockets_have_ended(company: Company):
    for asked, probing, number, begins in (
        (ROUND_SECONDS, 0, None, False),
        (ROUND_SECONDS + 0.25, 0, None, True),
        (ROUND_SECONDS + 0.25, 1, None, False),
        (1.0, 0, 0, True),
    ):
        found = question(company, "own=SS", asked, probing=probing, counted=True, targets=("old:1", "old:2"))
        found.number = found.number if number is None else number
        checked(company)
        assert (found.begun == NOW) == begins and found.counted != begins, (asked, probing, number)
        assert (found.targets[1] == "n1:slurmd") == begins
