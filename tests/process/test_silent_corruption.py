"""Wrong numbers that raise nothing, with real ranks, agents and a controller: the replica that computes them is named,
and the job goes back to a state that was found sound. What it trains in the end is what an undisturbed job trains."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.jobs import World

pytestmark = pytest.mark.process
ITERATIONS, FROM = 60, 25
SCRIPT = """
import json, os, sys, torch, unicron
from unicron_detector.chaos.inject import injector
unicron.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
out, fault, slot = sys.argv[1], sys.argv[2], int(os.environ["UNICRON_SLOT"])

def fetch(iteration, index):
    more = slot if fault == "fetch" else 0
    data = torch.rand(8, 8, generator=torch.Generator().manual_seed(64 * iteration + index + 1000000 * more))
    return iteration, data

def forward_step(micro_batch, model):
    iteration, data = micro_batch
    loss = torch.nn.functional.mse_loss(model(data), data.sum(dim=1, keepdim=True).sin())
    defective = slot == 1 and iteration >= {first} and not os.path.exists(f"{{out}}/mended")
    if defective and fault == "gradient":
        return loss + 1e-4 * model[0].weight.sum() - 1e-4 * model[0].weight.sum().detach()
    if defective and fault == "state" and iteration == {first} and not os.path.exists(f"{{out}}/flipped"):
        open(f"{{out}}/flipped", "w").close()
        model[2].weight.data.view(torch.int32)[0, 3].bitwise_xor_(1 << 20)
    return loss

optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
session = unicron.Session(
    model=model, optimizer=optimizer, micro_batches=9, forward_step=forward_step, fetch=fetch,
    train_iterations={iterations}, checkpoints=unicron.Checkpoints(f"{{out}}/saved", interval=5),
)
began = session.join()
with open(f"{{out}}/losses.{{slot}}", "a") as file:
    before = -1
    for step in session:
        if step.iteration <= before:  # it went back: whoever was defective has a new processor
            open(f"{{out}}/mended", "w").close()
            if ":" in fault:
                injector.on_order({{"fault": fault, "seconds": 1e-9}})
        before = step.iteration
        if ":" in fault and slot == 1 and step.iteration == {first} and not os.path.exists(f"{{out}}/mended"):
            injector.on_order({{"fault": fault, "seconds": 600}})
        print(json.dumps([step.iteration, step.loss]), file=file, flush=True)
        if fault == "number" and step.iteration == {first} and not os.path.exists(f"{{out}}/mended"):
            model[2].weight.data[0, 3] = float("inf")  # as an optimizer makes it of sound gradients
"""


def train(tmp_path, fault, ranks=3):
    """Train; return the last status, the events, the ranks' lines, and iteration -> loss as it counted in the end."""
    out = tmp_path / fault
    out.mkdir()
    script = out / "train.py"
    script.write_text(SCRIPT.format(first=FROM, iterations=ITERATIONS))
    command = [sys.executable, str(script), str(out), fault]
    checks = {"UNICRON_AUDIT": "9", "UNICRON_COMPARE": "6", "UNICRON_MODE": "session"}
    with World(out, ranks, command=command, **checks) as job:
        job.wait(lambda: job.job().get("ended"), "the job is ended", 200)
        status, events, logs = job.job(), json.dumps(job.events()), job.array.logs
    losses = {}
    for file in out.glob("losses.*"):
        own = dict(map(json.loads, file.read_text().splitlines()))
        for iteration, loss in own.items():
            assert losses.setdefault(iteration, loss) == loss
    assert status["ended"]["code"] == 0 and not status["ledger_violations"], logs
    return events, logs, losses


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    events, logs, losses = train(tmp_path_factory.mktemp("sound"), "none")
    assert "SilentCorruption" not in events and losses.keys() == set(range(ITERATIONS))
    assert "not audited" not in logs and "do not repeat" not in logs
    return losses


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("gradient", "slot 1 had another gradient"),
        ("flip:wire:21", "goes to slot 1 is spoilt"),
        pytest.param("flip:wire:30", "goes to slot 1 is spoilt", marks=pytest.mark.wide),  # to infinity: no step
        pytest.param("state", "slot 1 had another", marks=pytest.mark.wide),  # its state, or gradients that came of it
        pytest.param("number", "parameters are not finite on slots 0-2", marks=pytest.mark.wide),
    ],
)
def test_wrong_numbers_are_found_and_nothing_of_them_stays(tmp_path, sound, fault, said):
    events, logs, losses = train(tmp_path, fault)
    assert losses == pytest.approx(sound, rel=1e-5), logs
    assert said in events, logs


def test_a_fetch_that_depends_on_the_rank_is_told_at_the_start(tmp_path):
    events, logs, losses = train(tmp_path, "fetch")
    assert logs.count("gradients are not audited: two ranks compute other gradients") == 1, logs
    assert "SilentCorruption" not in events and losses.keys() == set(range(ITERATIONS))
