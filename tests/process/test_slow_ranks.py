"""A real rank at a fraction of its speed, under real agents and a controller: it is named, and its node gives its place
to the spare at a boundary."""

from __future__ import annotations

import sys

import pytest

from tests.support.jobs import FOREVER, TINY_PLAIN, World

pytestmark = [pytest.mark.process, pytest.mark.wide, pytest.mark.timeout(600)]
SETTINGS = "allow_inject = true\nhang_floor_seconds = 3.0\nlease_periods = 2.5\ntransition_seconds = 0.5\n"
LEARNED = 100  # iterations


@pytest.fixture
def job(tmp_path):
    settings = {"UNICRON_SPARES": "1", "TINY_ITERATIONS": FOREVER, "TINY_SLOW": "0.01", "TINY_SAVE": "0"}
    with World(tmp_path, 4, SETTINGS, TINY_PLAIN, **settings) as running:
        running.wait(lambda: running.job().get("spares_ready") == 1, "three train and one waits")
        yield running


def test_a_slow_rank_is_named_and_the_spare_takes_its_place_without_a_stop(job):
    members = job.job()["members"]
    (spare,) = {0, 1, 2, 3} - set(members)
    slow = members[1]
    job.wait(lambda: job.trains(members, LEARNED), "its usual times are known")
    assert job.events("degraded", "node_swap") == [], "it was healthy"
    began = job.job()["iteration"]
    job.ask("inject", fault="slow:3", job="7", slot=slow, seconds=120.0)
    left = sorted({*members, spare} - {slow})
    job.trains_on(left)
    named = job.events("degraded")[0]
    assert named["slot"] == slow and named["node"] == f"n{slow}" and named["iteration"] > began
    (swap,) = [event for event in job.events("node_swap") if event["state"] == "planned"]
    assert swap["element"] == slow
    (avoided,) = job.events("avoided")
    assert avoided["node"] == f"n{slow}" and avoided["suspect"] and avoided["id"] > swap["id"]
    assert job.failures() == [] and job.events("break") == [] and job.job()["ledger_violations"] == 0
    kinds = [decision["kind"] for decision in job.ask("explain", job="7")["decisions"]]
    assert "node_swap" in kinds and "avoided" in kinds


LATE = """
import os, time, torch, unicron
unicron.init_process_group("gloo")
slot, model = os.environ["UNICRON_SLOT"], torch.nn.Linear(4, 4)
session = unicron.Session(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), micro_batches=2, train_iterations=12,
    fetch=lambda iteration, index: torch.full((2, 4), 0.1 * index), forward_step=lambda data, model: model(data).sum(),
)
states, report = session._statement, session._reporter.report_step

def late():
    if slot == "1":
        time.sleep(0.1)
    return states()

def tell(phases):
    print(f"slot {slot}: step {phases['step'] < 0.05}, reduce {phases['reduce'] < 0.05}", flush=True)
    report(phases)

session._statement, session._reporter.report_step = late, tell
for _ in session:
    pass
"""


def test_the_wait_in_the_commit_is_no_work_of_the_rank(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(LATE)
    with World(tmp_path, nodes=2, command=[sys.executable, str(script)], UNICRON_MODE="session") as job:
        job.wait(lambda: job.job().get("ended"), "the job is ended", 60)
        logs = job.array.logs
    assert logs.count("slot 0: step True, reduce False") >= 10, logs
    assert logs.count("slot 1: step False, reduce True") >= 10, logs
