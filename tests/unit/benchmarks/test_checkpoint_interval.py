"""The overhead of an interval between checkpoints on a trace, as its benchmark counts it."""

from __future__ import annotations

import pytest

from benchmarks.cases.checkpoint_interval import TRACES, JobTrace, job_trace, overhead


def test_saves_and_lost_work_add_up():
    """Saves of 2 s at 98, 198, 298 and so on; a loss at 250 takes 50 s, and the intervals count from there."""
    found = JobTrace(1000.0, [(250.0, True), (600.0, False)])
    lost = overhead(found, 2.0, lambda seconds, losses: 98.0)
    assert lost == pytest.approx((2 * 2 + 50 + 7 * 2) / 1000.0)


def test_what_is_known_so_far_is_what_the_interval_may_depend_on():
    asked = []

    def wait(seconds: float, losses: int) -> float:
        asked.append((seconds, losses))
        return 400.0

    overhead(JobTrace(1000.0, [(500.0, True)]), 1.0, wait)
    assert asked == [(0.0, 0), (401.0, 0), (500.0, 1), (901.0, 1)]


def test_without_copies_every_lost_node_needs_a_file():
    nodes, make = TRACES["trace-a"]
    bare, covered = (job_trace(make(3), copies, 3) for copies in (False, True))
    assert nodes == 16 and len(bare.losses) == len(covered.losses) == 10
    assert all(needed for _, needed in bare.losses)
    assert sum(needed for _, needed in covered.losses) < 5
