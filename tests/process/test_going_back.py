"""A training state that was found to be wrong, with real ranks: all go back to the last verified one, in the same
processes, and nobody can begin from what was kept since."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.jobs import World, json_lines
from unicron_transition.snapshot import folders

pytestmark = pytest.mark.process
ITERATIONS, VERIFIED, WRONG, FOUND = 20, 6, 9, 11
SCRIPT = """
import contextlib, json, os, sys, time, torch, unicron
from pathlib import Path
unicron.init_process_group("gloo")
torch.manual_seed(3)
model = torch.nn.Linear(4, 1)

def fetch(iteration, index):
    return torch.rand(2, 4, generator=torch.Generator().manual_seed(8 * iteration + index))

def forward_step(micro_batch, model):
    return (model(micro_batch) - micro_batch.sum(1, keepdim=True)).square().mean()

def wait_saved(iteration):
    while not list(Path("{saves}").glob(f"iteration-{{iteration:08d}}*/*.image")):
        time.sleep(0.1)

session = unicron.Session(
    model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), micro_batches=4, forward_step=forward_step,
    fetch=fetch, train_iterations={iterations}, checkpoints=unicron.Checkpoints("{saves}", interval=4, keep=1),
)
spoil, steps, slot = {spoil}, [], os.environ.get("UNICRON_SLOT", "0")
for step in session:
    line = dict(iteration=step.iteration, loss=step.loss, generation=step.generation, pid=os.getpid())
    with open("{out}/losses." + slot, "a") as file:
        file.write(json.dumps(line) + "\\n")
    if step.iteration == 5:
        wait_saved(4)
    if step.iteration == {verified}:
        session._persistence.note_verified(step.iteration)
    if step.iteration == {wrong} and spoil:
        with torch.no_grad():
            model.weight.add_(1.0)
    if step.iteration == {found} and spoil:
        spoil = False
        wait_saved(8)
        with contextlib.suppress(Exception):
            session.go_back()
"""


def script(folder: Path, spoil: bool) -> Path:
    path, saves = folder / "train.py", folder / "saves"
    facts = {"iterations": ITERATIONS, "verified": VERIFIED, "wrong": WRONG, "found": FOUND, "spoil": spoil}
    path.write_text(SCRIPT.format(out=folder, saves=saves, **facts))
    return path


def losses(folder: Path, slot: int) -> dict[int, float]:
    """Of each iteration, as it was made last."""
    return {one["iteration"]: one["loss"] for one in json_lines(folder / f"losses.{slot}")}


def train(folder: Path, spoil: bool) -> World:
    folder.mkdir()
    command = [sys.executable, str(script(folder, spoil))]
    with World(folder, 2, command=command, UNICRON_MODE="session") as job:
        ended = job.wait(lambda: job.job().get("ended"), "the job is trained to its end")
        assert ended["code"] == 0, job.told()
    return job


def test_all_go_back_to_the_verified_state_and_train_as_if_nothing_had_been_wrong(tmp_path):
    job = train(tmp_path / "wrong", spoil=True)
    train(tmp_path / "right", spoil=False)
    for slot in (0, 1):
        made = json_lines(tmp_path / "wrong" / f"losses.{slot}")
        firsts = [one["iteration"] for one in made if one["generation"] == made[-1]["generation"]]
        assert firsts == list(range(VERIFIED, ITERATIONS)), "they begin again with the verified one"
        assert len({one["pid"] for one in made}) == 1, "in the same processes"
        assert losses(tmp_path / "wrong", slot) == pytest.approx(losses(tmp_path / "right", slot), rel=1e-9)
    saves = tmp_path / "wrong" / "saves"
    assert [each.iteration for each in folders.whole(saves)] == [ITERATIONS, 4], "the verified one stays beside `keep`"
    assert [path.name for path in saves.glob("*.unsound")] == ["iteration-00000008.unsound"]
    assert "set aside, because the training state in them is unsound" in job.array.logs
