"""A micro-batch whose loss raises, with real ranks: it is computed again by another one, and then the job ends."""

from __future__ import annotations

import sys

import pytest

from tests.support.jobs import World

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


def test_a_loss_that_is_no_number_is_said_while_the_script_goes_on(tmp_path):
    script = tmp_path / "nan.py"
    script.write_text(SCRIPT.format(fails="loss = loss * float('nan')", iterations=100000))
    with World(tmp_path, 2, command=[sys.executable, str(script)], UNICRON_MODE="session") as job:
        job.wait(lambda: job.job().get("nan_since") is not None, "the loss is no number", 200)
        status = job.job()
    assert status["nan_since"] == 6 and status["state"] == "running" and not status["failures"]
