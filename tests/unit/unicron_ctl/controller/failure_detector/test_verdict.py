"""The table of docs/design/silence.md: what is judged of one silent agent, on whose word, and from when on."""

from __future__ import annotations

from tests.support.suspects import LEASE, NOW, STATE_WAIT, Company
from unicron_ctl.controller.failure_detector.leases import Evidence
from unicron_ctl.controller.failure_detector.probes import ANSWER_SECONDS
from unicron_ctl.controller.model.suspicion import Suspicion


def judged(company: Company, suspicion: Suspicion) -> str:
    """What is found and who says so, with what else the finding states; empty while nothing is known."""
    found = Evidence(company.tick(), suspicion).judge()
    if found is None:
        return ""
    more = [name for name in ("dead", "answers", "spare") if getattr(found, name)]
    return ", ".join([found.what, found.source, *more])


LOST, DIED = "node lost, peer", "agent died, peer"


ANSWERS = [
    # The door refuses: one word where slurmd answers the same witness, else two, and nobody says anything else.
    ("own=XR", f"{DIED}, answers"),
    ("own=SS 2=XR", f"{DIED}, answers"),
    ("own=XX", ""),
    ("own=XX 2=XX", DIED),
    ("own=XX 2=XX 3=UU", DIED),
    ("own=XX 2=XX 3=SS", ""),
    ("own=XX 2=XX 3=RS", ""),
    ("own=XR 2=RR", ""),
    # Strangers are not believed.
    ("b0=XR", ""),
    ("own=XX b0=XX b1=XX", ""),
    # It lives: its job's agents are believed, a stranger is one voice against all that reach nothing.
    ("own=RR 2=SS 3=SS", ""),
    ("own=SS 2=SS 3=SS 4=RU", ""),
    ("own=SS 2=SS 3=SS b0=RU", LOST),
    ("own=SS 2=SS 3=SS b0=RU b1=RU b2=RU", ""),
    # Two witnesses reach neither door nor slurmd. The node is taken only where this controller's word agrees.
    ("own=SS 2=SS 3=SS", LOST),
    ("2=SS 3=SS", f"{LOST}, spare"),
    ("own=UU 2=SS 3=SS", f"{LOST}, spare"),
    ("own=XX 2=SS 3=SS", f"{LOST}, spare"),
    ("own=UU 2=SU 3=US", f"{LOST}, spare"),
    ("own=SS", ""),
    ("own=SS 2=SS", ""),
    ("own=SS 2=SS 3=UU", ""),
    # slurmd is reached, and not the door.
    ("2=SR 3=SR", f"{DIED}, answers"),
    ("2=SS 3=SR", f"{DIED}, answers"),
    ("own=SR 2=SS 3=SS", f"{DIED}, answers"),
    ("2=UR 3=UR", ""),
]


def test_what_the_answers_come_to(company: Company):
    for answers, verdict in ANSWERS:
        assert judged(company, company.suspect(answers=answers)) == verdict, answers


def test_the_failures_reason_names_all_who_were_asked(company: Company):
    found = Evidence(company.tick(), company.suspect(answers="own=SS 2=SS 3=SS")).judge()
    assert found is not None and found.by == "lease and witnesses"
    for who in ("2", "3", "own"):
        assert f"{who}: agent silent, slurmd silent" in found.evidence
    assert found.evidence.startswith("no message from n1 for 10.00 s (")


def test_a_refusal_counts_before_the_lease_is_over_only_where_the_task_has_ended(company: Company):
    agent = company.agent()
    for ended, seconds, answers, verdict in (
        (False, LEASE, "own=XR", ""),
        (False, LEASE + 0.25, "own=XR", f"{DIED}, answers"),
        (True, 1.0, "own=XR", f"{DIED}, answers"),
        (True, 1.0, "own=SR 2=SR 3=SR", ""),
        (True, 1.0, "own=RR", ""),
    ):
        suspicion = company.suspect(seconds=seconds, answers=answers)
        agent.suspect_since = NOW - 1.0 if ended else None
        assert judged(company, suspicion) == verdict, (ended, seconds, answers)


def test_an_agent_that_has_not_come_back_is_judged_as_one_that_fell_silent(company: Company):
    suspicion = company.suspect(answers="own=SS 2=SS 3=SS")
    company.view.live.remove("1", 0)
    assert judged(company, suspicion) == LOST


def test_one_refusal_is_enough_where_nobody_else_can_be_asked():
    """Without Slurm, for an agent that is the only one of its job."""
    company = Company(slurm=False)
    assert judged(company, company.suspect(answers="own=XU", job="3")) == DIED
    assert judged(company, company.suspect(answers="own=XU")) == "", "others can be asked"
    assert judged(company, company.suspect(answers="own=XU 1=UU 2=UU 3=UU 4=UU")) == "", "others were asked"


def test_with_slurm_a_jobs_only_node_is_lost_by_slurms_word_and_not_before(company: Company):
    """One refusal is never enough, nor is the controller's own word, nor that of strangers."""
    for states, verdict in (("IDLE", ""), ("IDLE,NOT_RESPONDING", "node lost, slurm")):
        company.list_slurm(n9=states)
        for answers in ("own=XX", "own=SS", "own=SS b0=XX b1=XX b2=XX"):
            assert judged(company, company.suspect(answers=answers, job="3")) == verdict, (states, answers)


