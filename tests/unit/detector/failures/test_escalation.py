"""Escalation: the ladder, flapping nodes, shared faults, jobs that fail by their own bug, and what is remembered."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.clock import START
from unicron_detector.failures import fault_history
from unicron_detector.failures.classify import default_classifier
from unicron_detector.failures.escalation import Circumstances, Decision, action_failed, decide
from unicron_detector.failures.escalation_table import TABLE, Event, State
from unicron_detector.failures.fault_history import WHOLE_JOB, Fault, History, Policy, Recent, moments, near
from unicron_detector.failures.severity import Severity

CLASSIFIER = default_classifier()
CAUSES = sorted(CLASSIFIER.table.causes)
DIED = {"uptime": 5.0, "worked": False}  # before it had finished an iteration


def fault(cause: str = "gpu_lost", at: float = START, slot: int = 0, node: str = "n1", job: str = "7", **more) -> Fault:
    verdict = CLASSIFIER.cause(cause)
    return Fault(at, job, slot, node, verdict.cause, verdict.scope, verdict.severity, **more)


class Run:
    """Decides and records as the controller does."""

    kind = Fault

    def __init__(self, **policy) -> None:
        self.history, self.now = History(Policy(**policy)), START

    def fault(
        self, cause, after=60.0, slot=0, node="n1", job="7", uptime=None, worked=True, job_nodes=4, **more
    ) -> Decision:
        self.now += after
        verdict = CLASSIFIER.cause(cause)
        what = verdict.cause, verdict.scope, verdict.severity
        found = self.kind(self.now, job, slot, node, *what, uptime, worked)
        decision = decide(self.history, verdict, found, Circumstances(job_nodes, **more))
        self.history.record(found, decision.state)
        return decision

    def iteration(self, slot=0, job="7") -> None:
        self.history.note_recovery(job, slot, self.now)
        self.history.note_progress(job)


def actions(run: Run, cause: str, times: int, iterates: bool = True, **more) -> list[str]:
    """Return the decisions about a fault that comes so often; iterates: the job finishes an iteration after each."""
    found = []
    for _ in range(times):
        found.append(run.fault(cause, **more).action)
        if iterates:
            run.iteration(more.get("slot", 0))
    return found


# ---------------------------------------------------------------- the ladder
def test_every_state_answers_every_event():
    assert set(TABLE) == set(State)
    for row in TABLE.values():
        assert set(row) == set(Event)


QUICK = {"uptime": 3.0, "worked": False}
LATE = {"uptime": 900.0, "worked": False}


END = ["end_job"]
LADDER = {  # policy, cause, circumstances, whether the job iterates, actions
    "a warning is only reported": ({}, "hardware_warning", {}, True, ["report"]),
    "severity 1": ({}, "ecc_error", {}, True, ["isolate"]),
    "the third moment flaps": ({}, "nccl_timeout", {}, True, ["reattempt", "restart", "isolate"]),
    "severity 2 again": ({}, "cuda_error", {}, True, ["restart", "move"]),
    "a fault after the window": ({"window": 600.0}, "cuda_error", {"after": 601.0}, True, ["restart"] * 2),
    "an error of the program": ({}, "application_error", {"uptime": 900.0}, True, ["restart"] * 6),
    "progress forgives": ({"stuck_faults": 3}, "application_error", {"uptime": 900.0}, True, ["restart"] * 20),
    "no progress": ({"stuck_faults": 5}, "application_error", LATE, False, ["restart"] * 4 + END),
    "storage is waited for": (
        {"storage_patience": 600.0},
        "file_system_error",
        QUICK | {"uptime": 2.0, "after": 100.0},
        False,
        ["restart"] * 7 + END,
    ),
    "a bug, one node": ({}, "application_error", QUICK | {"job_nodes": 1}, False, ["restart"] * 2 + END),
    "a bug, no other node": ({}, "application_error", QUICK | {"stays": True}, False, ["restart"] * 2 + END),
    "quick deaths, and there is another node": (
        {},
        "application_error",
        QUICK | {"uptime": 120.0, "job_nodes": 2},
        False,
        ["restart"] * 2 + ["move"],
    ),
    "deaths that are not quick": (
        {},
        "application_error",
        QUICK | {"uptime": 120.25, "job_nodes": 2},
        False,
        ["restart"] * 3,
    ),
}


@pytest.mark.parametrize(("policy", "cause", "more", "iterates", "expected"), LADDER.values(), ids=LADDER)
def test_actions_that_follow_each_other(policy, cause, more, iterates, expected):
    assert actions(Run(**policy), cause, len(expected), iterates, **more) == expected


def test_a_repeated_fault_says_so_and_another_on_probation_does_not_escalate():
    run = Run()
    assert actions(run, "nccl_timeout", 1) == ["reattempt"] and actions(run, "cuda_error", 1) == ["restart"]
    decision = run.fault("cuda_error")
    assert (decision.action, decision.severity) == ("move", Severity.SEV2) and "came back within" in decision.reason


@pytest.mark.parametrize(
    "cause", ["killed_from_outside", "application_error", "disk_full", "other_software_error", "task_hang", "others"]
)
def test_what_says_nothing_of_the_node_never_blames_it_however_often(cause):
    run = Run()
    assert (
        set(actions(run, cause, 40, after=20.0)) <= {"restart", "move"} and run.history.node_moments("n1", run.now) == 0
    )
    stuck = actions(run, cause, 200, iterates=False, after=20.0, worked=False)
    assert "isolate" not in stuck and "end_job" in stuck


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
        decision = action_failed(run.history, run.now, "7", 0, "no regroup within 30 s")
        run.history.set_state("7", 0, decision.state, run.now)
        seen.append(decision.action)
    assert seen == ["restart", "move"]
    assert "no regroup within 30 s" in decision.reason


def test_a_slot_that_was_moved_and_does_not_come_up_is_started_again_first():
    for moved, state, action in (
        (True, State.ISOLATING, "restart"),
        (False, State.ISOLATING, "move"),
        (True, State.RESTARTING, "move"),
        (False, State.RESTARTING, "move"),
    ):
        run = Run()
        run.history.set_state("7", 0, state, run.now)
        found = action_failed(run.history, run.now, "7", 0, "no agent", moved=moved)
        assert found.action == action, (moved, state)


def test_the_wait_before_a_repetition_doubles_up_to_its_limit():
    run, waits = Run(backoff=1.0, backoff_limit=5.0, window=1e6), []
    for _ in range(5):
        waits.append(run.fault("application_error", after=100.0).wait_seconds)
        run.iteration()
    assert waits == [0.0, 1.0, 2.0, 4.0, 5.0] and Policy().backoff_limit == 60.0


# ---------------------------------------------------------------- jobs that fail by their own bug
def test_quick_deaths_on_two_nodes_end_the_job():
    run, actions = Run(), []
    for _ in range(3):
        actions.append(run.fault("application_error", slot=0, node="n1", **QUICK).action)
        actions.append(run.fault("application_error", slot=1, node="n2", after=0.1, **QUICK).action)
    assert "end_job" in actions and "isolate" not in actions
    assert run.fault("application_error", **QUICK).action == "none"


def test_quick_deaths_on_one_of_several_nodes_are_tried_on_another_then_end_the_job():
    run = Run()
    assert actions(run, "configuration_error", 2, iterates=False, **QUICK) == ["restart"] * 2
    decision = run.fault("configuration_error", node="n1", **QUICK)
    assert decision.action == "move" and "n1 only" in decision.reason
    assert run.fault("configuration_error", node="n2", **QUICK).action == "end_job"


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


def test_the_first_fault_of_storage_begins_its_patience():
    run = Run(storage_patience=0.5)
    assert run.fault("file_system_error", worked=False).action == "restart"
    assert run.fault("file_system_error", after=0.5, worked=False).action == "restart"
    assert run.fault("file_system_error", after=0.25, worked=False).action == "end_job"


def began(run: Run, cause: str, *places: tuple[int, str], job_nodes: int, fresh: bool = True, **more) -> list[Event]:
    """Return the events of ranks that die of one cause at their start, before the job's first iteration."""
    return [
        run.fault(cause, slot=slot, node=node, job_nodes=job_nodes, fresh=fresh, **{**DIED, **more}).event
        for slot, node in places
    ]


