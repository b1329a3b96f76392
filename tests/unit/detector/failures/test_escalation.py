"""Escalation: the table's completeness, the ladder, flapping nodes, shared faults, jobs that fail by their own bug."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.clock import START
from unicron_detector.failures import escalation
from unicron_detector.failures.classify import default_classifier
from unicron_detector.failures.escalation import action_failed, apply_failed, as_fault, decide
from unicron_detector.failures.escalation_table import TABLE, Event, State
from unicron_detector.failures.fault_history import WHOLE_JOB, Fault, History, Policy, moments
from unicron_detector.failures.severity import Severity

CLASSIFIER = default_classifier()


def verdict(cause):
    return CLASSIFIER.cause(cause)


class Run:
    """Drives decide and record as the controller does."""

    def __init__(self, **policy):
        self.history = History(Policy(**policy))
        self.now = START

    def fault(self, cause, after=60.0, slot=0, node="n1", job="7", uptime=None, worked=True, job_nodes=4, **more):
        self.now += after
        where = {"job": job, "slot": slot, "node": node, "uptime": uptime, "worked": worked}
        decision = decide(self.history, verdict(cause), self.now, job_nodes=job_nodes, **where, **more)
        self.history.record(as_fault(verdict(cause), self.now, **where), decision)
        return decision

    def iteration(self, slot=0, job="7"):
        self.history.recovered(job, slot, self.now)
        self.history.progressed(job)


def test_every_state_answers_every_event():
    assert set(TABLE) == set(State)
    for row in TABLE.values():
        assert set(row) == set(Event)


def test_first_action_follows_the_severity():
    assert Run().fault("nccl_timeout").action == "reattempt"
    assert Run().fault("cuda_error").action == "restart"
    assert Run().fault("ecc_error").action == "isolate"
    assert Run().fault("hardware_warning").action == "report"


def test_the_same_fault_climbs_the_ladder():
    run = Run()
    actions = []
    for _ in range(3):
        actions.append(run.fault("nccl_timeout", node="n1").action)
        run.iteration()
    assert actions == ["reattempt", "restart", "isolate"], "the third moment: it flaps"


def test_a_fault_after_the_window_starts_anew():
    run = Run(window=600.0)
    assert run.fault("cuda_error").action == "restart"
    run.iteration()
    decision = run.fault("cuda_error", after=601.0)
    assert (decision.action, decision.event) == ("restart", Event.FAULT2)


def test_the_same_fault_within_the_window_says_so():
    run = Run()
    run.fault("cuda_error")
    run.iteration()
    decision = run.fault("cuda_error")
    assert decision.action == "move" and decision.severity is Severity.SEV2
    assert "came back within" in decision.reason


@pytest.mark.parametrize(
    "cause", ["killed_from_outside", "application_error", "disk_full", "other_software_error", "task_hang", "others"]
)
def test_what_says_nothing_of_the_node_never_blames_it_however_often(cause):
    run = Run()
    actions = []
    for _ in range(40):
        actions.append(run.fault(cause, after=20.0).action)
        run.iteration()
    assert set(actions) <= {"restart", "move"} and run.history.node_moments("n1", run.now) == 0
    stuck = [run.fault(cause, after=20.0, worked=False).action for _ in range(200)]
    assert "isolate" not in stuck and "end_job" in stuck


def test_another_fault_on_probation_does_not_escalate():
    run = Run()
    run.fault("nccl_timeout")
    run.iteration()
    assert run.fault("cuda_error").action == "restart"


def test_a_fault_during_the_action_means_it_failed():
    run = Run()
    run.fault("nccl_timeout")
    decision = run.fault("connection_reset", after=5.0)
    assert decision.event is Event.FAILED and decision.action == "restart"


def test_an_action_that_timed_out_escalates_step_by_step():
    run = Run()
    run.fault("connection_reset")
    seen = []
    for _ in range(2):
        decision = action_failed(run.history, run.now, job="7", slot=0, why="no regroup within 30 s")
        apply_failed(run.history, decision, run.now, job="7", slot=0)
        seen.append(decision.action)
    assert seen == ["restart", "move"]
    assert "no regroup within 30 s" in decision.reason


def test_an_application_error_never_costs_a_node():
    run = Run()
    for _ in range(6):
        assert run.fault("application_error", uptime=900.0).action == "restart"
        run.iteration()


def test_repeated_faults_back_off():
    run = Run()
    waits = []
    for _ in range(10):
        waits.append(run.fault("application_error", uptime=900.0).wait_seconds)
        run.iteration()
    assert waits[:4] == [0.0, 1.0, 2.0, 4.0]
    assert max(waits) == 60.0


def test_quick_deaths_on_two_nodes_end_the_job():
    run = Run()
    quick = {"uptime": 3.0, "worked": False}
    actions = []
    for _ in range(3):
        actions.append(run.fault("application_error", slot=0, node="n1", **quick).action)
        last = run.fault("application_error", slot=1, node="n2", after=0.1, **quick)
        actions.append(last.action)
    assert "end_job" in actions and "isolate" not in actions
    assert run.fault("application_error", **quick).action == "none"


def test_quick_deaths_on_one_of_several_nodes_are_tried_on_another_then_end_the_job():
    run = Run()
    quick = {"uptime": 3.0, "worked": False}
    for _ in range(2):
        assert run.fault("configuration_error", node="n1", **quick).action == "restart"
    decision = run.fault("configuration_error", node="n1", **quick)
    assert decision.action == "move" and "n1 only" in decision.reason
    decision = run.fault("configuration_error", node="n2", **quick)
    assert decision.action == "end_job"


@pytest.mark.parametrize("where", [{"job_nodes": 1}, {"job_nodes": 4, "stays": True}])
def test_a_job_with_a_bug_and_no_other_node_costs_no_node(where):
    run = Run()
    quick = {"uptime": 3.0, "worked": False, **where}
    assert [run.fault("application_error", **quick).action for _ in range(3)] == ["restart", "restart", "end_job"]


def test_late_deaths_without_progress_end_the_job_in_the_end():
    run = Run(stuck_faults=5)
    actions = [run.fault("application_error", uptime=900.0, worked=False).action for _ in range(5)]
    assert actions == ["restart"] * 4 + ["end_job"]


def test_progress_forgives():
    run = Run(stuck_faults=3)
    for _ in range(20):
        assert run.fault("application_error", uptime=900.0).action == "restart"
        run.iteration()


def test_one_burst_of_all_ranks_is_not_many_faults():
    run = Run(stuck_faults=4)
    for slot in range(64):
        decision = run.fault("application_error", after=0.01, slot=slot, node=f"n{slot // 8}", uptime=900.0)
        assert decision.action == "restart"


@pytest.mark.parametrize("cause", ["lost_connection", "ecc_error", "connection_reset", "link_flapping"])
def test_hardware_and_network_never_end_a_job(cause):
    run = Run()
    for step in range(30):
        decision = run.fault(cause, node=f"n{step % 3}", uptime=1.0, worked=False, after=5.0)
        assert decision.action != "end_job"


def test_storage_is_waited_for_and_then_ends_the_job():
    run = Run(storage_patience=600.0)
    actions = [run.fault("file_system_error", uptime=2.0, worked=False, after=100.0).action for _ in range(8)]
    assert actions[:7] == ["restart"] * 7
    assert actions[7] == "end_job"


def test_what_peers_see_of_a_dead_rank_is_not_held_against_them():
    run = Run()
    for _ in range(5):
        run.fault("exited_abnormally", slot=0, node="n1", after=4000.0)
        decision = run.fault("connection_reset", slot=1, node="n2", after=0.01)
        assert decision.action == "reattempt" and "slot 0" in decision.reason
        run.iteration(0)
        run.iteration(1)


def test_many_nodes_with_network_faults_at_once_acquit_each():
    run = Run()
    for _ in range(4):
        for slot in range(8):
            decision = run.fault("other_network_error", after=0.1, slot=slot, node=f"n{slot}")
        assert decision.action == "reattempt" and "no single node" in decision.reason
        for slot in range(8):
            run.iteration(slot)
        run.now += 300.0


def test_a_flapping_node_is_left_by_the_job_that_sees_it():
    run = Run()
    assert run.fault("link_flapping", slot=0, after=3600.0).action == "reattempt"
    assert run.fault("link_flapping", slot=1, after=3600.0).action == "reattempt"
    decision = run.fault("link_flapping", slot=2, after=3600.0)
    assert decision.action == "isolate" and "flaps" in decision.reason
    run.history.readmitted("n1")
    assert run.fault("link_flapping", slot=3, after=3600.0).action == "reattempt"


def test_what_other_jobs_say_of_a_node_moves_no_job_and_admins_see_it():
    """Defect: three times the same printed line of one user took the node from the next user's job."""
    run = Run()
    for _ in range(3):
        run.fault("link_flapping", job="bob", node="n1", after=1000.0)
        run.iteration(job="bob")
    decision = run.fault("connection_reset", job="ann", node="n1", after=1000.0)
    assert (decision.action, decision.event) == ("reattempt", Event.FAULT3)
    assert run.history.node_moments("n1", run.now) >= 3


