"""When Slurm is asked for its lists, and what a fresh listing says of jobs that are over: both sides of each bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.support.suspects import NOW, Company
from unicron_ctl.controller.model.job_state import Ending
from unicron_ctl.controller.model.requests import Action, Poll, Run
from unicron_ctl.controller.model.view import Outcome
from unicron_ctl.controller.plan import reconcile
from unicron_ctl.controller.plan.reconcile import GONE_SECONDS, before_planning, placing, watching
from unicron_ctl.controller.plan.slurm_actions import (
    ASKED_SECONDS,
    HURRY_SECONDS,
    LATELY_SECONDS,
    LONGEST_PAUSE,
    MOST_FAILURES,
    Desk,
)
from unicron_ctl.shared.slurm.admin_comment import HOLD_PREFIX

USUAL = 10.0  # seconds between two listings


@pytest.fixture
def company() -> Company:
    return Company()


# ---------------------------------------------------------------- when Slurm is asked
def seconds_until_poll(desk: Desk, **changes: Any) -> float:
    """Seconds until Slurm is asked, after a change."""
    for name, value in {"next_poll": NOW + 30.0, **changes}.items():
        setattr(desk, name, value)
    desk.hurry(NOW)
    return desk.next_poll - NOW


def test_three_early_listings_are_asked_for_at_once_and_one_a_second_from_then_on():
    soon, desk = NOW + HURRY_SECONDS - NOW, Desk()
    assert [seconds_until_poll(desk) for _ in range(5)] == [soon, soon, soon, 1.0, 2.0]
    slow = Desk(took=0.5)  # as much of the time as five
    assert [seconds_until_poll(slow) for _ in range(2)] == [soon, 5.0]


def test_an_early_listing_is_paid_only_where_it_comes_earlier():
    desk = Desk()
    assert seconds_until_poll(desk, busy=True) == 30.0 and seconds_until_poll(desk, busy=False, next_poll=NOW) == 0.0
    assert seconds_until_poll(desk, next_poll=NOW + HURRY_SECONDS) == NOW + HURRY_SECONDS - NOW
    assert desk.early.rest("", NOW) == 3.0


def test_slurm_is_asked_as_usual_and_more_seldom_where_it_takes_long_or_fails():
    for took, pause in ((0.5, USUAL), (2.0, 20.0), (30.0, LONGEST_PAUSE)):
        desk = Desk(busy=True)
        desk.on_listing(NOW, USUAL, took)
        assert (desk.next_poll, desk.busy) == (NOW + pause, False), took
    desk = Desk()
    pauses = []
    for _ in range(MOST_FAILURES + 1):
        desk.on_listing(NOW, USUAL, 0.5, failed=True)
        pauses.append(desk.next_poll - NOW)
    assert pauses == [USUAL, 2 * USUAL, 2 * USUAL]
    desk.on_listing(NOW, USUAL, 0.5)
    desk.on_listing(NOW, USUAL, 0.5, failed=True)
    assert desk.next_poll == NOW + USUAL, "it had answered in between"
    desk.on_listing(NOW, USUAL, 30.0, failed=True)
    assert desk.next_poll == NOW + 30.0


def test_what_became_of_actions_is_looked_at_at_once_unless_a_listing_is_under_way():
    for busy, urgent, still_busy, next_poll in (
        (True, False, False, NOW),
        (True, True, True, NOW + 30.0),
        (False, True, False, NOW),
    ):
        desk = Desk(busy=busy, next_poll=NOW + 30.0)
        desk.on_actions_done(NOW, urgent)
        assert (desk.busy, desk.next_poll) == (still_busy, next_poll), (busy, urgent)


def test_slurm_is_asked_once_it_is_time_and_nothing_is_under_way(company: Company):
    view = company.view
    view.state.intents = {("hold", "7", 0, ""): object()}  # type: ignore[dict-item]
    for used, busy, next_poll, asks in (
        (True, False, NOW, True),
        (True, False, NOW + 0.25, False),
        (True, True, NOW, False),
        (False, False, NOW, False),
    ):
        view.slurm.used, desk = used, Desk(busy=busy, next_poll=next_poll)
        requests = desk.tick(view, ["8"]).requests
        assert requests == asks * [Poll(frozenset({"1", "2", "3", "7", "8"}))], (used, busy, next_poll)
        assert desk.busy == (busy or asks) and desk.asked_at == (NOW if asks else 0.0)


def test_a_job_that_has_ended_is_asked_about_for_a_minute_or_while_it_has_pending_elements(company: Company):
    view, job, seen = company.view, company.view.state.jobs["3"], company.view.slurm.seen
    company.slurm.queue["3", 0].update(state="PENDING", node=None)
    pending = replace(seen, elements=company.slurm.elements()) if seen is not None else None
    for ago, listing, submitted, asked in (
        (ASKED_SECONDS - 0.25, seen, 1.0, True),
        (ASKED_SECONDS - 0.25, seen, 0.0, False),
        (ASKED_SECONDS, seen, 1.0, False),
        (ASKED_SECONDS, pending, 1.0, True),
        (LATELY_SECONDS - 0.25, None, 1.0, True),
        (LATELY_SECONDS, None, 1.0, False),
    ):
        job.ended, job.submitted, view.slurm.seen = Ending(0, "", NOW - ago), submitted, listing
        (poll,) = Desk().tick(view, []).requests
        assert ("3" in poll.jobs) == asked, (ago, submitted)


# ---------------------------------------------------------------- jobs that are over
def take_listing(company: Company, desk: Desk | None = None, asked_at: float = NOW - 1.0) -> Outcome:
    """The outcome of a fresh listing."""
    company.list_slurm(asked_at)
    assert company.view.slurm.seen is not None
    return before_planning(company.view, Desk() if desk is None else desk, company.view.slurm.seen)


def kinds(out: Outcome, kind: str) -> list[Any]:
    return [record for _, _, record in out.records if record.kind == kind]


def actions(out: Outcome) -> list[Action]:
    return [action for run in out.requests if isinstance(run, Run) for action in run.actions]


def test_a_job_of_which_slurm_shows_nothing_is_over_after_a_while(company: Company, snapshot: SnapshotAssertion):
    job, queue = company.view.state.jobs["3"], company.slurm.queue
    entry = queue["3", 0]
    reasons = []
    for state, here, submitted, since, ends in (
        ("RUNNING", False, 1.0, 20.0, False),
        ("PENDING", False, 1.0, 20.0, False),
        ("COMPLETED", True, 1.0, 20.0, False),
        ("COMPLETED", False, 1.0, GONE_SECONDS, False),
        ("COMPLETED", False, 1.0, GONE_SECONDS + 0.25, True),
        ("COMPLETED", True, 0.0, GONE_SECONDS + 0.25, True),
    ):
        queue["3", 0] = {**entry, "state": state}
        company.agent(job="3").expired, job.submitted = not here, submitted
        desk = Desk(missing_since={"3": NOW - since, "no job": NOW})
        ended = kinds(take_listing(company, desk), "job_ended")
        assert [(one.code, one.disowned) for one in ended] == ends * [(0, not submitted)]
        reasons += [one.reason for one in ended]
        assert ("3" in desk.missing_since) == (since <= GONE_SECONDS or ends), (state, here, submitted, since)
        assert "no job" not in desk.missing_since
    assert reasons == snapshot
    company.agent(job="3").expired, job.submitted = True, 1.0
    desk = Desk()
    assert not kinds(take_listing(company, desk), "job_ended") and desk.missing_since == {"3": NOW}


@pytest.mark.parametrize(
    ("state", "code"), [("CANCELLED", 143), ("TIMEOUT", 143), ("OUT_OF_MEMORY", 1), ("COMPLETED", 0)]
)
def test_a_job_that_slurm_has_ended_is_told_from_one_that_is_through(company: Company, state: str, code: int):
    """Defect: a cancelled job had ended with 0."""
    company.agent(job="3").expired, company.view.state.jobs["3"].submitted = True, 1.0
    company.view.state.jobs["3"].agents[0].gone = "stopped by SIGTERM"
    company.slurm.queue["3", 0].update(state=state)
    (ended,) = kinds(take_listing(company, Desk(missing_since={"3": NOW - 20.0})), "job_ended")
    assert ended.code == code and (state in ended.reason) == bool(code)


def test_an_element_that_is_to_start_again_or_whose_end_is_not_judged_keeps_its_job(company: Company):
    record = company.view.state.jobs["3"].agents[0]
    company.agent(job="3").expired = True
    for state, gone, over in (
        ("FAILED", "agent died", False),
        ("FAILED", "", False),
        ("FAILED", "finished", True),
        ("CANCELLED", "", True),
    ):
        company.slurm.queue["3", 0].update(state=state)
        record.gone = gone
        desk = Desk(missing_since={"3": NOW - 20.0})
        assert bool(kinds(take_listing(company, desk), "job_ended")) == over, (state, gone)


def test_pending_elements_of_an_ended_job_are_cancelled_if_they_are_ours(company: Company):
    view, job, entry = company.view, company.view.state.jobs["3"], company.slurm.queue["3", 0]
    view.state.partitions = {}
    for state, held, ours, submitted, shown, cancelled in (
        ("PENDING", False, False, 1.0, 1.0, True),
        ("RUNNING", False, False, 1.0, 1.0, False),
        ("PENDING", True, False, 1.0, 1.0, False),
        ("PENDING", True, True, 1.0, 1.0, True),
        ("PENDING", False, False, 1.0, NOW, False),
        ("PENDING", False, False, 0.0, 1.0, False),
    ):
        job.ended, job.submitted = Ending(0, "x" * 300, NOW - 5.0), submitted
        view.state.held = {("3", 0)} if ours else set()
        entry.update(state=state, node=None, reason="JobHeldAdmin" if held else "Priority", submitted=shown)
        found = [action for action in actions(take_listing(company)) if action.job == "3"]
        assert [action.action for action in found] == cancelled * ["cancel"], (state, held, ours, submitted, shown)
        assert not found or len(found[0].reason) == 200


def test_a_hold_of_ours_that_the_log_does_not_know_is_known_again(company: Company):
    """An admin's hold, and a user's, is left alone; so is one that is being asked for."""
    view, entry, comment = company.view, company.slurm.queue["3", 0], f"{HOLD_PREFIX}: there is no node for it"
    for reason, said, held, busy, at, known in (
        ("JobHeldAdmin", comment, False, False, NOW - 2.0, True),
        ("JobHeldAdmin", comment, False, False, NOW - 1.0, False),
        ("JobHeldAdmin", "ask Bob first", False, False, NOW - 2.0, False),
        ("JobHeldUser", comment, False, False, NOW - 2.0, False),
        ("Priority", comment, False, False, NOW - 2.0, False),
        ("JobHeldAdmin", comment, True, False, NOW - 2.0, False),
        ("JobHeldAdmin", comment, False, True, NOW - 2.0, False),
    ):
        entry.update(state="PENDING", node=None, reason=reason, admin_comment=said)
        view.state.held = {("3", 0)} if held else set()
        view.state.intents = {("pin", "3", 0, "n1"): object()} if busy else {}  # type: ignore[dict-item]
        view.state.once_held = {("3", 0): at, ("3", 7): at, ("77", 0): at}
        out = Outcome()
        company.list_slurm()
        assert view.slurm.seen is not None
        reconcile._held_again(view, view.slurm.seen, out)
        assert [record.element for record in kinds(out, "held_again")] == known * [0], (reason, said, held, busy, at)


# ---------------------------------------------------------------- placing and watching
def test_who_is_given_nothing_by_the_plan_is_allotted_nothing(company: Company, snapshot: SnapshotAssertion):
    view, jobs = company.view, list(company.view.state.jobs.values())
    assert view.slurm.seen is not None
    view.state.assignment = {"1": 5, "2": 3}
    allotted = {job: record for job, _, record in placing(view, Desk(), view.slurm.seen, jobs).records}
    assert allotted["3"].elements == [] and view.slurm.expected == {"1": [0, 1, 2, 3, 4], "2": [0, 1, 2], "3": []}
    assert list(allotted) == ["3"], "nothing changes for the others"
    assert allotted["3"].reason == snapshot and allotted["3"].leaving == [0]
    view.state.assignment = {"1": 5, "2": 3, "3": 1}
    view.state.jobs["1"].allotted = [0, 1]
    view.state.jobs["2"].leaving = [1]
    allotted = {job: record for job, _, record in placing(view, Desk(), view.slurm.seen, jobs).records}
    assert sorted(allotted) == ["1", "2"] and allotted["2"].reason == "elements [0, 1, 2]"


def test_what_the_plan_would_do_with_watched_jobs_is_said_when_it_changes():
    company = Company(observe=True)
    view, jobs, desk = company.view, list(company.view.state.jobs.values()), Desk()
    assert view.slurm.seen is not None
    company.slurm.queue["1", 4].update(state="COMPLETING")
    company.list_slurm()
    view.state.jobs["2"].allotted = [0, 1]
    view.state.jobs["3"].allotted = None
    out = watching(view, desk, view.slurm.seen, jobs)
    assert view.slurm.expected == {"1": [0, 1, 2, 3], "2": [0, 1, 2], "3": [0]}
    assert [(job, record.elements) for job, _, record in out.records if record.kind == "allotted"] == [("2", [0, 1, 2])]
    assert len(kinds(out, "observed")) >= 3
    assert not kinds(watching(view, desk, view.slurm.seen, jobs), "observed")
    desk.watched = "of other jobs"
    assert not watching(view, desk, view.slurm.seen, []).records and desk.watched == ""