def test_a_rank_that_says_at_its_start_that_its_node_is_broken_is_started_again_once():
    """Its own words; where it is said on every node, none of them is to blame."""
    assert began(Run(), "gpu_lost", (0, "n1"), (0, "n1"), job_nodes=2) == [Event.FAULT2, Event.FAULT1]
    assert began(Run(), "gpu_lost", (0, "n1"), (1, "n2"), job_nodes=2) == [Event.FAULT2, Event.AGAIN_SOFTWARE]
    three = began(Run(), "gpu_lost", (0, "n1"), (1, "n2"), (2, "n3"), job_nodes=3)
    assert three == [Event.FAULT2, Event.FAULT2, Event.AGAIN_SOFTWARE]
    assert began(Run(), "gpu_lost", (0, "n1"), job_nodes=1) == [Event.FAULT1], "there is no other to compare with"
    assert began(Run(), "gpu_lost", (0, "n1"), job_nodes=2, fresh=False) == [Event.FAULT1]
    assert began(Run(), "gpu_lost", (0, "n1"), job_nodes=2, apart=True) == [Event.FAULT1]
    assert began(Run(), "gpu_lost", (0, "n1"), job_nodes=2, worked=True) == [Event.FAULT1]
    assert began(Run(), "connection_reset", (0, "n1"), job_nodes=2) == [Event.FAULT3]
    both = began(Run(), "application_error", (0, "n1"), (1, "n2"), job_nodes=2)
    assert both == [Event.FAULT2, Event.FAULT2]


