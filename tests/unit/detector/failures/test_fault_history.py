"""What the history of faults keeps, how much memory that takes, and how a saved state has it."""

import tracemalloc

import msgspec

from unicron_detector.failures.escalation_table import State
from unicron_detector.failures.fault_history import FAULTS_KEPT, Fault, History
from unicron_detector.failures.severity import Severity

RANKS, NODES = 8, 200


def fault(slot: int, at: float) -> Fault:
    return Fault(at, "1", slot, f"n{slot // RANKS}", "killed", "unknown", Severity.SEV2)


def test_a_fault_of_all_ranks_takes_little_memory() -> None:
    """Defect: it was kept in two deques for each rank, 1.5 KB."""
    faults, history = [fault(slot, 5.0) for slot in range(RANKS * NODES)], History()
    tracemalloc.start()
    try:
        for one in faults:
            history.record(one, State.RESTARTING)
        taken = tracemalloc.get_traced_memory()[0] / len(faults)
    finally:
        tracemalloc.stop()
    assert taken < 1000, taken


def test_the_last_faults_of_a_slot_and_a_node_are_kept() -> None:
    history = History()
    for at in range(FAULTS_KEPT + 5):
        history.record(fault(3, float(at)), State.RESTARTING)
    for found in (history.of_slot("1", 3), history.of_node("n0"), history.of_node("n0", "1")):
        assert [one.time for one in found] == [float(at) for at in range(5, FAULTS_KEPT + 5)]
    assert history.since_progress["1"].of_slot(3) == history.of_slot("1", 3)
    assert not history.of_slot("1", 4) and not history.of_node("n1") and not history.of_node("n0", "2")


def test_a_saved_state_has_the_last_faults_as_release_0_2_does() -> None:
    """There they are a deque, saved as its bound and its items."""
    history = History()
    history.record(fault(3, 5.0), State.RESTARTING)
    saved = msgspec.to_builtins(history.by_node)["n0"]
    assert saved[0] == FAULTS_KEPT and [one["time"] for one in saved[1]] == [5.0]
