"""Megatron-LM's options, samples and folders in the launcher; tests/process/test_megatron_lm.py tries its seams."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.support.texts import raises_text
from unicron_transition.generations.layout import Layout
from unicron_transition.megatron import limits
from unicron_transition.megatron_lm import arguments, data, loop, save_load, world
from unicron_transition.seams.megatron_lm import CannotHeal, growing_batches
from unicron_transition.session.session import StepResult
from unicron_transition.snapshot.checkpoint import CheckpointError, Checkpoints, Writer
from unicron_transition.snapshot.formats import opening, write_dcp
from unicron_transition.snapshot.formats.tracker import TRACKER
from unicron_transition.snapshot.migrate import TrainingState


def args(**more):
    """Return the arguments of a run that can be healed."""
    plain = {
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 1,
        "pipeline_model_parallel_size": 4,
        "global_batch_size": 16,
        "micro_batch_size": 2,
        "distributed_backend": "nccl",
        "optimizer": "adam",
        "dataloader_type": "single",
        "cuda_graph_impl": "none",
        "eval_iters": 100,
        "save": None,
        "load": None,
        "save_interval": None,
        "async_save": True,
    }
    return SimpleNamespace(**plain | more)


# ------------------------------------------------------------ options
def test_what_can_be_healed_is_not_refused():
    with pytest.raises(CannotHeal):
        arguments.check(args(num_experts=2, moe_enable_routing_replay=True))
    arguments.check(args())
    arguments.check(args(num_experts=2, moe_router_load_balancing_type="aux_loss", log_straggler=True))
    arguments.check(args(log_params_norm=True, check_weight_hash_across_dp_replicas_interval=10, mtp_num_layers=None))
    arguments.check(args(mtp_num_layers=1, untie_embeddings_and_output_weights=True))
    arguments.check(args(tensor_parallel_num_weight_shards=2, num_experts=None, fim_data=False, eval_iters=None))


def test_batches_grow_where_megatron_has_them_grow(snapshot):
    growing = args(rampup_batch_size=["4", "4", "100"])
    if growing_batches() is not None:
        arguments.check(growing)
    else:
        with raises_text(CannotHeal, snapshot):
            arguments.check(growing)


@pytest.mark.parametrize("name", sorted(arguments.REFUSED_OPTIONS))
def test_each_of_the_others_is_refused_by_its_name(name):
    with pytest.raises(CannotHeal) as found:
        arguments.check(args(**{name: 3}))
    option = "--use-nccl-ub" if name == "nccl_ub" else "--" + name.replace("_", "-")
    assert str(found.value).startswith(f"can't heal {option}")
    assert str(found.value).endswith("--unicron-mode=restart")


@pytest.mark.parametrize("limit", limits.LIMITS, ids=lambda limit: limit.name)
def test_a_limit_of_sessions_is_one_of_programs(limit):
    words = {"moe_router_load_balancing_type": "global_aux_loss", "moe_token_dispatcher_type": "flex"}
    value = words.get(limit.name, 3)
    with pytest.raises(CannotHeal) as found:
        arguments.check(args(**{arguments.OPTIONS.get(limit.name, limit.name): value}))
    assert limit.words in str(found.value)


@pytest.mark.parametrize(
    "more",
    [
        {"mtp_num_layers": 1},
        {"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]},
        {"context_parallel_size": 2},
        {"dataloader_type": "cyclic"},
        {"cuda_graph_impl": "local"},
        {"eval_micro_batch_size": 4},
        {"distributed_backend": "ucc"},
        {"optimizer": "muon"},
        {"tensor_parallel_num_weight_shards": 4},
        {"global_batch_size": None},
    ],
    ids=lambda more: next(iter(more)),
)
def test_values_that_are_refused(more, snapshot):
    with raises_text(CannotHeal, snapshot):
        arguments.check(args(**more))


def test_the_layout_and_the_folders_are_taken_from_the_arguments():
    given = args(save="/s", load="/l", save_interval=500)
    assert arguments.layout_of(given) == Layout(tensor=2, pipeline=4)
    assert arguments.layout_of(args(expert_model_parallel_size=4)) == Layout(tensor=2, pipeline=4, expert=4)
    narrow = args(expert_model_parallel_size=4, expert_tensor_parallel_size=1)
    assert arguments.layout_of(narrow) == Layout(tensor=2, pipeline=4, expert=2)
    assert arguments.take_folders(given) == arguments.Folders(Path("/s"), Path("/l"), 500, False)
    assert (given.save, given.load, given.async_save) == (None, None, False), "Megatron-LM itself saves nothing"


@pytest.mark.parametrize("more", [{}, {"save": "/s"}, {"load": "/s", "save": "/s"}])
def test_a_fine_tuning_has_a_folder_to_begin_from(more, snapshot):
    with raises_text(CannotHeal, snapshot):
        arguments.take_folders(args(finetune=True, **more))
    given = args(finetune=True, load="/l", save="/s")
    assert not arguments.take_folders(given).iteration and not given.finetune


# ------------------------------------------------------------ world
@pytest.mark.parametrize(
    ("environment", "home"),
    [
        ({"UNICRON_SLOT": "21", "RANK": "0", "WORLD_SIZE": "1"}, (2, 5)),
        ({"RANK": "5", "WORLD_SIZE": "16"}, (0, 3)),  # each stage has four ranks, of two replicas
        ({"RANK": "3", "WORLD_SIZE": "16"}, (1, 1)),
        ({}, (0, 0)),
    ],
)
def test_where_a_rank_is_at_home(monkeypatch, environment, home):
    for name in ("UNICRON_SLOT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = world.World()
    found.layout = Layout(tensor=2, pipeline=4)
    assert found._home() == home


def test_the_batch_of_the_loop_is_that_of_one_replica():
    """Defect: the buffers of 0.18 were laid out for one replica, too, and the job was refused."""
    mpu = SimpleNamespace(
        get_data_parallel_world_size=lambda with_context_parallel: 8, get_tensor_model_parallel_rank=lambda: 1
    )
    seen = world._AsOneReplica(mpu)
    assert seen.get_data_parallel_world_size() == 1
    assert world._AsOneReplica(mpu, lambda: 2).get_data_parallel_world_size() == 2, "lanes that share experts"
    assert seen.get_data_parallel_world_size(with_context_parallel=True) == 8
    assert seen.get_tensor_model_parallel_rank() == 1


# ------------------------------------------------------------ data
def dealt(replicas: int, iterations: int, whole: int, micro: int):
    """Return (iteration, replica) -> its micro-batches, from Megatron-LM's sampler."""
    found, sample = {}, 0
    for iteration in range(iterations):
        for _ in range(whole // (micro * replicas)):
            for replica in range(replicas):
                found.setdefault((iteration, replica), []).append(list(range(sample, sample + micro)))
                sample += micro
    return found


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_micro_batch_has_the_samples_that_megatron_gives_it(replicas):
    samples = data.Samples([{"tokens": torch.tensor([number])} for number in range(64)], 2)
    for (iteration, replica), wanted_ones in dealt(replicas, 4, 16, 2).items():
        for number, wanted in enumerate(wanted_ones):
            found = samples(16 * iteration, replica + number * replicas)
            assert found["tokens"].flatten().tolist() == wanted


def test_ranks_without_a_dataset_have_nothing_to_fetch():
    assert data.Samples(None, 2)(48, 1) is None
    there = data.Samples([], 2)
    assert data.built_samples([data.Samples(None, 2), there]) is there, "of the virtual stages, the one that has them"


@pytest.mark.parametrize(
    ("more", "valid", "test"),
    [
        ({}, True, True),
        ({"split": "99,1,0"}, True, False),
        ({"split": "100"}, False, False),
        ({"train_data_path": ["a"], "valid_data_path": ["b"], "test_data_path": None}, True, False),
        ({"eval_iters": 0}, False, False),
    ],
)
def test_what_there_is_to_evaluate_is_known_without_a_dataset(more, valid, test):
    assert data._has_samples(args(**more)) == {"train": True, "valid": valid, "test": test}


@pytest.mark.parametrize("ramp", [None, [4, 4, 120], [8, 8, 1000]])
def test_batches_are_those_of_megatrons_own_calculator(ramp):
    from megatron.core import num_microbatches_calculator as calculator

    # Releases since 0.18 have no ramp: with them each case is that of batches which do not grow.
    ramp = ramp if growing_batches() is not None else None
    options = {"rampup_batch_size": ramp} if growing_batches() is not None else {}
    mine = data.Batches(args(rampup_batch_size=ramp and list(map(str, ramp))))
    calculator.unset_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(
        rank=1, global_batch_size=16, micro_batch_size=2, data_parallel_size=1, **options
    )
    try:
        consumed = 0
        for iteration in range(100):
            calculator.update_num_microbatches(consumed, consistency_check=False)
            wanted = calculator.get_num_microbatches()
            assert (mine.before(iteration), mine.micro_batches(iteration)) == (consumed, wanted)
            consumed += 2 * wanted
    finally:
        calculator.unset_num_microbatches_calculator()


def test_datasets_are_built_as_if_alone(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 7 if group is None else 3)
    with pytest.raises(ZeroDivisionError), data.as_if_alone():
        assert (dist.is_initialized(), dist.get_rank(), dist.get_rank("a group")) == (False, 0, 3)
        raise ZeroDivisionError
    assert (dist.is_initialized(), dist.get_rank()) == (True, 7)


# ------------------------------------------------------------ the loop
@pytest.fixture
def stepping(monkeypatch):
    """steps(results) -> (the loop's training step, which takes an iteration; the loop)."""
    from megatron.core import parallel_state

    given = SimpleNamespace(exit_signal_handler=False, exit_duration_in_mins=None, train_iters=9, iteration=0)
    megatron = SimpleNamespace(get_args=lambda: given, get_signal_handler=lambda: None)
    monkeypatch.setitem(sys.modules, "megatron.training", megatron)
    monkeypatch.setattr(parallel_state, "is_pipeline_last_stage", lambda ignore_virtual: True)

    def steps(*iterations):
        running = loop.Loop(SimpleNamespace(follow=lambda: None))
        running._session = SimpleNamespace(request_stop=lambda: None)
        results = (StepResult(number, number / 2, 1.5, 1e-3, 0.1, 1, 4) for number in iterations)
        running._results = iter(results)
        model = [torch.nn.Linear(1, 1)]
        return lambda iteration: running._train_step(None, None, model, None, None, None, None, iteration), running

    return steps


def test_a_step_is_what_the_loop_wants_of_it(stepping):
    step, _ = stepping(3, 4)
    losses, *others = step(3)
    assert ({key: value.tolist() for key, value in losses.items()}, others) == (
        {"lm loss": [1.5]},
        [0, False, False, 0, 1.5, None, 0],
    )
    assert step(4)[0]["lm loss"].item() == 2.0


@pytest.mark.parametrize("ended", [False, True])
def test_a_rank_that_was_left_out_begins_its_loop_where_the_others_are(stepping, ended):
    step, running = stepping(*[3] if ended else [3, 7])
    step(3)
    with pytest.raises(loop._Elsewhere):
        step(4)
    assert running._over == ended, "the others may have reached the end"
    if not ended:
        assert running._ahead.iteration == 7
        assert step(7)[0]["lm loss"].item() == 3.5, "the step that was made is the loop's first one"


# ------------------------------------------------------------ checkpoints
def folders(save: Path | None, load: Path | None, interval: int = 2, needed: bool = False) -> arguments.Folders:
    return arguments.Folders(save, load, interval, needed)


def made_of(given: arguments.Folders) -> save_load.LauncherCheckpoints | None:
    return save_load.checkpoints(given, lambda iteration: 12 * iteration)


def iterations(found: save_load.LauncherCheckpoints) -> list[int]:
    return [each.iteration for each in found.choices()]


def test_without_save_nothing_is_written(tmp_path):
    assert made_of(folders(None, None)) is None
    found = made_of(folders(None, tmp_path))
    assert not found.is_due(2)
    found.save_last(None, 2)
    found.rescue(None, 2)
    assert list(tmp_path.iterdir()) == []
    assert made_of(folders(tmp_path, None)).is_due(2)


def test_a_folder_of_megatrons_own_that_cannot_be_used_is_told_of_at_once(tmp_path, snapshot):
    (tmp_path / TRACKER).write_text("100")
    with raises_text(CheckpointError, snapshot, tmp_path):
        made_of(folders(None, tmp_path))
    (tmp_path / "iter_0000100" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"")
    with raises_text(CheckpointError, snapshot, tmp_path):
        made_of(folders(None, tmp_path))


@pytest.mark.parametrize(("samples", "iterations", "warnings"), [(84, True, 0), (80, True, 1), (80, False, 0)])
def test_other_data_than_those_that_follow_are_never_taken_silently(tmp_path, capsys, samples, iterations, warnings):
    model = torch.nn.Linear(2, 2)
    state = TrainingState([model], torch.optim.AdamW(model.parameters()), None)
    Checkpoints(tmp_path / "saves").save_last(state, 7)
    index = opening.index_of(tmp_path / "saves")
    index.common.facts.arguments["consumed_train_samples"] = samples
    (at := tmp_path / "theirs" / "iter_0000007").mkdir(parents=True)
    write_dcp.write_torch_dist(at, index)
    (tmp_path / "theirs" / TRACKER).write_text("7")
    given = arguments.Folders(None, tmp_path / "theirs", 0, False, iteration=iterations)
    assert made_of(given).load(state) == (7 if iterations else 0)
    lines = capsys.readouterr().err
    assert len(re.findall(rf"sample 84, .* iteration 7 .* {samples} samples", lines)) == warnings


def test_an_older_checkpoint_of_unicrons_is_not_taken_for_megatrons_newer_one(tmp_path, snapshot):
    """Defect: in one folder for both, with --save X --load X, the training went back to the older one."""
    made(tmp_path, 5)
    (tmp_path / TRACKER).write_text("5")
    assert iterations(made_of(folders(tmp_path, tmp_path))) == [5]
    (tmp_path / TRACKER).write_text("7")
    with raises_text(CheckpointError, snapshot, tmp_path):
        made_of(folders(tmp_path, tmp_path))


def test_a_checkpoint_that_has_to_be_there(tmp_path, capsys):
    assert made_of(folders(None, tmp_path)).load(None) is None
    assert f"--load {tmp_path} has no checkpoint" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="--exit-on-missing-checkpoint is given"):
        made_of(folders(None, tmp_path, needed=True)).load(None)


