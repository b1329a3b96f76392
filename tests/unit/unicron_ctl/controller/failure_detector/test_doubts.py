"""When the controller suspects itself, and from when on it believes silence again: both sides of each bound."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.suspects import LATE, LEASE, NOW, STATE_WAIT, Company
from unicron_ctl.controller.failure_detector import self_suspicion
from unicron_ctl.controller.failure_detector.self_suspicion import (
    COUNT_SECONDS,
    MOST,
    UNSURE,
    check_alone,
    check_most_silent,
    end_alone,
)
from unicron_ctl.controller.model.finding import Finding, Source, What
from unicron_ctl.controller.model.job_state import Ending
from unicron_ctl.controller.model.suspicion import Suspicions
from unicron_ctl.controller.model.view import Outcome

GRACE = 5.0  # the default restart_grace
EVERYBODY = [*(("1", element) for element in range(5)), *(("2", element) for element in range(3)), ("3", 0)]


# ---------------------------------------------------------------- nobody at all
def alone(company: Company) -> bool:
    check_alone(company.view, Outcome())
    return company.view.alone


def test_nobody_is_heard_once_the_last_of_several_has_been_silent_for_a_lease(company: Company):
    for job, element in EVERYBODY:
        company.last_heard(NOW - 30.0, element, job)
    company.last_heard(NOW - LEASE)
    assert not alone(company)
    company.last_heard(NOW - LEASE - 0.25)
    out = Outcome()
    check_alone(company.view, out)
    assert company.view.suspicions.alone_since == NOW - LEASE - 0.25
    assert [record.kind for _, _, record in out.records] == ["alone"]
    check_alone(company.view, out)
    assert len(out.records) == 1, "it is said once"


def test_one_agent_alone_says_nothing_of_this_controller(company: Company):
    view = company.view
    for job, element in EVERYBODY[2:]:
        view.live.remove(job, element)
    for element in (0, 1):
        company.last_heard(NOW - 30.0, element)
    assert alone(company)
    view.live.remove("1", 1)
    assert not alone(company), "it has ended by Slurm's word"


def test_agents_of_jobs_that_have_ended_are_heard_and_not_missed(company: Company):
    jobs = company.view.state.jobs
    for job, element in EVERYBODY:
        company.last_heard(NOW - 30.0, element, job)
    jobs["3"].ended = Ending(0, "it has trained to the end", NOW)
    company.last_heard(NOW - LEASE, job="3")
    assert not alone(company)
    company.last_heard(NOW - LEASE - 0.25, job="3")
    assert alone(company) and company.view.suspicions.alone_since == NOW - 30.0
    company.view.suspicions.alone_since = None
    jobs["1"].ended = jobs["2"].ended = jobs["3"].ended
    assert not alone(company)


def test_a_restarted_controller_waits_for_its_grace_and_a_lease_for_several_known_agents(company: Company):
    view = company.view
    for job, element in EVERYBODY:
        view.live.remove(job, element)
    view.started_at = NOW - GRACE - LEASE
    assert not alone(company)
    view.started_at = NOW - GRACE - LEASE - 0.25
    assert alone(company) and view.suspicions.alone_since == NOW - LEASE - 0.25
    records = [view.state.jobs[job].agents[element] for job, element in EVERYBODY]
    for record in records[2:]:
        record.gone = "finished"
    assert alone(company)
    records[1].gone = "finished"
    assert not alone(company), "only one is missing"
    for record in records:
        record.gone = ""
    for job in view.state.jobs.values():
        job.ended = Ending(0, "it has trained to the end", NOW)
    assert not alone(company)


def test_how_long_nobody_was_heard_is_on_record_and_all_suspicions_end(company: Company):
    company.suspect()
    company.view.suspicions.alone_since = NOW - 12.5
    ((_, _, record),) = end_alone(company.view, NOW - 12.5).records
    assert record.seconds == 12.5 and not company.view.suspicions.open and not company.view.alone


# ---------------------------------------------------------------- most at once
def fall_silent(company: Company, count: int, since: float = 10.0, reached: bool | None = False) -> None:
    """The agents on so many nodes are suspected, and this controller's sockets have tried them."""
    company.view.suspicions = Suspicions()
    for job, element in EVERYBODY:
        company.last_heard(NOW, element, job)
    for job, element in EVERYBODY[:count]:
        company.suspect(element, since, job=job).reached = reached


def counted(company: Company, out: Outcome | None = None) -> list[str]:
    """What a count puts on record."""
    out = Outcome() if out is None else out
    check_most_silent(company.view, LATE, out)
    return [record.kind for _, _, record in out.records]


