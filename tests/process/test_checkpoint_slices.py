"""Two nodes hold the same state and write a slice of its checkpoint each: real ranks, agents and controller."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs import World, json_lines
from tests.support.moments import fault
from unicron_transition.snapshot import folders
from unicron_transition.snapshot.checkpoint_file import LEAST_SLICE
from unicron_transition.snapshot.formats import own

pytestmark = pytest.mark.process
EVERY, ITERATIONS = 3, 6
# Two slices of 64 MiB at least.
LARGE = {"TINY_HIDDEN": "768", "TINY_LAYERS": "2", "TINY_SEQUENCE": "8", "TINY_SIZE": "1", "TINY_MICRO_BATCHES": "2"}
SLICES = ["slice-0-of-2", "slice-1-of-2"]


@pytest.fixture
def shared() -> Iterator[str]:
    """A folder of shared memory: the images are too large for a busy disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield folder


def slices_in(folder: Path, suffix: str = "image") -> list[str]:
    """The slices of the first checkpoint."""
    names = (path.name for path in folder.glob(f"iteration-{EVERY:08d}/*.{suffix}"))
    return sorted(name.split(".")[3] for name in names)


def losses(folder: Path) -> dict[int, float]:
    """By iteration, of the first rank."""
    return {one["iteration"]: one["loss"] for one in json_lines(folder / "losses.0")}


@pytest.mark.wide
def test_a_node_that_dies_while_it_writes_its_slice_costs_no_checkpoint(tmp_path: Path, shared: str) -> None:
    """The other node writes it, no rank writes anything, and another job goes on from the two slices."""
    saves, memory = tmp_path / "saves", Path(shared)
    (tmp_path / "first").mkdir()
    (tmp_path / "next").mkdir()
    faults = [fault(slot, EVERY, "save") for slot in (0, 1)]
    settings = LARGE | {"TINY_CHECKPOINTS": str(saves), "TINY_CHECKPOINT_EVERY": str(EVERY)}
    first = settings | {"TINY_ITERATIONS": "1000", "TINY_SLOW": "0.5", "UNICRON_MEMORY_DIR": shared}
    with World(tmp_path / "first", nodes=1, **first, SLURM_ARRAY_TASK_COUNT="2", TINY_FAULT=json.dumps(faults)) as job:
        job.start_agent(1, UNICRON_MEMORY_RATE="2")  # MB a second: half a minute or more
        job.wait(lambda: slices_in(saves, "new") == [SLICES[1]] and slices_in(saves) == [SLICES[0]], "one slice")
        assert not folders.whole(saves)
        job.agents[1].kill()
        for path in memory.glob("unicron.*.n1.*"):
            shutil.rmtree(path)
        (found,) = job.wait(lambda: folders.whole(saves), "the other node writes both")
        assert (found.iteration, len(found.paths), slices_in(saves)) == (EVERY, 2, SLICES)
        job.trains_on([0])
        assert job.job()["ledger_violations"] == 0
    assert own.check(found) == [] and all(path.stat().st_size > LEAST_SLICE for path in found.paths)
    for path in saves.iterdir():  # what came later
        if path != found.folder:
            shutil.rmtree(path)
    with World(
        tmp_path / "next", nodes=1, **settings, UNICRON_MEMORY_DIR=shared, TINY_ITERATIONS=str(ITERATIONS)
    ) as job:
        job.wait(lambda: job.job().get("ended"), "the job is trained to its end")
        assert "goes on from" in job.array.logs
    wanted, steps = losses(tmp_path / "first"), losses(tmp_path / "next")
    assert sorted(steps) == list(range(EVERY, ITERATIONS))
    assert steps == pytest.approx({iteration: wanted[iteration] for iteration in steps}, rel=1e-5)