def made(folder: Path, iteration: int) -> None:
    """Make a checkpoint that is whole by its name."""
    path = folder / f"iteration-{iteration}"
    path.mkdir(parents=True)
    (path / Writer().name).write_text("")


def test_what_ranks_could_begin_with_is_in_the_folder_to_save_in_and_else_in_the_other(tmp_path):
    made(tmp_path / "load", 40)
    both = made_of(folders(tmp_path / "save", tmp_path / "load"))
    assert iterations(both) == [40] and both.destination == tmp_path / "save"
    made(tmp_path / "save", 7)
    assert iterations(both) == [7]
    assert made_of(folders(None, tmp_path / "load")).destination is None
    with pytest.raises(CheckpointError, match="--exit-on-missing-checkpoint is given"):
        made_of(folders(None, tmp_path, needed=True)).choices()


def test_the_folder_to_save_in_goes_before_the_one_to_load_from(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(
        save_load.Checkpoints, "load_one", lambda self, state, found: not read.append(found.folder.parent.name)
    )
    made(tmp_path / "load", 40)
    both = folders(tmp_path / "save", tmp_path / "load")
    made_of(both).load(None)
    made(tmp_path / "save", 7)
    made_of(both).load(None)
    made_of(both).load(None, 40)
    assert read == ["load", "save", "load"]
