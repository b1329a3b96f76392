"""Repeated requests to Slurm, their times and their records: both sides of each bound."""

from __future__ import annotations

import pytest

from tests.support.suspects import NOW, Company
from unicron_ctl.controller.model.job_state import Failure
from unicron_ctl.controller.model.requests import Action, Run
from unicron_ctl.controller.model.view import Outcome
from unicron_ctl.controller.nodes.readmission import Gate
from unicron_ctl.controller.plan.slurm_actions import (
    LONGEST_RETRY,
    NO_EFFECT_SECONDS,
    RETRY_SECONDS,
    Retries,
    RetryState,
    on_outcome,
    record_intents,
    request_actions,
)
from unicron_ctl.shared.log import records


@pytest.fixture
def company() -> Company:
    return Company()


HOLD = Action("hold", "1", 0, "", "")
KEY = (("1", 0), "hold")


def requests_of(company: Company, retries: Retries, *actions: Action) -> list[Action]:
    out = Outcome()
    request_actions(company.view, retries, actions, out)
    return [action for run in out.requests if isinstance(run, Run) for action in run.actions]


def test_what_had_no_effect_is_asked_again_later_each_time_and_what_was_refused_later_still():
    for times, refused, seconds in (
        (1, False, NO_EFFECT_SECONDS),
        (2, False, NO_EFFECT_SECONDS),
        (3, False, 2 * NO_EFFECT_SECONDS),
        (2, True, RETRY_SECONDS),
        (4, True, 4 * RETRY_SECONDS),
        (9, True, LONGEST_RETRY),
        (100_000, True, LONGEST_RETRY),
    ):
        assert RetryState((), times, NOW, refused).until == NOW + seconds, (times, refused)


def test_what_is_to_be_asked_again_waits_with_all_else_for_the_same_element(company: Company):
    pin = Action("pin", "1", 0, "n10", "")
    for ago, asked in ((NO_EFFECT_SECONDS - 0.25, [Action("hold", "2", 0, "", "")]), (NO_EFFECT_SECONDS, None)):
        retries = Retries({KEY: RetryState((), 1, NOW - ago)})
        todo = (pin, HOLD, Action("hold", "2", 0, "", ""))
        assert requests_of(company, retries, *todo) == (list(todo) if asked is None else asked), ago
    assert retries.states[KEY].times == 2 and retries.states[KEY].at == NOW
    assert retries.states[("1", 0), "start n10"].times == 1
    assert retries.states[KEY].shown == ("RUNNING", "n1", False, 0)


def test_how_an_action_went_is_noted_with_what_slurm_showed(company: Company):
    retries = Retries()
    requests_of(company, retries, HOLD, Action("drain", "", -1, "n10", ""), Action("drain", "", -1, "n77", ""))
    assert retries.states[("n10", -1), "drain"].shown == (frozenset({"IDLE"}), "")
    retries.note_outcome(HOLD, "")
    assert not retries.states[KEY].refused
    retries.note_outcome(HOLD, "Invalid job id")
    retries.note_outcome(HOLD, "")
    assert retries.states[KEY].refused, "one of its steps was"
    retries.note_outcome(Action("hold", "9", 0, "", ""), "Invalid job id")
    assert (("9", 0), "hold") not in retries.states, "nobody has asked for it"


def test_what_slurm_shows_otherwise_by_now_is_forgotten_unless_it_was_refused_of_late(company: Company):
    shown = ("RUNNING", "n1", False, 0)
    for state, kept in (
        (RetryState(shown, 1, NOW - 2 * LONGEST_RETRY + 0.25), True),
        (RetryState(shown, 1, NOW - 2 * LONGEST_RETRY), False),
        (RetryState(("PENDING", None, False, 0), 1, NOW - 1.0), False),
        (RetryState(("PENDING", None, False, 0), 1, NOW - RETRY_SECONDS + 0.25, refused=True), True),
        (RetryState(("PENDING", None, False, 0), 1, NOW - RETRY_SECONDS, refused=True), False),
    ):
        retries = Retries({KEY: state})
        retries.prune(company.view)
        assert bool(retries.states) == kept, state
    retries = Retries({(("77", 0), "hold"): RetryState((), 1, NOW), (("n77", -1), "down"): RetryState((), 1, NOW)})
    retries.prune(company.view)
    assert not retries.states, "Slurm shows nothing of them"
    company.view.slurm.seen = None
    retries = Retries({KEY: RetryState(shown, 1, NOW)})
    retries.prune(company.view)
    assert not retries.states


