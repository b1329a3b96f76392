"""The programs of docs/trainers.md, with the real packages, are healed within the iteration."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.support import slow_script
from tests.support.gates import HURRY
from tests.support.jobs import World
from tests.support.processes import ROOT, of_a_world
from tests.support.warm import Script

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "trainers.md").read_text(), re.MULTILINE | re.DOTALL)
PROGRAMS = dict(zip(("lightning", "accelerate"), BLOCKS, strict=True))
RANKS, SHARD, STEPS, VICTIM = 4, 2, 60, 1
PATIENCE = 240.0  # seconds, for imports on a busy machine
LINE = re.compile(r"step (\d+): loss ([\d.]+), (\d) ranks")
LOSSES = {"lightning": 1e-6, "accelerate": 2e-3}  # bf16 rounds sums in another order


@pytest.mark.parametrize(
    "name", [pytest.param("lightning", marks=pytest.mark.long), pytest.param("accelerate", marks=pytest.mark.wide)]
)
def test_a_killed_rank_costs_a_trainers_script_no_iteration(tmp_path: Path, name: str) -> None:
    """Every step is there once, with the loss of an undisturbed run under torchrun, and the rank comes back."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAMS[name])
    alone = [Script(script, environment=each | {"OMP_NUM_THREADS": "1"}) for each in of_a_world(SHARD)]
    ended = [each.wait(PATIENCE) for each in alone]
    assert [each.returncode for each in ended] == [0] * SHARD, ended[0].stderr[-3000:]
    wanted = LINE.findall(ended[0].stdout)
    hurry = tmp_path / "hurry"
    command = [sys.executable, str(slow_script.__file__), str(script)]
    settings = {HURRY: str(hurry), "OMP_NUM_THREADS": "1"}
    with World(tmp_path, RANKS, command=command, **settings) as world:
        everybody = list(range(RANKS))
        world.wait(lambda: world.trains(everybody, 2), "it trains", PATIENCE)
        os.kill(world.rank(VICTIM)["pid"], signal.SIGKILL)
        world.wait(lambda: len(world.job()["members"]) == RANKS - SHARD, "the other replica goes on", PATIENCE)
        world.wait(lambda: world.trains(everybody), "the rank is back", PATIENCE)
        hurry.touch()
        assert world.array.wait() == [0] * RANKS, world.array.logs[-3000:]
        found = LINE.findall(world.agents[2].log)
    assert [int(step) for step, _, _ in found] == [int(step) for step, _, _ in wanted] == list(range(1, STEPS + 1))
    assert {int(ranks) for _, _, ranks in found} == {RANKS - SHARD, RANKS}
    for (step, loss, _), (_, other, _) in zip(found, wanted, strict=True):
        assert float(loss) == pytest.approx(float(other), rel=LOSSES[name], abs=1e-7), step


def test_lightning_trains_nothing_beside_the_session(tmp_path: Path) -> None:
    """Also if it is told to train for some steps at least, which `trainer.should_stop` would not end."""
    script = tmp_path / "train.py"
    text = PROGRAMS["lightning"].replace("STEPS = 60", "STEPS = 3").replace("shard=2", "shard=1")
    script.write_text(
        text.replace("max_steps=STEPS", "max_steps=STEPS, min_steps=2") + 'print("own", trainer.global_step)\n'
    )
    (ended,) = (Script(script, environment=each | {"OMP_NUM_THREADS": "1"}).wait(PATIENCE) for each in of_a_world(1))
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert [int(step) for step, _, _ in LINE.findall(ended.stdout)] == [1, 2, 3]
    assert "own 0" in ended.stdout
