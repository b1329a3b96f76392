"""The scale benchmark under a trace: looks of failures, schedule, simulated Slurm, verdict on the controller."""

from __future__ import annotations

import inspect
import re

import pytest

from benchmarks.scale.agents import address_of
from benchmarks.scale.observed import compressed
from benchmarks.scale.slurm import LiveSlurm
from benchmarks.scale.traced import LOOKS, Injected, schedule
from benchmarks.scale.verdict import judge
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.slurm.slurm_client import SlurmClient
from unicron_detector.failures.classify import Classifier
from unicron_detector.failures.fault_history import Policy
from unicron_planner.simulate.causes import CAUSES
from unicron_planner.simulate.generate import LLAMA3_COUNTS, llama3
from unicron_planner.simulate.trace import DAY, TraceEvent, make

RANKS = 8


@pytest.mark.parametrize("cause", sorted(LLAMA3_COUNTS))
def test_the_severity_table_knows_what_a_cause_looks_like(cause):
    look, classifier = LOOKS[cause], Classifier()
    if look.silent:
        assert CAUSES[cause].method == "node_health"
        return
    verdict = classifier.match(look.kernel, "kernel") if look.kernel else classifier.text(look.error)
    assert (verdict.cause, int(verdict.severity)) == (cause, CAUSES[cause].severity)


def test_a_schedule_is_the_trace_so_many_times_as_fast():
    trace = llama3(2048, DAY, seed=1)
    dues = schedule(trace, 1000.0)
    fails = [event for event in trace.events if event.event == "fail"]
    assert [due.at for due in dues] == [pytest.approx(event.seconds / 1000) for event in fails]
    assert [f"n{due.index}" for due in dues] == [event.node for event in fails]
    assert all((due.away > 0) == (due.severity == 1) for due in dues)


def test_a_node_is_away_until_it_joins_again():
    node_failed = CAUSES["node_failed"]
    events = [TraceEvent(10.0, "fail", "n3", node_failed), TraceEvent(50.0, "join", "n3")]
    events += [TraceEvent(70.0, "fail", "n3", node_failed)]
    assert [due.away for due in schedule(make(events, 100.0), 10.0)] == [4.0, 3.0]


def test_only_what_compares_failures_is_shortened():
    usual, fast = Policy(), compressed(Policy(), 1000.0)
    assert fast.window == usual.window / 1000 and fast.shared_seconds == usual.shared_seconds / 1000
    assert (fast.backoff, fast.quick_seconds, fast.moment) == (usual.backoff, usual.quick_seconds, usual.moment)


def test_its_slurm_is_called_as_any_other():
    """Defect: a release got one word more, and from then on the simulated Slurm refused each."""
    calls = {name: call for name, call in vars(SlurmClient).items() if callable(call) and not name.startswith("_")}
    for name, call in calls.items():
        theirs, ours = inspect.signature(call).parameters, inspect.signature(getattr(LiveSlurm, name)).parameters
        assert len(ours) >= len(theirs), name


def test_addresses_are_this_machines_own_and_no_two_alike():
    found = {address_of(index) for index in range(16_384)}
    assert len(found) == 16_384
    assert all(max(map(int, address.split("."))) <= 255 for address in found)


def event(number: int, at: float, record: records.Record) -> Event:
    return Event(number, at, "1", 1, record)


def failure(element: int, slots: list[int], severity: int, action: str, cause: str) -> records.FailureDetected:
    return records.FailureDetected(
        kind_of_failure="rank",
        slots=slots,
        severity=severity,
        cause=cause,
        action=action,
        detected_by="process exit",
        source="agent",
        element=element,
    )


def crash(at: float = 100.0) -> Injected:
    return Injected(at, "other_software_error", 2, [3], [25], "n4", 1)


RESTART = failure(3, [25], 2, "restart", "other_software_error")


