"""Recovery in every layout: tensor, pipeline and virtual pipeline parallel, at every point of an iteration.

Real ranks, ZeroMQ and gloo; Megatron-core training on CPU. Each run is compared, place by place, with one of the same
layout in which nothing fails.
"""

from __future__ import annotations

import pytest

from tests.support import proof
from tests.support.rank_harness import Ranks

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

ITERATIONS = 5
GRADIENTS = 1e-6  # relative, in fp32
LOSSES = 1e-4
TP, PP, VPP, BOTH = "2 1 1", "1 2 1", "1 2 2", "2 2 1"


def size_of(layout: str) -> int:
    tensor, pipeline, _ = map(int, layout.split())
    return tensor * pipeline


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """(layout, settings) -> the folder of a run in which nothing fails; made once."""
    made: dict[tuple, object] = {}

    def of(layout: str, replicas: int, settings: dict[str, str]):
        key = (layout, replicas, *sorted(settings.items()))
        if key not in made:
            out = tmp_path_factory.mktemp("reference")
            ranks = Ranks(
                out,
                replicas * size_of(layout),
                [],
                fork=True,
                replica=size_of(layout),
                TINY_LAYOUT=layout,
                TINY_ITERATIONS=str(ITERATIONS),
                **settings,
            )
            ranks.drive()
            assert not ranks.breaks and set(map(tuple, ranks.exits.values())) == {(0,)}
            proof.exactly_once(ranks, ITERATIONS)
            made[key] = out
        return made[key]

    return of


@pytest.fixture
def run(references, tmp_path):
    """Run ranks with faults, and prove what must hold of every run."""

    def go(layout: str, *faults: dict, replicas: int = 2, keywords: dict | None = None, **settings: str) -> Ranks:
        size = size_of(layout)
        wanted_at = references(layout, replicas, settings)
        ranks = Ranks(
            tmp_path,
            replicas * size,
            list(faults),
            fork=True,
            replica=size,
            TINY_LAYOUT=layout,
            TINY_ITERATIONS=str(ITERATIONS),
            **(keywords or {}),
            **settings,
        )
        ranks.drive()
        proof.exactly_once(ranks, ITERATIONS)
        wanted = proof.losses(wanted_at)
        for iteration, values in proof.losses(tmp_path).items():
            assert len(values) == 1, f"iteration {iteration}: members report {values}"
            assert abs(values.pop() - next(iter(wanted[iteration]))) <= LOSSES
        differences = proof.gradient_differences(tmp_path, wanted_at, ITERATIONS, size)
        print(differences)
        assert max(differences.values()) <= GRADIENTS, differences
        return ranks

    return go


def fault(slot: int, iteration: int | str, at: str, count: int = 0, kind: str = "kill", **more) -> dict:
    return {"slot": slot, "iteration": iteration, "at": at, "count": count, "kind": kind, **more}


@pytest.mark.parametrize("layout", [TP, PP, VPP, BOTH])
def test_killed_in_the_schedule(run, layout):
    """The other replica finishes its own schedule, and then what is left."""
    ranks = run(layout, fault(size_of(layout), 2, "fetch", 1))
    print(ranks.plans, ranks.breaks)
    assert [plan.members for plan in ranks.plans[1:]] == [list(range(size_of(layout)))]
