"""Escalation and corrupted state with real ranks, agents and a controller: what must end ends, what must not be trained
with is not."""

from __future__ import annotations

import sys

import pytest

from tests.support import proof
from tests.support.jobs import FOREVER, World, undisturbed

pytestmark = pytest.mark.process
LOSSES = 1e-5  # see test_rank_recovery
ITERATIONS = 90


# ---------------------------------------------------------------- corrupted training state
@pytest.fixture
def reference(tmp_path):
    """A run in one process in which nothing fails, begun beside the test."""
    folder = tmp_path / "reference"
    folder.mkdir()
    process = undisturbed(folder, ITERATIONS)
    try:
        yield folder, process
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
def test_state_that_arrives_corrupted_is_never_trained_with(tmp_path, reference):
    settings = {"TINY_ITERATIONS": FOREVER, "TINY_SLOW": "0.06"}
    with World(tmp_path, 3, "allow_inject = true\nhang_floor_seconds = 30.0\n", **settings) as job:
        job.wait(lambda: job.trains([0, 1, 2], 3), "the first iterations", 200)
        sender = job.ask("inject", fault="corrupt-checkpoint", job="7")["slot"]
        assert sender == 0, "it strikes whoever sends next"
        job.ask("inject", fault="rank-kill", job="7", slot=2)
        back = job.wait(
            lambda: next((e for e in job.events("entered") if 2 in e["members"] and e["generation"] > 2), 0),
            "slot 2 is in again",
            200,
        )
        at = job.job()["iteration"]
        job.wait(lambda: job.job()["iteration"] > at + 8, "they train on")
        status = job.job()
        failure = next(f for f in job.failures() if f["kind"] == "transfer")
    assert failure["slots"] == [2] and failure["cause"] == "checkpoint_corrupt" and failure["severity"] == 2
    assert "checkpoint of slot 0) corrupt" in failure["reason"] and "taken again from slot 1" in failure["reason"]
    assert failure["detected_at"] <= back["time"] and status["members"] == [0, 1, 2]
    assert status["ledger_violations"] == 0
    folder, process = reference
    assert process.wait(120) == 0, (folder / "log").read_text()[-2000:]
    wanted, seen = proof.losses(folder), proof.losses(tmp_path)
    shared = sorted(set(wanted) & set(seen))
    assert shared[-1] > at, "iterations after the transfer are compared"
    for iteration in shared:
        values = seen[iteration]
        assert len(values) == 1, f"iteration {iteration}: the members report {values}"
        assert abs(next(iter(values)) - next(iter(wanted[iteration]))) <= LOSSES, iteration


# ---------------------------------------------------------------- a job that fails by its own bug
BUGGY = """
import threading
from unicron_detector.processes.rank_channel import RankChannel
from unicron_detector.processes.rank_messages import Status
planned = threading.Event()
channel = RankChannel.from_environment(lambda message: planned.set() if message.kind == "plan" else None)
channel.install_excepthook()
channel.send(Status("waiting", micro_batches=4, train_iterations=10))
assert planned.wait(60)
raise ValueError("shapes (4, 8) and (3, 8) cannot be multiplied")
"""


def test_a_job_that_fails_by_its_own_bug_on_every_node_is_ended(tmp_path):
    script = tmp_path / "buggy.py"
    script.write_text(BUGGY)
    with World(tmp_path, 2, command=[sys.executable, str(script)], UNICRON_MODE="session") as job:
        ended = job.wait(lambda: job.job().get("ended"), "the job is ended")
        assert job.array.wait() == [1, 1]
        failures = job.failures()
    assert ended["code"] == 1 and "an iteration" in ended["reason"], ended
    assert failures[-1]["action"] == "end_job" and 3 <= len(failures) <= 17, failures
    assert any(failure["cause"] == "application_error" for failure in failures), failures


# ---------------------------------------------------------------- an action that does not come to its end
STUCK = """
import os, time
from unicron_detector.processes.rank_channel import RankChannel
from unicron_detector.processes.rank_messages import Status
channel = RankChannel.from_environment(lambda message: None)
if os.environ["UNICRON_INCARNATION"] == "1" and os.environ["UNICRON_SLOT"] == "1":
    time.sleep(600)  # stuck in its start, as on a file system that does not answer
channel.send(Status("waiting", micro_batches=4, train_iterations=10))
channel.flush(5)
if os.environ["UNICRON_INCARNATION"] == "0" and os.environ["UNICRON_SLOT"] == "1":
    raise SystemExit(3)
time.sleep(600)
"""


def test_a_restart_that_gets_stuck_is_ended_and_the_next_severity_follows(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    limits = "restart_seconds = 3.0\nisolate_seconds = 3.0\n"
    with World(tmp_path, 2, limits, command=[sys.executable, str(script)], UNICRON_MODE="session") as job:
        event = job.wait(lambda: next(iter(job.events("action_failed")), None), "the time limit is over")
        assert event["failed"] == "restart" and event["action"] == "move"
        assert "not done within 3 s: its process (incarnation 1) is not ready" in event["reason"]
        job.wait(lambda: job.rank(1)["incarnation"] == 2 and job.rank(1)["state"] == "waiting", "one more process")
        assert any(f["kind"] == "action" and f["severity"] == 2 for f in job.failures())
