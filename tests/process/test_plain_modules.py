"""Recovery of a plain torch module and optimizer, at every moment, in processes in which Megatron cannot be imported.

Real ranks, ZeroMQ and gloo. Each run is compared with one process that trains by a loop of torch alone: gradients,
losses and parameters. A spread of kinds and moments runs always, the others are `long`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sbatch_templates.training_metrics import read_metrics
from tests.support import proof
from tests.support.moments import fault, moments
from tests.support.processes import ROOT, call, of_a_world, outside_slurm
from tests.support.rank_harness import Ranks
from tests.support.warm import Script

pytestmark = pytest.mark.process

SCRIPT = ROOT / "tests" / "support" / "tiny_plain.py"
TEMPLATE = ROOT / "sbatch_templates" / "train_plain.py"
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
    "buckets": {"TINY_BUCKET": "4500"},  # several, most of which are reduced beside the last backward pass
}
PROOF = {"buckets": 3}  # with which of an iteration's reduces the proof goes, 0 unless said here
SPREAD = {
    ("adamw", "backward"),
    ("buckets", "in-reduce"),
    ("buckets", "error"),
    ("scaler", "reduce"),
    ("sgd", "proof"),
    ("adafactor", "commit"),
    ("tensor-lr", "twice"),
    ("dropout", "recovery"),
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
        print(f"gradients differ by {max(found.values()):.1e} at most")
        assert max(found.values()) <= GRADIENTS, found
        return ranks

    return go


@pytest.mark.parametrize(("kind", "moment"), CASES)
def test_any_moment(run, kind, moment):
    ranks = run(kind, *moments(1, proof=PROOF.get(kind, 0))[moment], restart=moment == "twice")
    assert any(ranks.breaks)
    assert moment == "error" or any(lost for _, lost, _ in ranks.breaks)


@pytest.mark.parametrize("kind", [pytest.param("sgd", marks=pytest.mark.long), "scaler"])
def test_undisturbed_and_with_more_ranks_than_micro_batches(run, kind):
    ranks = run(kind, size=9)
    assert not ranks.breaks and set(map(tuple, ranks.exits.values())) == {(0,)}


def test_a_rank_that_starts_again_gets_the_state_and_joins(run):
    """Optimizer, schedule and scaler included; without its first iterations it trains on as all others do."""
    gate = fault(0, 3, "fetch", 0, kind="wait", gate=1)  # until the newcomer is offered
    ranks = run("scaler", fault(1, 1, "fetch", 1), gate, restart=True)
    offer = next(plan for plan in ranks.plans if plan.boundary)
    assert offer.joiners == [1] and ranks.exits[1] == [-9, 0]


@pytest.mark.parametrize("how", ["card", pytest.param("none", marks=pytest.mark.long)])
def test_garbage_that_a_broken_collective_returns_without_an_error_is_not_believed(run, monkeypatch, how):
    """As aborted NCCL collectives do; with and without copies of what was reduced."""
    monkeypatch.setitem(KINDS, "adamw", {"TINY_SILENT": "1", "UNICRON_SNAPSHOT": how})
    ranks = run("adamw", fault(1, 1, "reduce", 0), fault(2, 2, "reduce", 1))
    assert len([lost for _, lost, _ in ranks.breaks if lost]) == 2


def test_a_job_that_lost_all_goes_on_from_its_checkpoint(references, tmp_path):
    folder = {"TINY_CHECKPOINTS": str(tmp_path / "saves"), "TINY_CHECKPOINT_EVERY": "1"}
    every = [fault(slot, 3, "fetch") for slot in range(2)]
    ranks = Ranks(tmp_path, 2, every, fork=True, restart=True, **folder, **environment("scaler"))
    ranks.drive()
    assert ranks.reformed and min(step["iteration"] for step in ranks.steps if step["incarnation"] == 1) >= 2
    proof.same_losses(tmp_path, references("scaler"), LOSSES)


def test_a_wish_to_stop_is_everybodys(tmp_path):
    ranks = Ranks(tmp_path, 3, [fault(1, 1, "reduce", kind="stop")], fork=True, **environment("adamw"))
    ranks.drive()
    assert {max(step["iteration"] for step in ranks.steps if step["slot"] == slot) for slot in range(3)} == {2}


def test_all_of_transition_can_be_imported_where_megatron_is_not_installed():
    root = ROOT / "transition"
    paths = sorted(path.relative_to(root).with_suffix("") for path in root.rglob("*.py"))
    paths = [path for path in paths if path.name != "__main__" and "torchtitan" not in path.parts]  # for that alone
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    code = f"import sys; sys.modules['megatron'] = None\nimport {', '.join(names)}"
    done = call(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------ the template
def losses_of_the_template(folder: Path, name: str, ranks: int, *more: object) -> list[float]:
    """`train_plain.py` as a user starts it, on this project's own text."""
    options = ["--text", TEMPLATE.parent, "--iterations", 4, "--metrics", folder / name, *more]
    ranked = of_a_world(ranks) if ranks > 1 else [outside_slurm()]
    started = [Script(TEMPLATE, *options, environment=each) for each in ranked]
    for ended in [script.wait(60) for script in started]:
        assert ended.returncode == 0, ended
    return [each["loss"] for each in read_metrics(folder / name)]


def test_the_template_trains_alike_on_any_number_of_ranks_and_goes_on_from_its_checkpoint(tmp_path):
    alone = losses_of_the_template(tmp_path, "alone", 1, "--save", tmp_path / "saves")
    assert alone[-1] < alone[0] and 5.0 < alone[0] < 6.5  # ln 256 = 5.5: an untrained model knows nothing
    assert losses_of_the_template(tmp_path, "three", 3) == pytest.approx(alone, rel=LOSSES)
    longer = losses_of_the_template(tmp_path, "longer", 1, "--save", tmp_path / "saves", "--iterations", 6)
    assert len(longer) == 2 and longer[-1] < alone[0]


def test_a_folder_without_text_is_one_line(tmp_path):
    ended = Script(TEMPLATE, "--text", tmp_path, environment=outside_slurm()).wait(60)
    assert (
        ended.returncode == 1 and ended.stderr.startswith("train_plain: no text in ") and ended.stderr.count("\n") == 1
    )