def test_other_jobs_do_not_explain_a_jobs_fault():
    run = Run()
    for node in ("n2", "n3", "n4"):
        run.fault("connection_reset", job="bob", node=node, after=1.0)
    assert run.fault("connection_reset", job="ann", node="n1", after=1.0).event is Event.FAULT3


def test_only_slots_with_a_running_action_are_gone_through_at_each_iteration():
    """Defect: once all 16,384 ranks of a job had failed, each of its iterations went through all of them for ever."""
    run = Run()
    for slot in range(4):
        run.fault("cuda_error", slot=slot, node=f"n{slot}", after=1.0)
    assert run.history.acting("7") == [0, 1, 2, 3]
    for slot in range(3):
        run.iteration(slot)
    assert run.history.acting("7") == [3] and run.history.state("7", 0, run.now) is State.RESTARTED
    assert History(run.history.policy, states=run.history.states).acting("7") == [3], "as read from a snapshot"
    run.history.forget_job("7")
    assert run.history.acting("7") == []


def test_forgetting_a_job_keeps_what_is_known_of_nodes():
    run = Run()
    run.fault("link_flapping", job="1", node="n1")
    run.history.forget_job("1")
    assert run.history.states == {} and len(run.history.by_node["n1"]) == 1
    assert not run.history.node_of_job and not run.history.recent_of_job


