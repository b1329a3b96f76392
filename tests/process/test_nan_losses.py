"""Losses that are no numbers, with real ranks: a micro-batch is computed again by another rank. If that fails as well,
the job ends or goes on without it; if not, the first rank is named, and nothing of it is in the training."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.jobs import World
from tests.support.processes import LIMIT, of_a_world

pytestmark = pytest.mark.process
SCRIPT = """
import torch, unicron
unicron.init_process_group("gloo")
model = torch.nn.Linear(4, 1)

def fetch(iteration, index):
    return iteration, index, torch.ones(2, 4)

def forward_step(micro_batch, model):
    iteration, index, data = micro_batch
    loss = model(data).mean()
    if (iteration, index) == (6, 1):
        {fails}
    return loss

session = unicron.Session(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), micro_batches=4, forward_step=forward_step,
    fetch=fetch, train_iterations={iterations},
)
for step in session:
    import time
    time.sleep(0.02)
"""


@pytest.mark.parametrize("kind", [pytest.param("ValueError", marks=pytest.mark.wide), "RuntimeError"])
def test_one_rank_after_another_is_not_killed_for_the_datas_fault(tmp_path, kind):
    script = tmp_path / "nan.py"
    fails = f"raise {kind}('found NaN in local forward loss calculation')"
    script.write_text(SCRIPT.format(fails=fails, iterations=1000))
    with World(tmp_path, 3, command=[sys.executable, str(script)], UNICRON_MODE="session") as job:
        ended = job.wait(lambda: job.job().get("ended"), "the job is ended", 200)
        failures = job.failures()
    assert ended["code"] == 1 and "micro-batch 1 of iteration 6 failed with numerical_error on slot" in ended["reason"]
    assert len([one for one in failures if one["cause"] == "numerical_error"]) <= 3, failures
    assert failures[-1]["action"] == "end_job"


LOSSES = """
import json, math, os, sys, torch, unicron
unicron.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
out, slot, kind = sys.argv[1], os.environ.get("UNICRON_SLOT") or os.environ["RANK"], sys.argv[2]

def fetch(iteration, index):
    data = torch.rand(8, 4, generator=torch.Generator().manual_seed(8 * iteration + index))
    return iteration, index, data

def forward_step(micro_batch, model):
    iteration, index, data = micro_batch
    loss = torch.nn.functional.mse_loss(model(data), data.sum(dim=1, keepdim=True))
    if (iteration, index) != (20, 3) or kind == "sound":
        return loss
    if "once" in kind:
        if os.path.exists(f"{out}/once"):
            return loss
        open(f"{out}/once", "w").close()
    if "gradient" in kind:
        return loss + (0 * model.weight).sum().sqrt()  # the root of 0 has no gradient
    if kind == "far":  # and right: it is computed once more, and is the same
        return loss * 1e4
    return loss * float("nan")

optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
session = unicron.Session(
    model=model, optimizer=optimizer, micro_batches=8, forward_step=forward_step, fetch=fetch, train_iterations=60,
    checkpoints=unicron.Checkpoints(f"{out}/saved", interval=10), **json.loads(sys.argv[3])
)
with open(f"{out}/losses.{slot}", "a") as file:
    for step in session:
        print(json.dumps([step.iteration, step.loss]), file=file, flush=True)
assert all(bool(torch.isfinite(each).all()) for each in model.parameters())
"""


def _train(tmp_path, kind, **more):
    """Train with three ranks; return the job's last status, its events as text, and iteration -> loss."""
    out = tmp_path / kind
    out.mkdir()
    script = out / "train.py"
    script.write_text(LOSSES)
    command = [sys.executable, str(script), str(out), kind, json.dumps(more)]
    with World(out, 3, command=command, UNICRON_MODE="session") as job:
        job.wait(lambda: job.job().get("ended"), "the job is ended", 200)
        status, events = job.job(), json.dumps(job.events())
    losses = {}
    for file in out.glob("losses.*"):
        for line in file.read_text().splitlines():
            iteration, loss = json.loads(line)
            assert losses.setdefault(iteration, loss) == loss
    return status, events, losses


@pytest.mark.parametrize("kind", ["loss once", pytest.param("gradient once", marks=pytest.mark.wide)])
def test_what_is_not_finite_once_is_computed_again(tmp_path, kind):
    _, _, sound = _train(tmp_path, "sound")
    status, events, losses = _train(tmp_path, kind)
    assert losses.keys() == sound.keys() == set(range(60))
    assert max(abs(losses[one] - sound[one]) / abs(sound[one]) for one in sound) < 1e-5
    assert status["nan_since"] is None and not status["ledger_violations"]
    assert "micro-batch 3 of iteration 20" in events or "iteration 20 made a loss or a gradient" in events


@pytest.mark.parametrize("kind", ["gradient always", pytest.param("loss always", marks=pytest.mark.wide)])
def test_a_micro_batch_that_is_never_finite_can_be_left_out(tmp_path, kind):
    status, events, losses = _train(tmp_path, kind, on_bad_batch="skip")
    assert losses.keys() == set(range(60)) and not status["ledger_violations"] and status["ended"]["code"] == 0
    assert "left out" in events and status["nan_since"] is None


def test_a_micro_batch_that_is_never_finite_ends_the_job(tmp_path):
    status, _, losses = _train(tmp_path, "loss always")
    assert status["ended"]["code"] == 1 and max(losses) == 19
    assert "micro-batch 3 of iteration 20 is at fault" in status["ended"]["reason"]


@pytest.mark.parametrize("kind", [pytest.param("loss once", marks=pytest.mark.wide), "far"])
def test_without_an_agent_no_sum_is_counted_twice(tmp_path, kind):
    """Nothing undoes a reduce there, so all is computed once more."""
    script, losses = tmp_path / "train.py", {}
    script.write_text(LOSSES)
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}"
        out.mkdir()
        command = [sys.executable, str(script), str(out), kind, "{}"]
        world = [subprocess.Popen(command, env=each | {"OMP_NUM_THREADS": "1"}) for each in of_a_world(ranks)]
        assert [each.wait(LIMIT) for each in world] == [0] * ranks
        losses[ranks] = [json.loads(line)[1] for line in (out / "losses.0").read_text().splitlines()]
    assert losses[2] == pytest.approx(losses[1], rel=1e-4) and len(losses[1]) == 60
