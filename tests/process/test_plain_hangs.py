"""A rank of an unmodified script hangs: found long before any time-out of torch's, named with its stack, and healed."""

from __future__ import annotations

import sys

import pytest

from tests.support.controller import Controller
from tests.support.jobs import HERE, Job
from tests.support.processes import wait_for

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def controller(tmp_path_factory):
    started = Controller(tmp_path_factory.mktemp("controller"))
    yield started
    started.close()


@pytest.mark.parametrize(
    ("how", "words", "frame"),
    [
        ("sleep", "slot 1 ", "in main"),
        # Only torch's flight recorder knows which of them has begun what, within backward.
        pytest.param("backward", "slot 1 has not begun collective", "in backward", marks=pytest.mark.wide),
    ],
)
def test_a_hang_is_found_by_the_job_s_own_time(controller, tmp_path, how, words, frame):
    """Two nodes with two ranks; the time-out of gloo is 30 minutes."""
    out, name = tmp_path / "out", "80" if how == "sleep" else "81"
    out.mkdir()
    settings = {"PLAIN_OUT": str(out), "PLAIN_HANG": how, "UNICRON_RANKS_PER_NODE": "2", "UNICRON_MIN_NODES": "2"}
    command = [sys.executable, str(HERE / "plain_hang.py")]
    job = Job(tmp_path, controller.address, name, 2, command, PLAIN_STEP="0.1", PLAIN_AT="40", **settings)

    def steps() -> list[int]:
        return [int(line.split()[0]) for line in (out / "steps").read_text().splitlines()]

    try:
        wait_for((out / "hung").exists, lambda: job.logs)
        wait_for(lambda: len(steps()) > 45, lambda: f"{steps()}\n{job.logs}")
        (out / "stop").touch()
        assert job.wait() == [0, 0], job.logs
    finally:
        job.close()
    assert steps()[40:42] in ([40, 41], [39, 40]), "from the script's own checkpoint"
    failures = controller.events("failure_detected", job=name)
    assert failures[0]["cause"] == "task_hang" and failures[0]["slots"] == [1] and words in failures[0]["reason"]
    assert "is restarted" not in failures[0]["reason"] and failures[0]["detected_by"] == "statistics"
    stacks = [each for each in controller.events("stacks", job=name) if each["slot"] == 1]
    assert frame in stacks[0]["text"] and "plain_hang.py" in stacks[0]["text"]
    assert len(controller.events("hang", job=name)) == 1
    shown = controller.job(name)
    assert shown["iteration"] >= 45 and 0.1 <= shown["iteration_seconds"] < 5.0
    assert shown["last_failure"]["stepped_at"] is not None
