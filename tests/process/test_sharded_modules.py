"""Recovery of modules that `fully_shard` has sharded, at every moment, with replicas of several ranks.

Real ranks, ZeroMQ and gloo. Each run is compared with one process that trains whole parameters by a loop of torch
alone: gradients and losses.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import proof
from tests.support.moments import fault
from tests.support.processes import ROOT, outside_slurm
from tests.support.rank_harness import Ranks
from tests.support.warm import Script

pytestmark = pytest.mark.process

SCRIPT = ROOT / "tests" / "support" / "tiny_sharded.py"
ITERATIONS = 5
GRADIENTS = 1e-6  # relative to the largest, in fp32
LOSSES = 1e-6  # relative
LAYOUTS: dict[str, tuple[int, int, int]] = {  # ranks, shard, tensor
    "DP2 F2": (4, 2, 1),
    "DP3 F2": (6, 2, 1),
    "DP2 F2 TP2": (8, 2, 2),
    "F4": (4, 4, 1),
    "DP4 F1": (4, 1, 1),
}


def moments(size: int) -> dict[str, list[dict]]:
    """What strikes the second replica, or the only one."""
    first, last = size, 2 * size - 1
    return {
        "compute": [fault(last, 1, "backward", 1)],
        "gather": [fault(last, 1, "gather", 2)],
        "scatter": [fault(last, 1, "scatter", 1)],
        "reduce": [fault(first, 1, "reduce", 0)],
        "commit": [fault(last, 1, "reduce", 2 if size > 1 else 1)],  # in a larger replica its ranks agree before it
        "step": [fault(first, 1, "step")],
        "copy": [fault(1 % size, 2, "half")],
        "regroup": [fault(first, 1, "fetch"), fault(0, 1, "resume", kind="gloo")],
    }


def environment(layout: str, **more: str) -> dict[str, str]:
    _, shard, tensor = LAYOUTS[layout]
    sizes = {"TINY_SHARD": str(shard), "TINY_TENSOR": str(tensor)}
    return {"TINY_SCRIPT": str(SCRIPT), "TINY_ITERATIONS": str(ITERATIONS), **sizes, **more}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """settings -> the folder of a loop of torch alone in one process."""
    made: dict[str, Path] = {}

    def of(settings: dict[str, str]) -> Path:
        key = repr(sorted(settings.items()))
        if key not in made:
            out = made[key] = tmp_path_factory.mktemp("reference")
            alone = outside_slurm() | {"TINY_ALONE": "1"} | settings | {"TINY_OUT": str(out)}
            ended = Script(SCRIPT, environment=alone).wait()
            assert ended.returncode == 0, ended.stderr
        return made[key]

    return of


@pytest.fixture
def run(references, tmp_path):
    """Run ranks with faults, and prove what must hold of every run."""

    def go(layout: str, *faults: dict, settings: dict[str, str] | None = None, **keywords) -> Ranks:
        size, shard, tensor = LAYOUTS[layout]
        mine = environment(layout, **settings or {})
        memory = tmp_path / "memory"
        memory.mkdir()
        more = mine | {"UNICRON_MEMORY": str(memory)}
        ranks = Ranks(tmp_path, size, list(faults), fork=True, replica=shard * tensor, **keywords, **more)
        ranks.drive()
        reference = references(mine)
        proof.exactly_once(ranks, ITERATIONS, lanes=shard)
        proof.same_losses(tmp_path, reference, LOSSES)
        found = proof.gradient_differences(tmp_path, reference, ITERATIONS, shard * tensor, relative=True)
        print(f"gradients differ by {max(found.values()):.1e} at most")
        assert max(found.values()) <= GRADIENTS, found
        return ranks

    return go


@pytest.mark.parametrize("layout", LAYOUTS)
def test_undisturbed(run, layout):
    ranks = run(layout)
    assert not ranks.breaks


INSIDE = ("gather", "scatter")  # a replica of one rank has no such collectives
CASES = [
    (layout, moment)
    for layout, (ranks, shard, tensor) in LAYOUTS.items()
    for moment in moments(1)
    if ranks > shard * tensor and (shard > 1 or moment not in INSIDE)
]


@pytest.mark.parametrize(("layout", "moment"), CASES)
def test_any_moment(run, layout, moment):
    _, shard, tensor = LAYOUTS[layout]
    ranks = run(layout, *moments(shard * tensor)[moment])
    assert any(lost for _, lost, _ in ranks.breaks)
