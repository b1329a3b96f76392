"""Hangs of real ranks under real agents and a real controller: found by the iteration's deadline, named, dumped,
killed, replaced."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.jobs import FOREVER, TINY_PLAIN, World

pytestmark = pytest.mark.process


@pytest.fixture
def job(tmp_path):
    with World(
        tmp_path,
        nodes=3,
        settings="hang_floor_seconds = 1.0\n",
        command=TINY_PLAIN,
        TINY_ITERATIONS=FOREVER,
        TINY_SLOW="0.02",
    ) as running:
        running.wait(lambda: running.trains([0, 1, 2], 30), "30 iterations")
        yield running


def test_a_stopped_rank_is_named_killed_and_replaced(job):
    victim = job.rank(1)
    where = Path(f"/proc/{victim['pid']}/wchan").read_text()
    usual = job.wait(lambda: job.job()["iteration_seconds"], "its iterations are timed")
    os.kill(victim["pid"], signal.SIGSTOP)
    began = time.time()
    failure = job.wait(lambda: next((f for f in job.failures() if f["kind"] == "hang"), None), "the hang is found")
    assert failure["slots"] == [1] and failure["cause"] == "task_hang" and failure["severity"] == 2, (failure, where)
    assert failure["detected_at"] - began <= max(3 * usual, 1.0) * 2 + 0.5
    job.trains_on([0, 1, 2])
    assert job.rank(1)["incarnation"] == 1 and not os.path.exists(f"/proc/{victim['pid']}")
    stacks = {event["slot"]: event for event in job.events("stacks")}
    assert stacks[1]["state"].startswith("T (stopped by a signal")
    assert stacks[0]["how"] in ("faulthandler", "py-spy") and "session.py" in stacks[0]["text"], (
        "one that waits shows where"
    )
    assert job.job()["ledger_violations"] == 0
    assert len([f for f in job.failures() if f["slots"] == [1]]) == 1, "its end is no second failure"


SHARDED = """
import os, sys, time, torch, unicron
from torch.distributed.fsdp import fully_shard
unicron.init_process_group("gloo", layout=unicron.Layout(shard=2))
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
slot = os.environ["UNICRON_SLOT"]
for module in (model[0], model[2], model):
    fully_shard(module, mesh=unicron.shard_mesh())

def forward_step(micro_batch, model):
    iteration, data = micro_batch
    if slot == "1" and iteration == 20 and not os.path.exists(sys.argv[1]):
        open(sys.argv[1], "w").close()
        time.sleep(600)
    return torch.nn.functional.mse_loss(model(data), data[:, :2].sin())

for _ in unicron.Session(
    model=model, optimizer=torch.optim.AdamW(model.parameters()), micro_batches=8, forward_step=forward_step,
    fetch=lambda iteration, index: (iteration, torch.full((8, 8), 0.1 * index)), train_iterations=30,
):
    pass
"""


def test_a_rank_of_a_replica_that_comes_to_no_collective_is_named_alone(tmp_path):
    """The other rank of its replica is as far by its own word, and waits for the shards of the first layer."""
    script = tmp_path / "train.py"
    script.write_text(SHARDED)
    command = [sys.executable, str(script), str(tmp_path / "hung")]
    with World(tmp_path, nodes=4, command=command, UNICRON_MODE="session") as job:
        job.wait(lambda: job.job().get("ended"), "the job is ended", 90)
        assert job.job()["ended"]["code"] == 0, job.array.logs
        (failure,) = (each for each in job.failures() if each["kind"] == "hang")
        (hang,) = job.events("hang")
    assert failure["slots"] == [1], hang
    assert "slot 1 has not begun collective" in hang["reason"] and "gloo:all_" in hang["reason"], hang


def faults(*wanted: dict) -> str:
    return json.dumps([{"incarnation": 0, **fault} for fault in wanted])


@pytest.mark.long
def test_hangs_before_the_job_is_known_and_between_two_iterations(tmp_path):
    """One job, one after the other: a rank stopped in its third iteration, one stopped between two iterations, and one
    that sleeps there for ever. And no node or rank is odd among its peers meanwhile: all are on this machine."""
    wanted = faults(
        {"slot": 2, "iteration": 2, "at": "fetch", "kind": "hang"},
        {"slot": 1, "iteration": "any", "at": "outside", "kind": "hang", "file": "strike.1"},
        {"slot": 0, "iteration": "any", "at": "outside", "kind": "sleep", "delay": 1000, "file": "strike.0"},
    )
    settings = "hang_floor_seconds = 1.0\nhang_idle_seconds = 6.0\nmetrics_seconds = 1.0\n"
    with World(tmp_path, 3, settings, TINY_ITERATIONS=FOREVER, TINY_SLOW="0.02", TINY_FAULT=wanted) as job:

        def hung(slot: int) -> dict:
            return next((f for f in job.failures() if f["slots"] == [slot] and f["kind"] == "hang"), {})

        for slot, word in (
            (2, "its process is stopped by a signal"),
            (1, "its process is stopped by a signal"),
            (0, "it does nothing there, and no rank was outside for more than"),
        ):
            (tmp_path / f"strike.{slot}").touch()
            found = job.wait(lambda slot=slot: hung(slot), f"the hang of slot {slot}")
            (struck,) = tmp_path.glob(f"fault.{slot}.0.*")
            assert word in found["reason"] and found["severity"] == 2, found
            assert found["detected_at"] - float(struck.read_text()) < 45, "far from the 600 s of a checkpoint"
            job.trains_on([0, 1, 2], 16)
        assert len(job.events("failure_detected")) == 3 and job.job()["ledger_violations"] == 0
        measured = {node["node"]: node["metrics"] for node in job.ask("nodes")}
        assert all(values["memory_used"] > 0 and values["file_latency"] > 0 for values in measured.values()), measured
        assert not job.events("anomaly") and len(measured) == 3