def test_a_script_whose_ranks_die_of_one_cause_wherever_they_start_is_to_blame_whatever_its_words():
    run = Run()
    assert Event.OWN_BUG not in began(run, "gpu_lost", (0, "n1"), (1, "n2"), (0, "n1"), job_nodes=2)
    decision = run.fault("gpu_lost", slot=0, job_nodes=2, fresh=True, **DIED)
    assert decision.event is Event.OWN_BUG and "on all 2 nodes" in decision.reason and "died 3 times" in decision.reason
    others = [("gpu_lost", 0, "n1"), ("gpu_lost", 1, "n2"), ("ecc_error", 0, "n1"), ("nic_error", 0, "n1")]
    run = Run()
    for cause, slot, node in others:
        assert began(run, cause, (slot, node), job_nodes=2)[0] is not Event.OWN_BUG, cause
    run = Run()
    for more in ({}, {"worked": True}, {"uptime": None}, {}):
        assert began(run, "gpu_lost", (0, "n1"), (1, "n2"), job_nodes=2, **more)[0] is not Event.OWN_BUG, more
    where = ((0, "n1"), (1, "n2"), (0, "n1"), (0, "n1"), (0, "n1"))
    for cause in ("gpu_lost", "nccl_timeout"):
        assert Event.OWN_BUG not in began(Run(), cause, *where, job_nodes=2, fresh=False), "it has trained before"
    assert Event.OWN_BUG not in began(Run(), "gpu_lost", *where, job_nodes=2, apart=True)
    assert Event.OWN_BUG not in began(Run(), "gpu_lost", *where, job_nodes=3), "not on every node"


def test_a_job_on_one_node_may_have_a_bad_one_but_no_bad_network():
    assert Event.OWN_BUG not in began(Run(), "gpu_lost", *3 * [(0, "n1")], job_nodes=1)
    run = Run()
    assert Event.OWN_BUG not in began(run, "nccl_timeout", *2 * [(0, "n1")], job_nodes=1)
    decision = run.fault("nccl_timeout", job_nodes=1, fresh=True, **DIED)
    assert decision.event is Event.OWN_BUG and "only node" in decision.reason


