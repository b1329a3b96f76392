"""Checkpoints of plain FSDP2 scripts, several real ranks over gloo, taken in for a sharded module; and such a module's
own checkpoint loaded by a plain FSDP2 script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.fsdp_script import STEPS, WHOLE
from tests.support.processes import COLD_LIMIT, ROOT, of_a_world
from tests.support.sharded_cells import Cell, check_part, each_rank, made, save, whole
from unicron_transition.snapshot.checkpoint import Checkpoints
from unicron_transition.snapshot.formats import convert, opening


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
        ("two trees", (2, 1), [(2, 1), (4, 1), (1, 1), (2, 2)]),
        ("torchtitan", (4, 1), [(2, 1)]),
        ("flat", (2, 2), [(2, 1), (2, 2)]),
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
    ("form", "its", "mine"), [("at the top", (2, 2), (2, 1)), ("flat", (2, 1), (2, 2)), ("flat", (2, 1), (4, 1))]
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
