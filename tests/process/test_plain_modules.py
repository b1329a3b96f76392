"""Recovery of a plain torch module and optimizer, at every moment, in processes in which Megatron cannot be imported.

Real ranks, ZeroMQ and gloo. Each run is compared with one process that trains by a loop of torch alone: gradients,
losses and parameters. A spread of kinds and moments runs always, the others are `long`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import proof
from tests.support.moments import fault, moments
from tests.support.processes import ROOT, outside_slurm
from tests.support.rank_harness import Ranks
from tests.support.zygote import Script

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

SCRIPT = ROOT / "tests" / "support" / "tiny_plain.py"
ITERATIONS = 5
GRADIENTS = 1e-6  # relative to the largest, in fp32
LOSSES = 1e-5  # relative
KINDS: dict[str, dict[str, str]] = {
    "adamw": {},
    "fused": {"TINY_OPTIMIZER": "fused", "TINY_CLIP": "0.5"},
    "tensor-lr": {"TINY_OPTIMIZER": "tensor-lr"},
    "sgd": {"TINY_OPTIMIZER": "sgd", "TINY_TOKENS": "1"},
    "adafactor": {"TINY_OPTIMIZER": "adafactor", "TINY_CLIP": "1.0"},
    "scaler": {"TINY_SCALER": "1", "TINY_CLIP": "0.5"},
    "dropout": {"TINY_DROPOUT": "0.1"},
}
SPREAD = {
    ("fused", "data"),
    ("adamw", "backward"),
    ("scaler", "reduce"),
    ("sgd", "proof"),
    ("adafactor", "commit"),
    ("tensor-lr", "twice"),
    ("dropout", "recovery"),
    ("adamw", "step"),
}
CASES = [
    pytest.param(*case, id=" ".join(case), marks=() if case in SPREAD else pytest.mark.long)
    for case in sorted((kind, moment) for kind in KINDS for moment in moments(1) if moment not in ("both", "norm"))
]


def environment(kind: str) -> dict[str, str]:
    return {"TINY_SCRIPT": str(SCRIPT), "TINY_ITERATIONS": str(ITERATIONS), **KINDS[kind]}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """kind -> the folder of a loop of torch alone in one process; with dropout of a session without an agent, for the
    micro-batches have random numbers of their own."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            out = made[kind] = tmp_path_factory.mktemp("reference")
            world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
            how = world if kind == "dropout" else {"TINY_ALONE": "1"}
            ended = Script(
                SCRIPT, environment=outside_slurm() | how | environment(kind) | {"TINY_OUT": str(out)}
            ).wait()
            assert ended.returncode == 0, ended.stderr
        return made[kind]

    return of


@pytest.fixture
def run(references, tmp_path):
    """Run ranks with faults, and prove what must hold of every run."""

    def go(kind: str, *faults: dict, size: int = 4, **keywords) -> Ranks:
        ranks = Ranks(tmp_path, size, list(faults), fork=True, **keywords, **environment(kind))
        ranks.drive()
        proof.exactly_once(ranks, ITERATIONS)
        proof.nothing_thrown_away(ranks)
        proof.same_losses(tmp_path, references(kind), LOSSES)
        found = proof.gradient_differences(tmp_path, references(kind), ITERATIONS, relative=True)
        assert max(found.values()) <= GRADIENTS, found
        return ranks

    return go


@pytest.mark.parametrize(("kind", "moment"), CASES)
def test_any_moment(run, kind, moment):
    ranks = run(kind, *moments(1)[moment], restart=moment == "twice")
    assert any(ranks.breaks)
    assert moment == "error" or any(lost for _, lost, _ in ranks.breaks)


def test_undisturbed_and_with_more_ranks_than_micro_batches(run):
    ranks = run("sgd", size=9)
    assert not ranks.breaks and set(map(tuple, ranks.exits.values())) == {(0,)}


def test_a_rank_that_starts_again_gets_the_state_and_joins(run):
    """Optimizer, schedule and scaler included; without its first iterations it trains on as all others do."""
    gate = fault(0, 3, "fetch", 0, kind="wait", gate=1)  # until the newcomer is offered
    ranks = run("scaler", fault(1, 1, "fetch", 1), gate, restart=True)
    offer = next(plan for plan in ranks.plans if plan.boundary)
    assert offer.joiners == [1] and ranks.exits[1] == [-9, 0]
