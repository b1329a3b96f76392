"""The state of Megatron's distributed optimizer: the data-parallel size changes in place, and shards come from copies.

Real ranks with gloo, Megatron-core on CPU. Every change of size is compared, bit by bit, with plain Megatron that was
built for that size and given the same state.
"""

from __future__ import annotations

import functools
import json

import pytest
import torch

from tests.support.processes import ROOT, outside_slurm
from tests.support.sharded_states import merged
from tests.support.warm import Script
from unicron_transition.sharded.shard_exchange import TRIES

pytestmark = pytest.mark.process

SCRIPT = ROOT / "tests" / "support" / "sharded_gpt.py"
OVERLAP = {"overlap": True, "gather": True}
PHASES = [[[0, 1, 2, 3], 3], [[0, 1, 2], 2], [[3, 0, 1, 2], 2]]


def run(folder, expected=None, **settings):
    """All ranks to their end; `expected` exit codes by rank, 0 unless given."""
    folder.mkdir(exist_ok=True)
    ranks = sorted({rank for members, _ in settings["phases"] for rank in members})
    environment = outside_slurm() | {"OMP_NUM_THREADS": "1"}
    scripts = {rank: Script(SCRIPT, rank, folder, json.dumps(settings), environment=environment) for rank in ranks}
    ends = {rank: script.wait() for rank, script in scripts.items()}
    wrong = {rank: end.stderr[-3000:] for rank, end in ends.items() if end.returncode != (expected or {}).get(rank, 0)}
    assert not wrong, "\n".join(f"rank {rank}: {text}" for rank, text in wrong.items())
    fallen = {rank: end.stderr[-3000:] for rank, end in ends.items() if "Exception in thread" in end.stderr}
    assert not fallen, fallen  # the one that ends what the training thread waits for has to live on
    return {rank: end.stderr for rank, end in ends.items()}


def assert_same(one, other):
    """Two results of `merged`: all places, all states, all parameters, bit by bit."""
    assert set(one) == set(other)
    for place, (full, parameters, step) in one.items():
        wanted, their_parameters, their_step = other[place]
        assert step == their_step and set(full) == set(wanted)
        for name in full:
            assert torch.equal(parameters[name], their_parameters[name]), name
            for key in full[name]:
                assert torch.equal(full[name][key], wanted[name][key]), (name, key)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"bf16": True, "piece": 4000, "spoil": 2}, marks=pytest.mark.long),
        pytest.param({"overlap": True, "bf16": True, "copies": 2}, marks=pytest.mark.long),
        pytest.param({"overlap": True, "gather": True}, marks=pytest.mark.long),
        pytest.param({"tokens": True, "undo": True}, marks=pytest.mark.long),
    ],
    ids=lambda settings: "-".join(settings) or "fp32",
)
def test_changes_of_size_train_on_like_a_job_built_for_each_size(tmp_path, settings):
    """4 replicas, 3 without the last, 4 again with it as a newcomer, and as the first."""
    layout = {"phases": PHASES, "most": 4, **settings}
    run(tmp_path / "elastic", **layout)
    run(tmp_path / "fresh", **{**layout, "fresh": True, "undo": False})
    for number, (members, _) in enumerate(PHASES):
        elastic, fresh = (merged(tmp_path / kind, str(number), members) for kind in ("elastic", "fresh"))
        assert_same(elastic, fresh)


@pytest.mark.parametrize(
    ("settings", "phases"),
    [
        pytest.param(
            {"tp": 2, "undo": True}, [[[0, 1, 2, 3], 2], [[2, 3], 2], [[0, 1, 2, 3], 2]], marks=pytest.mark.long
        ),
        pytest.param(
            {"pp": 2, "bf16": True, "undo": True, "tokens": True},
            [[[0, 1, 2, 3], 2], [[0, 3], 2], [[0, 1, 2, 3], 2]],
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"pp": 2, "virtual": 2, **OVERLAP},
            [[[0, 1, 2, 3], 3], [[2, 1], 2], [[0, 1, 2, 3], 2]],
            marks=pytest.mark.long,
        ),
    ],
    ids=["tensor", "pipeline", "interleaved"],
)
def test_sizes_of_model_parallel_jobs(tmp_path, settings, phases):
    """The sums over tensor-parallel ranks and over the stages of a shared embedding are undone like the reduce.

    The second pipeline is composed of stages of both.
    """
    layout = {"phases": phases, "most": 2, **settings}
    run(tmp_path / "elastic", **layout)
    run(tmp_path / "fresh", **{**layout, "fresh": True, "undo": False})
    for number, (members, _) in enumerate(phases):
        assert_same(*(merged(tmp_path / kind, str(number), members) for kind in ("elastic", "fresh")))