def test_more_than_half_of_the_nodes_are_most(company: Company):
    fall_silent(company, 4)
    assert counted(company) == [] and not company.view.suspicions.doubt
    fall_silent(company, 5)
    out = Outcome()
    assert counted(company, out) == ["most_silent"] and company.view.suspicions.doubt == MOST
    ((_, _, record),) = out.records
    assert (record.silent, record.nodes) == (5, 9) and company.view.suspicions.most_since == NOW


def test_most_fell_silent_together_on_four_nodes_at_least(company: Company):
    for silent, heard, most in (
        ([0.0, 0.0, 0.0], 1, True),
        ([0.0, 0.0, 0.0], 0, False),
        ([0.0, 0.0], 2, False),
        ([0.0, 0.0, 0.0], 2, True),
        ([0.0, 0.0, 2 * LEASE], 1, True),
        ([0.0, 0.0, 2 * LEASE + 0.25], 1, False),
        ([0.0, 2 * LEASE + 0.25, 2 * LEASE + 0.25], 1, False),
        ([0.0, 30.0, 30.0, 30.0], 0, True),
        ([0.0, 0.0, 30.0, 30.0], 0, False),
    ):
        nodes = {f"n{number}": NOW - ago for number, ago in enumerate(silent)}
        assert self_suspicion._are_most(company.view, nodes, range(heard)) == most, (silent, heard)


def test_nodes_are_counted_twice_a_second_or_when_one_is_about_to_be_taken(company: Company):
    finding = Finding(What.NODE_LOST, "1", (), NOW, Source.PEER, "")
    suspicions_at = {"counted_at": NOW + 0.25}
    for changes, finds, deferred, is_counted in (
        ({"counted_at": NOW}, False, False, True),
        (suspicions_at, False, False, False),
        (suspicions_at, True, False, True),
        (suspicions_at, False, True, True),
        ({**suspicions_at, "most_since": NOW - 1.0}, True, True, False),
        ({"counted_at": NOW, "alone_since": NOW - 1.0}, True, False, False),
    ):
        fall_silent(company, 5)
        company.view.suspicions = replace(company.view.suspicions, **changes)
        company.view.state.deferred = {("n1", "1", 0): object()} if deferred else {}  # type: ignore[dict-item]
        counted(company, Outcome(findings=[finding] if finds else []))
        assert (company.view.suspicions.doubt == MOST) == is_counted, (changes, finds, deferred)
        assert not is_counted or company.view.suspicions.counted_at == NOW + COUNT_SECONDS


def test_the_doubt_begins_once_this_controllers_sockets_have_tried_all_that_are_silent(company: Company):
    fall_silent(company, 5)
    waiting = company.view.suspicions.open["1", 0]
    waiting.reached = None
    assert counted(company) == [] and company.view.suspicions.doubt == MOST, "nothing is taken until then"
    waiting.targets = ("", "")
    company.view.suspicions.counted_at = NOW
    assert counted(company) == ["most_silent"], "there is nothing to try"
    fall_silent(company, 6)
    company.view.suspicions.open["1", 0].reached = None
    company.view.live.add(replace(company.agent(), job="4", last_heard=NOW))
    assert counted(company) == ["most_silent"], "another agent of that node is heard"


def test_those_that_were_given_up_count_once_their_probes_have_ended(company: Company):
    for probing, reached, kinds in ((1, None, []), (0, None, ["most_silent"]), (1, False, ["most_silent"])):
        fall_silent(company, 5)
        suspicions = company.view.suspicions
        one = suspicions.open.pop(("1", 0))
        suspicions.given_up["1", 0] = one
        one.probing, one.reached = probing, reached
        assert counted(company) == kinds, (probing, reached)


def test_the_doubt_lasts_a_lease_longer_than_the_silence(company: Company):
    fall_silent(company, 5, reached=None)
    suspicions = company.view.suspicions
    suspicions.most_since = NOW - 30.0
    assert counted(company) == [] and suspicions.most_at == NOW, "whoever is probed anew does not end it"
    fall_silent(company, 1)
    suspicions = company.view.suspicions
    suspicions.most_since, suspicions.most_at = NOW - 30.0, NOW - LEASE
    assert counted(company) == [] and suspicions.doubt == MOST
    suspicions.most_at, suspicions.counted_at = NOW - LEASE - 0.25, NOW
    out = Outcome()
    assert counted(company, out) == ["most_heard"] and not suspicions.doubt
    assert out.records[0][2].seconds == 30.0 and suspicions.most_since is None


def test_no_node_is_taken_while_most_others_may_be_about_to_be_late(company: Company):
    for ago, doubt, unsure in ((1.0, False, UNSURE), (0.75, False, ""), (1.0, True, "")):
        fall_silent(company, 1)
        suspicions = company.view.suspicions
        for job, element in EVERYBODY[1:]:
            company.last_heard(NOW - ago, element, job)
        if doubt:
            suspicions.most_since = suspicions.most_at = NOW - 1.0
        counted(company)
        assert suspicions.unsure == unsure, (ago, doubt)


