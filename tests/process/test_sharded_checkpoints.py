"""Checkpoints of plain FSDP2 scripts, several real ranks over gloo, taken in for a sharded module; and such a module's
own checkpoint loaded by a plain FSDP2 script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import proof
from tests.support.fsdp_script import STEPS, WHOLE
from tests.support.processes import COLD_LIMIT, ROOT, of_a_world, outside_slurm
from tests.support.rank_harness import Ranks
from tests.support.sharded_cells import Cell, check_part, each_rank, made, save, whole
from tests.support.warm import Script
from unicron_transition.snapshot.checkpoint import Checkpoints
from unicron_transition.snapshot.formats import convert, opening

pytestmark = pytest.mark.process


def run(action: str, form: str, folder: Path, cell: Cell) -> None:
    """Run the script, one process for each rank."""
    words = [sys.executable, "-m", "tests.support.fsdp_script", action, form, str(folder), str(cell[1])]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ranks = [
        subprocess.Popen(words, cwd=ROOT, env=world | {"OMP_NUM_THREADS": "1"}, text=True, **pipes)
        for world in of_a_world(cell[0] * cell[1])
    ]
    try:
        said = [rank.communicate(timeout=COLD_LIMIT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(said)


@pytest.mark.parametrize(
    ("form", "its", "mine"),
    [
        ("two trees", (2, 1), [(4, 1), (1, 1)]),
        pytest.param("two trees", (2, 1), [(2, 1), (2, 2)], marks=pytest.mark.wide),
        pytest.param("torchtitan", (4, 1), [(2, 1)], marks=pytest.mark.wide),
        pytest.param("flat", (2, 2), [(2, 1), (2, 2)], marks=pytest.mark.long),
    ],
)
def test_a_sharded_module_begins_from_what_a_plain_script_saved(tmp_path, form, its, mine):
    run("save", form, tmp_path, its)
    wanted = torch.load(tmp_path / WHOLE)
    for cell in mine:
        for state, _ in each_rank(cell, 2, 1):
            begun = Checkpoints(tmp_path / "new", begin_from=tmp_path / "dcp").load(state)
            assert begun == (STEPS if form == "torchtitan" else 0)
            compare(state, wanted)
            assert state.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def compare(state, wanted: dict[str, torch.Tensor]) -> None:
    """The state is this rank's part of all of it."""
    found = set()
    for name, tensor in state.model[0].module.state_dict(keep_vars=True).items():
        check_part(tensor, wanted[name])
        values = state.optimizer.state.get(tensor, {})
        for key, value in values.items():
            check_part(value, wanted[f"{name} {key}"])
        found |= {name, *(f"{name} {key}" for key in values)}
    assert found == set(wanted)


@pytest.mark.parametrize(
    ("form", "its", "mine"),
    [
        pytest.param("at the top", (2, 2), (2, 1), marks=pytest.mark.wide),
        pytest.param("flat", (2, 1), (2, 2), marks=pytest.mark.long),
    ],
)
def test_a_plain_script_loads_what_is_exported(tmp_path, form, its, mine):
    saves = save(tmp_path / "saves", its)
    convert.export(opening.index_of(saves), tmp_path / "dcp", "dcp")
    wanted = whole(made((1, 1), 1, 2))
    torch.save(wanted, tmp_path / WHOLE)
    run("load", form, tmp_path, mine)
    convert.export(opening.index_of(saves), tmp_path / "safetensors", "safetensors")
    weights = load_file(tmp_path / "safetensors" / "model.safetensors")
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights.items())
    assert weights.keys() == {name for name in wanted if " " not in name}
    for state, _ in each_rank((4, 1), 3):
        assert Checkpoints(tmp_path / "new", begin_from=tmp_path / "dcp").load(state) == 7
        compare(state, wanted)


# ------------------------------------------------------------ of sessions
SCRIPT = ROOT / "tests" / "support" / "tiny_sharded.py"
LOSSES = 1e-6  # relative, in fp32


def train(out: Path, cell: Cell, replicas: int, iterations: int, *faults: dict, **settings: str) -> Ranks:
    """Run a session's ranks to their end."""
    out.mkdir()
    sizes = {"TINY_SHARD": str(cell[0]), "TINY_TENSOR": str(cell[1]), "TINY_ITERATIONS": str(iterations)}
    size, restart = cell[0] * cell[1], bool(faults)
    more = {"TINY_SCRIPT": str(SCRIPT)} | sizes | settings
    ranks = Ranks(out, replicas * size, list(faults), fork=True, replica=size, restart=restart, **more)
    ranks.drive()
    return ranks


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, float]:
    """The losses of a loop of torch alone in one process."""
    out = tmp_path_factory.mktemp("alone")
    alone = outside_slurm() | {"TINY_ALONE": "1", "TINY_ITERATIONS": "6", "TINY_OUT": str(out)}
    ended = Script(SCRIPT, environment=alone).wait()
    assert ended.returncode == 0, ended.stderr
    return one_loss(out)


def one_loss(*outs: Path) -> dict[int, float]:
    found = {iteration: values for out in outs for iteration, values in proof.losses(out).items()}
    assert all(len(values) == 1 for values in found.values()), found
    return {iteration: next(iter(values)) for iteration, values in found.items()}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (((2, 1), 2), ((4, 1), 1)),
        pytest.param(((2, 2), 1), ((2, 1), 1), marks=pytest.mark.wide),
        pytest.param(((2, 1), 1), ((1, 1), 2), marks=pytest.mark.wide),
        pytest.param(((1, 1), 1), ((2, 2), 1), marks=pytest.mark.wide),
    ],
)
def test_a_job_goes_on_with_other_shards(tmp_path, undisturbed, one, other):
    saves = {"TINY_CHECKPOINTS": str(tmp_path / "saves")}
    train(tmp_path / "one", *one, 4, **saves)
    assert [each.iteration for each in Checkpoints(tmp_path / "saves").whole_ones()] == [4, 2]
    train(tmp_path / "other", *other, 6, **saves)
    assert sorted(proof.losses(tmp_path / "other")) == [4, 5]
    proof.close(one_loss(tmp_path / "one", tmp_path / "other"), undisturbed, LOSSES)


@pytest.mark.wide
@pytest.mark.parametrize("cell", [(2, 1), (2, 2)])
def test_a_sole_replica_that_is_lost_goes_on_from_memory(tmp_path, undisturbed, cell):
    """Each place has its own part there, and there is no file."""
    memory = tmp_path / "memory"
    memory.mkdir()
    size = cell[0] * cell[1]
    faults = [{"slot": slot, "iteration": 3, "at": "outside", "count": 0, "kind": "kill"} for slot in range(size)]
    ranks = train(tmp_path / "run", cell, 1, 6, *faults, UNICRON_MEMORY=str(memory), LOCAL_WORLD_SIZE=str(size))
    assert ranks.reformed
    proof.close(one_loss(tmp_path / "run"), undisturbed, LOSSES)