def test_while_silence_is_not_believed_nothing_is_stopped_nor_started_in_its_place(company: Company):
    stop, start = Action("requeue", "1", 0, "n1", ""), Action("pin", "2", 0, "n1", "")
    other, hold = Action("pin", "2", 1, "n10", ""), Action("release", "2", 2, "", "")
    assert requests_of(company, Retries(), stop, start, other, hold) == [stop, start, other, hold]
    company.view.suspicions.doubt = "most are silent"
    assert requests_of(company, Retries(), stop, start, other, hold) == [other, hold]


# ---------------------------------------------------------------- what goes on record
def failure(kind: str = "agent", element: int = 0, restored_at: float | None = None) -> Failure:
    words = dict.fromkeys(("cause", "action", "detected_by", "source", "reason"), "")
    record = records.FailureDetected(kind_of_failure=kind, slots=[element], severity=2, element=element, **words)
    return Failure(1, "1", NOW, record, restored_at=restored_at)


def test_an_intent_goes_on_record_before_it_is_carried_out(company: Company):
    company.slurm.queue["1", 0]["restarts"] = 3
    company.list_slurm()
    out = record_intents(company.view, Run((HOLD, Action("hold", "77", 0, "", ""))))
    assert [(job, number, record.restarts) for job, number, record in out.records] == [("1", 1, 3), ("77", 0, -1)]
    company.view.slurm.seen = None
    ((_, _, record),) = record_intents(company.view, Run((HOLD,))).records
    assert record.restarts == -1


def test_what_is_done_for_an_element_belongs_to_its_failure_while_that_is_open(company: Company):
    job = company.view.state.jobs["1"]
    for changes, action, text in (
        ({}, "pin", "start element 1_0 on n1"),
        ({}, "requeue", "requeue 1_0"),
        ({}, "hold", ""),
        ({"kind": "node"}, "requeue", "requeue 1_0"),
        ({"kind": "rank"}, "requeue", ""),
        ({"element": 1}, "requeue", ""),
        ({"restored_at": NOW}, "requeue", ""),
    ):
        job.failures.clear()
        job.failures.append(failure(**changes))
        out = record_intents(company.view, Run((Action(action, "1", 0, "n1", ""),)))
        said = [record.text for _, _, record in out.records if record.kind == "failure_action"]
        assert said == bool(text) * [text], (changes, action)
    assert len(record_intents(company.view, Run((Action("pin", "77", 0, "n1", ""),))).records) == 1, "an unknown job"


def test_what_slurm_did_or_refused_goes_on_record(company: Company):
    def kinds(action: str, job: str = "1", error: str = "") -> list[tuple[str, int, str]]:
        out = on_outcome(company.view, Retries(), Gate(), Action(action, job, 0, "n10", "why", "text"), error)
        return [(of, number, record.kind) for of, number, record in out.records]

    assert kinds("hold") == [("1", 1, "slurm_done")] and kinds("hold", "77") == [("77", 0, "slurm_done")]
    assert kinds("hold", error="Invalid job id") == [("1", 1, "slurm_error")]
    assert kinds("pin", error="Invalid job id") == [("1", 1, "slurm_error"), ("1", 1, "unpinned")]
    assert kinds("down", error="Access denied")[0] == ("1", 1, "slurm_error") and len(kinds("down", error="no")) > 1
    assert kinds("resume") == [("", 0, "node_resumed")]
    for text, reason in (("text", "text"), ("", "hold 1_0")):
        out = on_outcome(company.view, Retries(), Gate(), Action("hold", "1", 0, "", "why", text), "")
        assert out.records[0][2].reason == reason
    for verified, gate in ((True, {}), (True, {"n10": True}), (False, {"n10": False})):
        out = on_outcome(company.view, Retries(), Gate(verified=gate), Action("resume", "", -1, "n10", ""), "")
        assert out.records[0][2].verified == verified