def test_a_failure_that_is_found_and_answered_is_right():
    found = judge([crash()], [event(1, 100.2, RESTART), event(2, 100.2, records.RankStart(25, 1, 100.2))], RANKS)
    assert found.wrong == [] and found.detected == [("other_software_error", pytest.approx(0.2))]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (failure(9, [72], 2, "restart", "task_hang"), "did not happen"),
        (records.Break(2, [records.LostProcess(25, "a", 0), records.LostProcess(26, "a", 0)]), r"left out .* \[26\]"),
        (records.RankStart(26, 1, 0.0), "slot 26"),
        (records.SlurmAction("requeue_hold", 3, "n4"), "requeue_hold of element 3"),
        (records.SlurmAction("down", 3, "n4"), "down of n4"),
    ],
)
def test_whoever_else_is_touched_is_reported(record, text):
    wrong = judge([crash()], [event(1, 100.2, RESTART), event(2, 101.0, record)], RANKS).wrong
    assert len(wrong) == 1
    assert re.search(text, wrong[0])


def test_a_failure_that_is_not_found_or_not_answered_rightly_is_reported():
    assert "not found" in judge([crash()], [], RANKS).wrong[0]
    moved = failure(3, [25], 1, "isolate", "gpu_lost")
    assert "SEV1, isolate" in judge([crash()], [event(1, 100.2, moved)], RANKS).wrong[0]
    late = judge([crash()], [event(1, 200.0, RESTART)], RANKS).wrong
    assert "not found" in late[0] and "did not happen" in late[1]


def stopped(at: float, element: int, whole: float = 0.0) -> Injected:
    slots = [element * RANKS, element * RANKS + 1]
    return Injected(at, "other_network_error", 3, [element], slots, f"n{element}", 1, whole=whole)


def test_one_record_is_about_one_failure_only(snapshot):
    first, second = stopped(100.0, 3), stopped(112.0, 9)
    said = failure(9, second.slots, 3, "reattempt", "other_network_error")
    found = judge([first, second], [event(1, 112.1, said)], RANKS)
    assert found.wrong == snapshot and len(found.detected) == 1
    of_all = failure(3, list(range(16 * RANKS)), 3, "reattempt", "other_network_error")
    assert len(judge([first, second], [event(1, 112.1, of_all)], RANKS).wrong) == 1
    both = [event(1, 100.1, of_all), event(2, 112.1, of_all)]
    assert judge([first, second], both, RANKS).wrong == []


def test_two_failures_of_one_rank_need_two_records():
    again = [crash(100.0), crash(110.0)]
    assert len(judge(again, [event(1, 100.2, RESTART)], RANKS).wrong) == 1
    assert judge(again, [event(1, 100.2, RESTART), event(2, 110.2, RESTART)], RANKS).wrong == []


def test_a_failure_does_not_excuse_a_graver_one_of_its_element():
    graver = failure(3, [25], 1, "isolate", "gpu_lost")
    wrong = judge([crash()], [event(1, 100.2, RESTART), event(2, 101.0, graver)], RANKS).wrong
    assert len(wrong) == 1 and "did not happen: gpu_lost" in wrong[0]


@pytest.mark.parametrize(("at", "right"), [(100.5, True), (9000.0, False)])
def test_what_follows_a_failure_does_so_before_all_train_again(at, right):
    one = Injected(100.0, "gpu_lost", 1, [3], [25], "n4", 1, whole=104.0)
    isolated = failure(3, [25], 1, "isolate", "gpu_lost")
    for what in (RESTART, records.RankStart(25, 1, at), records.SlurmAction("requeue", 3, "n4")):
        wrong = judge([one], [event(1, 100.1, isolated), event(2, at, what)], RANKS).wrong
        assert (wrong == []) is right, what


def test_the_last_verdict_counts():
    first = failure(3, [25], 2, "restart", "cuda_error")
    lost = Injected(100.0, "gpu_lost", 1, [3], [25], "n4", 1)
    later = records.FailureVerdict(failure=1, severity=1, cause="gpu_lost", action="isolate")
    assert judge([lost], [event(1, 100.2, first), event(2, 101.0, later)], RANKS).wrong == []