# ---------------------------------------------------------------- faults that others explain
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


def test_three_nodes_with_network_faults_at_once_are_the_networks_matter():
    run = Run()
    events = [run.fault("nccl_timeout", after=1.0, slot=slot, node=f"n{slot}").event for slot in range(3)]
    assert events == [Event.FAULT3, Event.FAULT3, Event.SHARED]


def test_what_struck_another_node_of_the_job_at_its_start_too_is_no_nodes_matter():
    here = fault(**DIED)
    for it, other, explained in (
        (here, fault(at=START - 30.0, node="n2", **DIED), True),
        (here, fault(at=START - 30.25, node="n2", **DIED), False),
        (here, fault(node="n1", slot=1, **DIED), False),
        (here, fault("ecc_error", node="n2", **DIED), False),
        (here, fault(node="n2", uptime=5.0, worked=True), False),
        (here, fault(node="n2", worked=False), False),
        (fault(uptime=5.0, worked=True), fault(node="n2", **DIED), False),
        (fault(worked=False), fault(node="n2", **DIED), False),
        (fault("application_error", **DIED), fault("application_error", node="n2", **DIED), False),
        (fault("connection_reset", **DIED), fault("connection_reset", node="n2", **DIED), True),
    ):
        run = Run()
        run.history.recent_of_job["7"] = Recent()
        run.history.recent_of_job["7"].add(other)
        assert bool(run.history.elsewhere(it)) == explained, (it, other)


def test_what_peers_see_is_explained_by_another_slot_of_the_same_job():
    run = Run()
    run.fault("cuda_error", job="bob", slot=1)
    run.fault("cuda_error", slot=0, node="n2", after=1.0)
    assert run.fault("connection_reset", slot=0, after=1.0).event is not Event.SHARED, "it was its own"
    run = Run()
    run.fault("cuda_error", job="bob", slot=1)
    run.fault("connection_reset", after=1.0)
    assert run.history.node_moments("n1", run.now) == 1, "of admins' jobs none explains another's"
    run = Run()
    run.fault("gpu_lost", job="bob", node="n2", **DIED)
    run.fault("gpu_lost", after=1.0, **DIED)
    assert run.history.node_moments("n1", run.now) == 1


def test_a_node_that_flaps_is_left_for_its_own_faults_and_the_reason_says_in_what_time():
    run = Run()
    for slot in range(2):
        assert run.fault("link_flapping", slot=slot, after=3600.0).action == "reattempt"
    assert run.fault("application_error", slot=5, after=3600.0).event is Event.FAULT2
    decision = run.fault("link_flapping", slot=2, after=3600.0)
    assert (decision.event, decision.action, decision.wait_seconds) == (Event.FLAPPING, "isolate", 0.0)
    assert "3 times in 24 h: it flaps" in decision.reason
    assert run.fault("application_error", slot=6, after=3600.0).event is Event.FAULT2, "no other node would cure it"
    run.history.forget_node("n1")
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


def test_all_ranks_that_are_killed_at_once_start_again_in_place_however_often():
    run = Run()  # of a job whose state is in memory

    def killed(slot: int, after: float) -> Decision:
        return run.fault("killed_from_outside", after, slot, f"n{slot}", uptime=90.0, job_nodes=3)

    for _ in range(4):
        for slot in range(3):
            found = killed(slot, after=1.0 if slot else 100.0)
            assert (found.action, found.wait_seconds) == ("restart", 0.0)
        for slot in range(3):
            run.iteration(slot)
    assert killed(0, after=100.0).action == "restart"
    run.iteration()
    assert killed(0, after=100.0).action == "move", "one rank alone, again and again, is tried elsewhere"


