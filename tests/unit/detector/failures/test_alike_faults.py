"""Ranks of a node that fail at once in the same way get one decision; it must be the one that each would get."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from unicron_detector.failures import escalation
from unicron_detector.failures.escalation import Circumstances, Decision
from unicron_detector.failures.fault_history import Fault, History
from unicron_detector.failures.severity import Severity, Verdict

RANKS = 4  # of a node
KINDS = (
    Verdict("segfault", Severity.SEV2, "restart", "a segfault", "signal-segv", "application"),
    Verdict("ecc", Severity.SEV1, "isolate", "an Xid", "xid-48", "hardware"),
    Verdict("other_network_error", Severity.SEV3, "reattempt", "a peer was lost", "network", "network"),
    Verdict("nccl_timeout", Severity.SEV2, "restart", "a time-out", "nccl", "network"),
    Verdict("exited_abnormally", Severity.SEV2, "restart", "killed", "signal-9", "unknown"),
    Verdict("disk", Severity.SEV2, "restart", "a disk", "io", "storage"),
)
CASES = st.tuples(
    st.sampled_from([0.0, 0.0, 0.0, 1.0, 40.0, 4000.0]),  # seconds since the one before
    st.sampled_from(["1", "1", "1", "2"]),
    st.integers(0, 4 * RANKS - 1),
    st.sampled_from(KINDS),
    st.sampled_from([None, 1.0, 1.5, 500.0]),  # uptime
    st.booleans(),
    st.builds(Circumstances, st.sampled_from([1, 2, 4]), st.booleans(), st.booleans(), st.booleans()),
    st.sampled_from(["", "", "", "", "progress", "repair"]),
)


def decide(history: History, case: tuple[object, ...], now: float) -> Decision:
    _, job, slot, verdict, uptime, worked, around, _ = case
    assert isinstance(slot, int) and isinstance(verdict, Verdict) and isinstance(around, Circumstances)
    what = verdict.cause, verdict.scope, verdict.severity
    fault = Fault(now, str(job), slot, f"n{slot // RANKS}", *what, uptime, worked)  # type: ignore[arg-type]
    decision = escalation.decide(history, verdict, fault, around)
    history.record(fault, decision.state)
    return decision


@given(st.lists(CASES, max_size=40))
def test_a_shared_decision_is_the_one_that_the_rank_would_get(cases: list[tuple[object, ...]]) -> None:
    shared, alone, now = History(), History(), 1e9
    for case in cases:
        now += float(case[0])  # type: ignore[arg-type]
        alone.decided = None
        assert decide(shared, case, now) == decide(alone, case, now)
        for history in (shared, alone):
            if case[-1] == "progress":
                history.note_progress(str(case[1]))
            elif case[-1] == "repair":
                history.forget_node("n1")
    assert shared == alone


def test_the_ranks_of_a_killed_node_are_decided_on_once() -> None:
    history, killed = History(), KINDS[4]
    case = (0.0, "1", 0, killed, 500.0, True, Circumstances(4), "")
    first = decide(history, case, 1e9)
    assert decide(history, (*case[:2], 1, killed, 500.5, *case[5:]), 1e9) is first
    assert decide(history, (*case[:2], RANKS, killed, 500.0, *case[5:]), 1e9) is not first, "it is on another node"
    assert decide(history, case, 1e9) != first, "it fails again"
    assert copy.deepcopy(history) == history