GRADIENTS = 1e-6  # relative to a parameter's largest; one of twelve micro-batches missing would be 0.1


def test_what_always_arrives_corrupted_is_never_trained_with(tmp_path):
    """The newcomer gets its part from rank 0."""
    phases = [[[0, 1], 1], [[0, 1, 2], 1]]
    errors = run(tmp_path, dict.fromkeys([0, 1, 2], 1), phases=phases, most=4, spoil=TRIES)
    assert all("were spoiled on their way" in error for error in errors.values())
    assert not list(tmp_path.glob("state.1.*"))


ITERATIONS = 4
FAILED = 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """settings -> the states of a run of 4 replicas in which nothing fails, by version."""

    @functools.cache
    def go(overlap, bf16):
        folder = tmp_path_factory.mktemp("undisturbed")
        run(folder, phases=[[[0, 1, 2, 3], ITERATIONS]], most=4, record=True, overlap=overlap, bf16=bf16)
        return {version: merged(folder, f"v{version}", [0, 1, 2, 3]) for version in range(1, ITERATIONS + 1)}

    return go


@pytest.mark.parametrize(
    ("at", "version", "settings"),
    [
        pytest.param("forward:1", FAILED, {}, marks=pytest.mark.long),
        pytest.param("reduce:0", FAILED, {"bf16": True}, marks=pytest.mark.wide),
        pytest.param("reduce:1", FAILED, {**OVERLAP, "bf16": True}, marks=pytest.mark.long),
        pytest.param("committed:0", FAILED, {}, marks=pytest.mark.long),
        pytest.param("gather:0", FAILED, {"bf16": True}, marks=pytest.mark.long),
        ("gather:1", FAILED, OVERLAP),
        pytest.param("copy:0", FAILED, {}, marks=pytest.mark.long),
        pytest.param("copy:0", FAILED, OVERLAP, marks=pytest.mark.long),
        pytest.param("ack:0", FAILED + 1, {}, marks=pytest.mark.wide),
        pytest.param("ack:0", FAILED + 1, {**OVERLAP, "bf16": True}, marks=pytest.mark.long),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_a_rank_dies(tmp_path, undisturbed, at, version, settings):
    """Its shard comes from its partner, bit by bit; what it had computed is computed again, and nothing else."""
    heal(tmp_path, undisturbed, [2], at, version, settings)


@pytest.mark.parametrize(
    ("at", "version", "settings"),
    [
        pytest.param("reduce:0", FAILED, {}, marks=pytest.mark.long),
        pytest.param("copy:0", FAILED, {}, marks=pytest.mark.wide),
        ("copy:0", FAILED, OVERLAP),  # as in test_a_rank_dies, with which it shares the undisturbed run
        pytest.param("ack:0", FAILED + 1, {}, marks=pytest.mark.long),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_two_copies_bear_a_rank_and_its_partner(tmp_path, undisturbed, at, version, settings):
    """Both die at once."""
    heal(tmp_path, undisturbed, [1, 2], at, version, {"copies": 2, **settings})


@pytest.mark.wide
@pytest.mark.parametrize(
    "at",
    ["copy:0", *(pytest.param(at, marks=pytest.mark.long) for at in ("exchange:0", "gather:0", "ack:0", "reduce:0"))],
)
def test_a_second_rank_dies_before_there_are_new_copies(tmp_path, undisturbed, at):
    """What was held before is kept until the new copies are confirmed: the state is taken up once more."""
    then = {"ranks": [1], "at": at}
    heal(tmp_path, undisturbed, [2], "reduce:0", FAILED, {"copies": 2, "bf16": True}, then)


def heal(folder, undisturbed, ranks, at, version, settings, *then):
    states = undisturbed(settings.get("overlap", False), settings.get("bf16", False))
    kills = [{"ranks": ranks, "iteration": FAILED, "at": at}, *then]
    dead = {rank: -9 for kill in kills for rank in kill["ranks"]}
    run(folder, dead, phases=[[[0, 1, 2, 3], ITERATIONS]], most=4, record=True, kills=kills, **settings)
    left = [rank for rank in range(4) if rank not in dead]
    assert_same(merged(folder, "recovered", left), states[version])
    for later in range(version + 1, FAILED + 2):
        assert_same_gradients(merged(folder, f"v{later}", left), states[later])


def assert_same_gradients(one, other):
    """Adam's mean of the gradients tells whether each micro-batch is in them once; the order of their sum differs."""
    for place, (full, _, step) in one.items():
        wanted, _, their_step = other[place]
        assert step == their_step
        for name, state in full.items():
            difference = (state["exp_avg"] - wanted[name]["exp_avg"]).abs().max() / wanted[name]["exp_avg"].abs().max()
            print(f"{name}: gradients differ by {difference:.1e}")
            assert difference <= GRADIENTS, name
