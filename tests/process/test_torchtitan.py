"""torchtitan's own trainer with its debug model, the real package, is healed within the iteration."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.support import torchtitan_on_cpu
from tests.support.gates import HURRY
from tests.support.jobs import World
from tests.support.processes import of_a_world
from tests.support.warm import Script

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

RANKS, SHARD, STEPS = 4, 2, 60
VICTIM = 1  # of the first replica: slot 2 goes on
PATIENCE = 240.0  # seconds, for imports on a busy machine
LOSSES, NORMS = 1e-5, 2e-4  # the log has five and four digits behind the point; sums in another order
LINE = re.compile(r"step: *(\d+) +loss: *([\d.]+) +grad_norm: *([\d.]+)")
CONFIG = """
[job]
dump_folder = "{folder}/{name}"
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "{folder}/tokenizer"
[training]
dataset = "c4_test"
dataset_path = "{folder}/documents"
seq_len = 32
local_batch_size = 2
global_batch_size = 4
steps = {steps}
mixed_precision_param = "float32"
[parallelism]
data_parallel_shard_degree = 2
[metrics]
log_freq = 1
disable_color_printing = true
[debug]
seed = 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torchtitan_on_cpu.make_assets(tmp_path)
    return tmp_path


def program(folder: Path, name: str) -> list[str]:
    """The command; name: "torchtitan" or "unicron"."""
    config = folder / f"{name}-job.toml"  # unicron.toml is the controller's
    config.write_text(CONFIG.format(folder=folder, name=name, steps=STEPS))
    return [sys.executable, str(torchtitan_on_cpu.__file__), name, "--job.config_file", str(config)]


def environment(folder: Path) -> dict[str, str]:
    return {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def undisturbed(folder: Path) -> list[tuple[str, ...]]:
    """What torchtitan logs by itself, on a rank for each micro-batch."""
    command = program(folder, "torchtitan")[1:]
    started = [Script(*command, environment=each | environment(folder)) for each in of_a_world(SHARD)]
    ended = [each.wait(PATIENCE) for each in started]
    assert [each.returncode for each in ended] == [0] * SHARD, ended[0].stderr[-3000:]
    return LINE.findall(ended[0].stdout + ended[0].stderr)


@pytest.mark.long
def test_a_killed_rank_costs_torchtitans_trainer_no_iteration(folder: Path) -> None:
    """Losses and norms are those of torchtitan's own FSDP2, and the rank is back."""
    wanted = undisturbed(folder)
    assert [int(step) for step, _, _ in wanted] == list(range(1, STEPS + 1))
    hurry = folder / "hurry"
    settings = environment(folder) | {HURRY: str(hurry)}
    with World(folder, RANKS, command=program(folder, "unicron"), **settings) as world:
        everybody = list(range(RANKS))
        world.wait(lambda: world.trains(everybody, 2), "it trains", PATIENCE)
        os.kill(world.rank(VICTIM)["pid"], signal.SIGKILL)
        world.wait(lambda: len(world.job()["members"]) == RANKS - SHARD, "the other replica goes on", PATIENCE)
        world.wait(lambda: world.trains(everybody), "the rank is back", PATIENCE)
        hurry.touch()
        assert world.array.wait() == [0] * RANKS, world.array.logs[-3000:]
        logs = world.agents[2].log
    found = LINE.findall(logs)
    assert [int(step) for step, _, _ in found] == list(range(1, STEPS + 1))
    for (step, loss, norm), (_, own_loss, own_norm) in zip(found, wanted, strict=True):
        assert float(loss) == pytest.approx(float(own_loss), abs=LOSSES), step
        assert float(norm) == pytest.approx(float(own_norm), abs=NORMS), step
