"""Escalation at its bounds: what is remembered, what other faults explain, and jobs whose ranks never begin."""

from __future__ import annotations

import pytest

from tests.support.clock import START
from tests.unit.detector.failures.test_escalation import Run, verdict
from unicron_detector.failures import fault_history
from unicron_detector.failures.escalation import action_failed, as_fault
from unicron_detector.failures.escalation_table import Event, State
from unicron_detector.failures.fault_history import Fault, Recent, moments, near

DIED = {"uptime": 5.0, "worked": False}  # before it had finished an iteration


def fault(cause: str = "gpu_lost", at: float = START, slot: int = 0, node: str = "n1", job: str = "7", **more) -> Fault:
    return as_fault(verdict(cause), at, job=job, slot=slot, node=node, **more)


# ---------------------------------------------------------------- what is remembered
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
    assert moments([START, START + 10.0], 10.0) == 1 and moments([START, START + 10.25], 10.0) == 2


def test_probation_lasts_to_the_end_of_the_window():
    run = Run(window=600.0)
    run.fault("cuda_error")
    run.iteration()
    assert run.history.state("7", 0, run.now + 600.0) is State.RESTARTED
    assert run.history.state("7", 0, run.now + 600.25) is State.HEALTHY


def test_a_node_that_flaps_is_left_for_its_own_faults_and_the_reason_says_in_what_time():
    run = Run()
    for slot in range(2):
        run.fault("link_flapping", slot=slot, after=3600.0)
    assert run.fault("application_error", slot=5, after=3600.0).event is Event.FAULT2
    decision = run.fault("link_flapping", slot=2, after=3600.0)
    assert (decision.event, decision.wait_seconds) == (Event.FLAPPING, 0.0)
    assert "has failed 3 times in 24 h" in decision.reason
    assert run.fault("application_error", slot=6, after=3600.0).event is Event.FAULT2, "no other node would cure it"


def test_a_slot_that_was_moved_and_does_not_come_up_is_started_again_first():
    for moved, state, action in (
        (True, State.ISOLATING, "restart"),
        (False, State.ISOLATING, "move"),
        (True, State.RESTARTING, "move"),
        (False, State.RESTARTING, "move"),
    ):
        run = Run()
        run.history.set("7", 0, state, run.now)
        found = action_failed(run.history, run.now, job="7", slot=0, why="no agent", moved=moved)
        assert found.action == action, (moved, state)


# ---------------------------------------------------------------- what other faults explain
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


def test_three_nodes_with_network_faults_at_once_are_the_networks_matter():
    run = Run()
    events = [run.fault("nccl_timeout", after=1.0, slot=slot, node=f"n{slot}").event for slot in range(3)]
    assert events == [Event.FAULT3, Event.FAULT3, Event.SHARED]


# ---------------------------------------------------------------- jobs whose ranks never begin
def began(run: Run, cause: str, *places: tuple[int, str], job_nodes: int, fresh: bool = True, **more) -> list[Event]:
    """What ranks are that die of one cause at their start, before the job's first iteration."""
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
    assert decision.event is Event.OWN_BUG and "on the job's only node" in decision.reason


def test_deaths_as_late_as_the_limit_are_quick_and_a_job_on_two_nodes_tries_the_other():
    quick = {"uptime": 120.0, "worked": False, "job_nodes": 2}
    run = Run()
    actions = [run.fault("application_error", **quick).action for _ in range(3)]
    assert actions == ["restart", "restart", "move"]
    run = Run()
    assert [run.fault("application_error", **{**quick, "uptime": 120.25}).action for _ in range(3)] == 3 * ["restart"]


def test_the_first_fault_of_storage_begins_its_patience():
    run = Run(storage_patience=0.5)
    assert run.fault("file_system_error", worked=False).action == "restart"
    assert run.fault("file_system_error", after=0.5, worked=False).action == "restart"
    assert run.fault("file_system_error", after=0.25, worked=False).action == "end_job"