class Read(Fault):
    """A fault that counts how often faults are looked at."""

    looks = 0

    def __getattribute__(self, name):
        Read.looks += name in ("time", "slot", "uptime", "scope", "node", "cause")
        return super().__getattribute__(name)


def looks_at_the_last(cause, slots, storms=2):
    """How much the last of many ranks costs that fail at once, twice."""
    run = Run()
    for _ in range(storms):
        run.now += 60.0
        for slot in range(slots):
            Read.looks = 0
            run.fault(cause, after=1e-4, slot=slot, node=f"n{slot // 8}", uptime=20.0, worked=False)
    return Read.looks


CAUSES = ["killed_from_outside", "nccl_timeout", "application_error", "file_system_error", "cuda_error"]


@pytest.mark.parametrize("cause", CAUSES)
def test_a_fault_costs_the_same_however_many_ranks_fail_at_once(monkeypatch, cause):
    monkeypatch.setattr(escalation, "Fault", Read)
    assert 0 < looks_at_the_last(cause, 640) <= 1.3 * looks_at_the_last(cause, 80)


def test_moments_are_groups_in_time():
    assert moments([], 10.0) == 0
    assert moments([1.0, 2.0, 3.0], 10.0) == 1
    assert moments([50.0, 1.0, 2.0, 100.0], 10.0) == 3


CAUSES = sorted(default_classifier().table.causes)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(CAUSES),
        st.floats(0.0, 4000.0),
        st.integers(0, 3),
        st.integers(0, 3),
        st.booleans(),
        st.one_of(st.none(), st.floats(0.0, 500.0)),
        st.booleans(),
    ),
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(STEPS)
def test_any_history_gets_a_reasoned_decision(steps):
    run = Run()
    for cause, after, slot, node, worked, uptime, iterates in steps:
        known = verdict(cause)
        decision = run.fault(cause, after, slot, f"n{node}", "7", uptime, worked)
        assert decision.reason and 0.0 <= decision.wait_seconds <= 60.0
        assert decision.action in {"none", "report", "reattempt", "restart", "move", "isolate", "end_job"}
        if known.severity is Severity.SEV1 and decision.action != "none":
            assert decision.action == "isolate"
        if known.action == "report":
            assert decision.action == "report"
        if decision.action == "isolate":
            assert known.scope in ("hardware", "network")
        if decision.action == "end_job":
            assert known.scope in ("application", "unknown", "storage")
        if iterates:
            run.iteration(slot)


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_replaying_the_same_events_gives_the_same_decisions(steps):
    def play():
        run = Run()
        return [run.fault(c, a, s, f"n{n}", "7", u, w) for c, a, s, n, w, u, _ in steps]

    assert play() == play()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CAUSES), st.integers(1, 3), st.floats(0.0, 30.0))
def test_healing_never_goes_on_for_ever_without_progress(cause, nodes, after):
    """A fault that comes back at once, whatever is done, ends with the job ended, a node left, or a wait."""
    run = Run()
    known = verdict(cause)
    actions = [run.fault(cause, after, 0, f"n{i % nodes}", "7", 1.0, False).action for i in range(40)]
    if known.action == "report":
        assert set(actions) == {"report"}
    elif known.scope in ("application", "unknown"):
        assert "end_job" in actions
    elif known.scope in ("hardware",):
        assert "isolate" in actions