# ---------------------------------------------------------------- which nodes are silent
def silent_nodes(company: Company) -> tuple[dict[str, float], set[str]]:
    return self_suspicion._silent_nodes(company.view, LATE)


def test_a_node_is_silent_from_when_its_agents_are_late_to_the_longest_wait(company: Company):
    company.view.suspicions = Suspicions()
    for ago, found in (
        (LATE, {}),
        (LATE + 0.25, {"n1": NOW - LATE - 0.25}),
        (STATE_WAIT, {"n1": NOW - STATE_WAIT}),
        (STATE_WAIT + 0.25, {}),
    ):
        company.last_heard(NOW - ago)
        assert silent_nodes(company)[0] == found, ago
    company.suspect().reached = True
    silent, heard = silent_nodes(company)
    assert not silent and "n1" in heard, "its user may have stopped its agent"


def test_a_node_is_silent_when_all_its_agents_are_and_since_the_last_word_of_any(company: Company):
    company.view.live.add(replace(company.last_heard(NOW - 10.0), job="3", element=1, last_heard=NOW - 5.0))
    company.last_heard(NOW - 10.0)
    assert silent_nodes(company)[0] == {"n1": NOW - 5.0}
    fall_silent(company, 5)
    company.last_heard(NOW, 1, "3")
    assert counted(company) == [] and len(silent_nodes(company)[0]) == 4


def test_as_many_nodes_are_counted_as_heard_as_there_are_silent_ones(company: Company):
    for job, element in EVERYBODY[:3]:
        company.last_heard(NOW - 10.0, element, job)
    assert [len(nodes) for nodes in silent_nodes(company)] == [3, 3]
    for job, element in EVERYBODY[3:]:
        company.last_heard(NOW - LATE, element, job)
    assert [len(nodes) for nodes in silent_nodes(company)] == [3, 3], "they are not late"
    for job, element in EVERYBODY[:7]:
        company.last_heard(NOW - 10.0, element, job)
    assert [len(nodes) for nodes in silent_nodes(company)] == [7, 2]


def test_agents_that_have_not_come_back_and_those_given_up_are_silent_too(company: Company):
    suspicions = company.view.suspicions
    one, other = company.suspect(0, 5.0), company.suspect(1, 7.0)
    company.view.live.remove("1", 0)
    del suspicions.open["1", 1]
    suspicions.given_up["1", 1] = other
    company.last_heard(NOW - 6.0, 1)
    assert silent_nodes(company)[0] == {"n1": one.since, "n2": other.since}


@pytest.mark.parametrize(
    ("part", "changes", "counts"),
    [
        *(("record", {"gone": gone}, True) for gone in ("", "silent", "agent died", "node ended")),
        ("record", {"gone": "finished"}, False),
        ("record", {"agent": "another"}, False),
        ("job", {"agents": {}}, False),
        ("job", {"ended": Ending(0, "it has trained to the end", NOW)}, False),
        ("state", {"jobs": {}}, False),
        ("agent", {"last_heard": NOW - 10.0}, True),
        ("agent", {"last_heard": NOW - 9.75}, False),
        ("agent", {"last_heard": NOW - 9.75, "expired": True}, True),
        ("live", {"jobs": {}}, True),
    ],
)
def test_who_was_given_up_counts_until_it_is_heard_or_forgotten(company: Company, part, changes, counts):
    """An agent that has expired has spoken before it was given up."""
    view, job = company.view, company.view.state.jobs["1"]
    suspicion = company.suspect()
    view.suspicions = Suspicions(given_up={suspicion.key: suspicion})
    parts = {"record": job.agents[0], "job": job, "agent": company.agent(), "state": view.state, "live": view.live}
    for name, value in changes.items():
        setattr(parts[part], name, value)
    counted(company)
    assert (suspicion.key in view.suspicions.given_up) == counts


@pytest.mark.parametrize(
    ("seconds", "down", "counts"),
    [(10.0, False, True), (10.0, True, False), (STATE_WAIT, False, True), (STATE_WAIT + 0.25, False, False)],
)
def test_who_was_given_up_counts_until_it_is_shown_dead_and_not_for_ever(company: Company, seconds, down, counts):
    company.slurm.reasons["n1"] = "rack 3 has burnt"
    company.list_slurm(n1="DOWN" if down else "IDLE")
    suspicion = company.suspect(seconds=seconds)
    company.view.suspicions = Suspicions(given_up={suspicion.key: suspicion})
    counted(company)
    assert bool(company.view.suspicions.given_up) == counts