def test_a_fault_without_a_culprit_restarts_processes_and_never_costs_a_node():
    run = Run()
    decisions = []
    for _ in range(6):
        decisions.append(run.fault("nccl_timeout", slot=WHOLE_JOB, node=""))
        run.iteration(slot=WHOLE_JOB)
    assert [d.action for d in decisions] == ["reattempt"] + ["restart"] * 5
    assert [int(d.severity) for d in decisions] == [3] + [2] * 5
    assert "no node" in decisions[1].reason and not run.history.by_node
    assert decisions[5].wait_seconds > decisions[1].wait_seconds > 0.0
    assert run.fault("nccl_timeout", after=3600.0, slot=WHOLE_JOB, node="").action == "reattempt", "another window"


def test_a_fault_without_a_culprit_that_comes_during_its_own_action_escalates_too():
    run = Run()
    assert run.fault("nccl_timeout", slot=WHOLE_JOB, node="").action == "reattempt"
    assert run.fault("nccl_timeout", slot=WHOLE_JOB, node="").action == "restart"
    assert run.fault("connection_reset", slot=1, node="n2", after=1.0).action == "reattempt"


# ---------------------------------------------------------------- what is remembered
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
    assert run.history.states == {} and len(run.history.of_node("n1")) == 1
    assert not run.history.node_of_job and not run.history.recent_of_job


def test_of_the_newest_faults_so_many_are_kept_and_not_twice_as_many(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fault_history, "RECENT_KEPT", 4)
    recent, kept = Recent(), []
    for number in range(30):
        recent.add(fault(at=START + number))
        kept.append(len(recent.others))
        assert [one.time for one in recent.others] == [START + n for n in range(number + 1)][-kept[-1] :]
    assert min(kept[4:]) == 4 and max(kept) == 7


def test_faults_at_both_ends_of_a_span_are_near():
    faults = [fault(at=START + after) for after in (0.0, 10.0, 20.0)]
    assert list(near(faults, START + 10.0, 10.0)) == faults
    assert list(near(faults, START + 10.0, 9.75)) == faults[1:2]
    times = ([], [5.0], [0.0, 10.0], [0.0, 10.1], [30.0, 0.0, 15.0], [1.0, 2.0, 3.0], [50.0, 1.0, 2.0, 100.0])
    assert [moments(some, 10.0) for some in times] == [0, 1, 1, 2, 3, 1, 3]


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


class CountedFault(Fault):
    """A fault that counts how often faults are looked at."""

    looks = 0

    def __getattribute__(self, name):
        CountedFault.looks += name in ("time", "slot", "uptime", "scope", "node", "cause")
        return super().__getattribute__(name)


def looks_at_the_last(cause: str, slots: int) -> int:
    """Return how often faults are looked at for the last of many ranks that fail at once, twice."""
    run = Run()
    run.kind = CountedFault
    for _ in range(2):
        run.now += 60.0
        for slot in range(slots):
            CountedFault.looks = 0
            run.fault(cause, after=1e-4, slot=slot, node=f"n{slot // 8}", uptime=20.0, worked=False)
    return CountedFault.looks


@pytest.mark.parametrize(
    "cause", ["killed_from_outside", "nccl_timeout", "application_error", "file_system_error", "cuda_error"]
)
def test_a_fault_costs_the_same_however_many_ranks_fail_at_once(cause):
    assert 0 < looks_at_the_last(cause, 640) <= 1.3 * looks_at_the_last(cause, 80)


# ---------------------------------------------------------------- whatever happens
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
        known = CLASSIFIER.cause(cause)
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
    known = CLASSIFIER.cause(cause)
    actions = [run.fault(cause, after, 0, f"n{i % nodes}", "7", 1.0, False).action for i in range(40)]
    if known.action == "report":
        assert set(actions) == {"report"}
    elif known.scope in ("application", "unknown"):
        assert "end_job" in actions
    elif known.scope in ("hardware",):
        assert "isolate" in actions