def test_slurm_takes_a_node_that_it_alone_does_not_hear(company: Company):
    every = [f"n{n}" for n in range(1, 11)]
    for states, verdict in (
        ({}, ""),
        ({"n1": "IDLE,NOT_RESPONDING"}, "node lost, slurm"),
        ({"n1": "DOWN"}, "node lost, slurm"),
        (dict.fromkeys(every, "IDLE,NOT_RESPONDING"), ""),
        ({"n1": "IDLE,NOT_RESPONDING,POWERING_UP"}, ""),
    ):
        company.list_slurm(**{**dict.fromkeys(every, "IDLE"), **states})
        assert judged(company, company.suspect()) == verdict, states


def test_slurms_word_waits_for_the_first_answers(company: Company):
    company.list_slurm(n1="IDLE,NOT_RESPONDING")
    for asked, answers, verdict in (
        (ANSWER_SECONDS - 0.25, "", ""),
        (ANSWER_SECONDS, "", "node lost, slurm"),
        (ANSWER_SECONDS - 0.25, "own=UU", "node lost, slurm"),
        (ANSWER_SECONDS, "2=RR", ""),
    ):
        assert judged(company, company.suspect(asked=asked, answers=answers)) == verdict, (asked, answers)


def test_slurms_word_counts_as_two_against_strangers_who_reach_the_door(company: Company):
    company.list_slurm(n1="IDLE,NOT_RESPONDING")
    assert judged(company, company.suspect(answers="b0=RU")) == "node lost, slurm"
    assert judged(company, company.suspect(answers="b0=RU b1=RU")) == ""
    assert judged(company, company.suspect(answers="b0=RU b1=RU own=SS")) == "node lost, slurm"
    assert judged(company, company.suspect(answers="b0=RU b1=RU own=XU")) == "node lost, slurm"
    company.list_slurm(n1="IDLE")
    suspicion = company.suspect(answers="b0=RU")
    assert Evidence(company.tick(), suspicion).reached, "nobody contradicts it"


def test_an_agent_that_was_reached_lives_until_the_next_round_has_answers(company: Company):
    """Defect: a round that began early was forgotten whole, and Slurm's word alone took the node."""
    company.list_slurm(n1="IDLE,NOT_RESPONDING")
    suspicion = company.suspect(answers="2=RU")
    company.ask(suspicion, "", ANSWER_SECONDS)
    assert judged(company, suspicion) == ""
    company.ask(suspicion, "", ANSWER_SECONDS)
    assert judged(company, suspicion) == "node lost, slurm", "two rounds ago is too long"


def test_what_shows_the_elements_end_needs_no_witness(company: Company):
    company.slurm.reasons["n1"] = "rack 3 has burnt"
    company.list_slurm(n1="DOWN")
    assert judged(company, company.suspect(answers="own=RR")) == "node lost, slurm, dead"
    company.list_slurm(n1="IDLE")
    company.slurm.queue["1", 0].update(state="PENDING", node=None)
    company.list_slurm()
    assert judged(company, company.suspect(answers="own=RR")) == "agent died, slurm, dead, answers"


def test_the_controllers_own_probe_is_waited_for_and_not_for_long(company: Company):
    for asked, answers, probing, verdict in (
        (ANSWER_SECONDS - 0.25, "2=SS 3=SS", 1, ""),
        (ANSWER_SECONDS, "2=SS 3=SS", 1, f"{LOST}, spare"),
        (ANSWER_SECONDS - 0.25, "2=SS 3=SS", 0, f"{LOST}, spare"),
        (ANSWER_SECONDS - 0.25, "2=SR 3=SR", 1, f"{DIED}, answers"),
    ):
        suspicion = company.suspect(asked=asked, answers=answers)
        suspicion.probing = probing
        assert judged(company, suspicion) == verdict, (asked, answers, probing)


def test_after_the_longest_wait_no_answer_keeps_it_alive_and_it_is_given_up(company: Company):
    given_up = "node lost, clock, spare"
    assert judged(company, company.suspect(seconds=STATE_WAIT, answers="own=UU")) == ""
    assert judged(company, company.suspect(seconds=STATE_WAIT + 0.25, answers="own=UU")) == given_up
    assert judged(company, company.suspect(seconds=STATE_WAIT + 0.25, answers="own=RR")) == given_up
    company.list_slurm(n1="IDLE,NOT_RESPONDING")
    assert judged(company, company.suspect(seconds=STATE_WAIT, answers="own=RR")) == ""
    company.list_slurm(n1="IDLE")
    suspicion = company.suspect(seconds=STATE_WAIT + 0.25)
    company.view.suspicions.alone_since = NOW - 10.0
    assert judged(company, suspicion) == "", "nobody at all is heard"


def test_a_majority_that_may_go_on_by_itself_is_lost_by_no_witness_no_slurm_and_no_time(company: Company):
    for element in (1, 2):
        company.suspect(element)
    assert judged(company, company.suspect(answers="own=XR")) == f"{DIED}, answers", "its own node says that it died"
    assert judged(company, company.suspect(answers="own=SS 3=SS 4=SS")) == ""
    company.list_slurm(n1="IDLE,NOT_RESPONDING")
    assert judged(company, company.suspect(answers="own=SS 3=SS 4=SS")) == ""
    assert judged(company, company.suspect(seconds=STATE_WAIT + 0.25)) == ""


def test_a_jobs_only_node_is_given_up_by_time_where_there_is_no_slurm_to_say_it():
    company = Company(slurm=False)
    late = STATE_WAIT + 0.25
    assert judged(company, company.suspect(seconds=late, job="3")) == "node lost, clock, spare"
    for element in (1, 2):
        company.suspect(element)
    assert judged(company, company.suspect(seconds=late)) == "", "a majority may go on by itself"
    company = Company()
    assert judged(company, company.suspect(seconds=late, job="3")) == "", "Slurm has to say it"
