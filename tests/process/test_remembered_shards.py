"""The shards of a distributed optimizer outlive their ranks: the next processes go on from the node's memory.

Real ranks with gloo; decisions by the controller's own functions. The folder is what an agent gives its ranks.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.support import proof
from tests.support.moments import fault
from tests.support.rank_harness import Ranks
from transition.memory.images import inventory

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

ITERATIONS = 6
HIT = 3
SHAPES = {"dp": ("1 1 1", 1, 3), "tp": ("2 1 1", 2, 4)}  # layout, ranks of a replica, of the job
SLOW = {"TINY_SLOW": "0.05", "TINY_DISTOPT": "1", "TINY_ITERATIONS": str(ITERATIONS)}


def train(out: Path, shape: str, faults: list[dict], **settings: str) -> Ranks:
    out.mkdir(exist_ok=True)
    layout, size, ranks = SHAPES[shape]
    environment = {**SLOW, "TINY_LAYOUT": layout, **settings}
    found = Ranks(out, ranks, faults, fork=True, replica=size, restart=True, **environment)
    found.drive()
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """shape -> the folder of a run in which nothing fails."""

    @functools.cache
    def go(shape: str) -> Path:
        out = tmp_path_factory.mktemp("undisturbed")
        assert not train(out, shape, []).breaks
        return out

    return go


@pytest.fixture
def memory(tmp_path) -> Path:
    """What the agent makes for its ranks."""
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


def all_at(shape: str, at: str, **keywords) -> list[dict]:
    return [fault(slot, HIT, at, **keywords) for slot in range(SHAPES[shape][2])]


def same_training(out: Path, reference: Path, shape: str) -> None:
    """Not one bit of a gradient differs, and no loss."""
    proof.same_losses(out, reference, 0.0)
    assert set(proof.losses(out)) == set(range(ITERATIONS))
    found = proof.gradient_differences(out, reference, ITERATIONS, SHAPES[shape][1])
    assert not any(found.values()), found


def begun(ranks: Ranks) -> tuple[int, int] | None:
    """The state from which new processes formed the job."""
    plan = [plan for plan in ranks.plans if not plan.boundary][-1]
    assert "memory" in plan.reason, plan
    return plan.state


@pytest.mark.parametrize("shape", ["dp", "tp"])
def test_all_ranks_are_killed_and_go_on_from_memory_with_no_iteration_lost(tmp_path, memory, undisturbed, shape):
    late = all_at(shape, "fetch", kind="late", delay=0.1)
    ranks = train(tmp_path, shape, late, UNICRON_MEMORY=str(memory))
    assert set(map(tuple, ranks.exits.values())) == {(-14, 0)}
    assert begun(ranks)[1] == HIT
    proof.exactly_once(ranks, ITERATIONS)
    same_training(tmp_path, undisturbed(shape), shape)
