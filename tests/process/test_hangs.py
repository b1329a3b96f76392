"""Hangs of real ranks under real agents and a real controller: found by the iteration's deadline, named, dumped,
killed, replaced."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.process.real_job import RealJob

pytestmark = pytest.mark.process


@pytest.fixture
def job(tmp_path):
    with RealJob(
        tmp_path,
        nodes=3,
        settings="hang_floor_seconds = 1.0\n",
        TINY_ITERATIONS="100000",
        TINY_SAVE="0",
        TINY_SLOW="0.02",
    ) as running:
        running.wait(lambda: running.job() and running.job()["iteration"] >= 30, "30 iterations")
        yield running


def test_a_stopped_rank_is_named_killed_and_replaced(job):
    victim = job.rank(1)
    where = job.now_in(victim["pid"])
    os.kill(victim["pid"], signal.SIGSTOP)
    began = time.time()
    failure = job.wait(
        lambda: next((f for f in job.status()["failures"] if f["kind"] == "hang"), None), "the hang is found"
    )
    assert failure["slots"] == [1] and failure["cause"] == "task_hang" and failure["severity"] == 2, (failure, where)
    usual = job.job()["iteration_seconds"]
    assert failure["detected_at"] - began <= max(3 * usual, 1.0) * 2 + 0.5
    before = job.job()["iteration"]
    job.wait(
        lambda: job.job()["iteration"] > before + 3 and job.job()["members"] == [0, 1, 2], "it trains with three again"
    )
    assert job.rank(1)["incarnation"] == 1 and not os.path.exists(f"/proc/{victim['pid']}")
    stacks = {event["slot"]: event for event in job.events("stacks")}
    assert stacks[1]["state"].startswith("T (stopped by a signal")
    assert stacks[0]["how"] in ("faulthandler", "py-spy") and "session.py" in stacks[0]["text"], (
        "one that waits shows where"
    )
    assert job.job()["ledger_violations"] == 0
    assert len([f for f in job.status()["failures"] if f["slots"] == [1]]) == 1, "its end is no second failure"