def test_a_fault_without_a_culprit_restarts_processes_and_never_costs_a_node():
    run = Run()
    decisions = []
    for _ in range(6):
        decisions.append(run.fault("nccl_timeout", slot=WHOLE_JOB, node=""))
        run.iteration(slot=WHOLE_JOB)
    assert [d.action for d in decisions] == ["reattempt"] + ["restart"] * 5
    assert [int(d.severity) for d in decisions] == [3] + [2] * 5
    assert "no node can be named" in decisions[1].reason and not run.history.by_node
    assert decisions[5].wait_seconds > decisions[1].wait_seconds > 0.0
    assert run.fault("nccl_timeout", after=3600.0, slot=WHOLE_JOB, node="").action == "reattempt", "another window"


def test_a_fault_without_a_culprit_that_comes_during_its_own_action_escalates_too():
    run = Run()
    assert run.fault("nccl_timeout", slot=WHOLE_JOB, node="").action == "reattempt"
    assert run.fault("nccl_timeout", slot=WHOLE_JOB, node="").action == "restart"
    assert run.fault("connection_reset", slot=1, node="n2", after=1.0).action == "reattempt"


def test_all_ranks_that_are_killed_at_once_start_again_in_place_however_often():
    """Where their state is in memory."""
    history = History()
    for moment in (0.0, 100.0, 300.0, 600.0):
        for slot in range(3):
            where = {"job": "1", "slot": slot, "node": f"n{slot}", "uptime": 90.0}
            found = decide(history, verdict("killed_from_outside"), moment + slot, job_nodes=3, **where)
            assert (found.action, found.wait_seconds) == ("restart", 0.0)
            history.record(as_fault(verdict("killed_from_outside"), moment + slot, **where), found)
        history.progressed("1")
        for slot in range(3):
            history.recovered("1", slot, moment + 10)
    alone = decide(history, verdict("killed_from_outside"), 700.0, job="1", slot=0, node="n0", uptime=90.0, job_nodes=3)
    assert alone.action == "restart"
    history.record(as_fault(verdict("killed_from_outside"), 700.0, job="1", slot=0, node="n0", uptime=90.0), alone)
    history.recovered("1", 0, 710.0)
    again = decide(history, verdict("killed_from_outside"), 800.0, job="1", slot=0, node="n0", uptime=90.0, job_nodes=3)
    assert again.action == "move", "one rank alone, again and again, is tried elsewhere"


def test_both_ends_of_the_windows_count():
    """A fault just as old as a window is within it, and one a second older is not."""
    run = Run(window=600.0, flap_window=3600.0)
    run.fault("cuda_error")
    history, at = run.history, run.now
    state = history.state("7", 0, at + 600.0)
    assert state is not State.HEALTHY
    assert history.same_cause("7", 0, "cuda_error", at + 600.0) == 1
    assert history.same_cause("7", 0, "cuda_error", at + 601.0) == 0
    assert history.same_cause("7", 0, "ecc_error", at) == history.same_cause("7", 1, "cuda_error", at) == 0
    run.fault("ecc_error", slot=1)
    at = run.now
    assert history.node_moments("n1", at + 3600.0) == 1 and history.node_moments("n1", at + 3601.0) == 0
    run.iteration(slot=1)
    probation = history.state("7", 1, at + 600.0)
    assert history.state("7", 1, at + 601.0) is TABLE[probation][Event.QUIET][0]


def test_moments_lie_further_apart_than_the_limit():
    assert [moments(times, 10.0) for times in ([], [5.0], [0.0, 10.0], [0.0, 10.1], [30.0, 0.0, 15.0])] == [
        0,
        1,
        1,
        2,
        3,
    ]


def test_an_action_runs_until_the_slot_has_recovered():
    run = Run()
    run.fault("nccl_timeout", slot=3)
    run.fault("nccl_timeout", slot=1, node="n2")
    assert run.history.acting("7") == [1, 3] and run.history.acting("8") == []
    run.iteration(slot=3)
    assert run.history.acting("7") == [1]
    run.history.forget_job("7")
    assert run.history.acting("7") == [] and run.history.state("7", 1, run.now) is State.HEALTHY


def test_the_wait_doubles_up_to_its_limit():
    run = Run(backoff=1.0, backoff_limit=5.0, window=1e6)
    waits = []
    for _ in range(5):
        waits.append(run.fault("application_error", after=100.0).wait_seconds)
        run.iteration()
    assert waits == [0.0, 1.0, 2.0, 4.0, 5.0]
