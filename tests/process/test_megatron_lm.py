"""Megatron-LM's own programs, unmodified, are healed within the iteration: a stand-in with its seams, and the real one
where UNICRON_MEGATRON_LM names a checkout (CONTRIBUTING.md)."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support import megatron_lm
from tests.support.jobs import World
from tests.support.processes import call, of_a_world, outside_slurm
from tests.support.warm import Script
from unicron_transition.seams import megatron_lm as seams
from unicron_transition.seams import table
from unicron_transition.snapshot.formats import convert, opening

SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather".split()
TENSOR = ["--tensor-model-parallel-size", "2"]
MANY = 5000  # iterations, of a job that is asked to end
PATIENCE = 240.0  # seconds, for imports on a busy machine
# fp32, sums in another order; the logs have seven digits. Seen: 6e-7.
TOLERANCE = 1e-5

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def undisturbed(command: Sequence[str], ranks: int) -> list[megatron_lm.Line]:
    """What a program with the installed Megatron logs in a world of torchrun's, without Unicron."""
    return megatron_lm.lines(undisturbed_log(command, ranks))


def undisturbed_log(command: Sequence[str], ranks: int) -> str:
    """All that it writes."""
    started = [Script(*command[1:], environment=each) for each in of_a_world(ranks)]
    ended = [each.wait(PATIENCE) for each in started]
    assert [each.returncode for each in ended] == [0] * ranks, ended[0].stderr[-3000:]
    return "\n".join(each.stdout + each.stderr for each in ended)


def undisturbed_with_its_own(command: Sequence[str], ranks: int) -> str:
    """What a program writes that brings a Megatron: an interpreter for each rank, which has imported no other."""
    environments = [each | {"OMP_NUM_THREADS": "1"} for each in of_a_world(ranks)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen(command, env=each, **output) for each in environments]
    try:
        logs = [process.communicate(timeout=PATIENCE)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * ranks, logs[0][-3000:]
    return "\n".join(logs)


def healed(folder: Path, command: Sequence[str], victim: int) -> tuple[list[megatron_lm.Line], str]:
    """Two nodes with two ranks each: one rank is killed, comes back, and then the job is asked to end."""
    settings = {"UNICRON_MODE": "session", "UNICRON_RANKS_PER_NODE": "2"}
    with World(folder, 2, command=command, **settings) as world:
        world.trains_on([0, 1, 2, 3], limit=PATIENCE)
        os.kill(world.rank(victim)["pid"], signal.SIGKILL)
        world.wait(lambda: len(world.job()["members"]) < 4, "the others go on")
        world.trains_on([0, 1, 2, 3], limit=PATIENCE)
        world.agents[0].process.send_signal(signal.SIGUSR1)  # to one agent only
        assert world.array.wait() == [0, 0], world.array.logs[-3000:]
        return megatron_lm.lines(world.array.logs), world.array.logs


def check(found: list[megatron_lm.Line], wanted: list[megatron_lm.Line], samples: int, log: str) -> None:
    """Every iteration is logged once, with the loss and the norm of the undisturbed run."""
    found = sorted(found, key=lambda line: line.iteration)
    assert [line.iteration for line in found] == list(range(1, len(found) + 1)), log[-3000:]
    assert [line.samples for line in found] == [samples * line.iteration for line in found]
    for what in ("loss", "norm"):
        theirs = [getattr(line, what) for line in wanted]
        digits = 1e-3 if what == "norm" else 0.0  # of the norm the log has three
        assert [getattr(line, what) for line in found] == pytest.approx(theirs, rel=TOLERANCE, abs=digits)


@pytest.mark.parametrize("options", [TENSOR, pytest.param(SHARDED, marks=pytest.mark.long)])
def test_the_stand_in_goes_on_as_if_nothing_had_been(dataset, tmp_path, options):
    """A living rank of the lost one's replica stands by meanwhile, and begins its loop again where the others are. The
    last rank writes the log, so it is not the one that is killed."""
    command = megatron_lm.stand_in(dataset, *options, "--train-iterations", str(MANY))
    found, log = healed(tmp_path, [*command, "--micro-batch-seconds", "0.05"], 1)
    assert "pretrain_stand_in.py by unicron.transition.megatron_lm" in log
    assert f": the training ends after iteration {len(found)}" in log
    wanted = undisturbed([*command, "--exit-interval", str(len(found))], 2)
    check(found, wanted, 16, log)


def test_an_iteration_that_ends_the_job_ends_it_for_all(dataset, tmp_path):
    command = megatron_lm.stand_in(dataset, "--train-iterations", str(MANY), "--exit-interval", "4")
    with World(tmp_path, 2, command=command, UNICRON_MODE="session") as world:
        assert world.array.wait() == [0, 0], world.array.logs[-3000:]
        assert [line.iteration for line in megatron_lm.lines(world.array.logs)] == [1, 2, 3, 4]


@pytest.mark.long
def test_what_is_saved_is_gone_on_from(dataset, tmp_path):
    """By any number of ranks; without an agent, too."""
    words = ["--train-iterations", "6", "--save-dir", str(tmp_path / "saves"), "--save-interval", "2"]
    command = megatron_lm.stand_in(dataset, *words)
    launched = [command[0], *megatron_lm.LAUNCHER, *command[1:]]
    first = undisturbed([*launched, "--exit-interval", "4"], 2)
    assert [line.iteration for line in first] == [1, 2, 3, 4]
    again = undisturbed([*launched, *SHARDED], 1)
    assert [(line.iteration, line.samples) for line in again] == [(5, 80), (6, 96)]
    check(first + again, undisturbed(megatron_lm.stand_in(dataset, *words[:2]), 1), 16, "")


@pytest.mark.wide
@pytest.mark.parametrize("options", [[], SHARDED], ids=["whole", "sharded"])
def test_a_fine_tuning_begins_with_the_parameters_alone(dataset, tmp_path, options):
    """At iteration 0, with the first samples; once it has saved, it goes on from there."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    words = ["--train-iterations", "8", "--save-interval", "2"]
    command = megatron_lm.stand_in(dataset, *words)
    launched = [command[0], *megatron_lm.LAUNCHER, *command[1:], *options]
    trained = undisturbed([*launched, "--save-dir", first], 2)
    tuning = [*launched, "--save-dir", second, "--load-dir", first, "--finetune", "1"]
    tuned = undisturbed([*tuning, "--exit-interval", "4"], 2)
    assert [(line.iteration, line.samples) for line in tuned] == [(number, 16 * number) for number in range(1, 5)]
    assert tuned[0].loss < trained[0].loss - 0.1, "the same samples, after eight iterations"
    assert [line.iteration for line in undisturbed(tuning, 2)] == [5, 6, 7, 8]


EVALUATES = "--train-iterations 14 --eval-interval 3 --eval-iters 4 --micro-batch-seconds 0.02".split()


@pytest.mark.wide
@pytest.mark.parametrize("options", [TENSOR, SHARDED])
def test_a_loss_in_an_evaluation_changes_neither_it_nor_the_training(dataset, tmp_path, options):
    """Killed as soon as the iteration before the evaluation is logged; the evaluations after the training are there,
    too."""
    command = megatron_lm.stand_in(dataset, *EVALUATES, *options)
    settings = {"UNICRON_MODE": "session", "UNICRON_RANKS_PER_NODE": "2"}
    with World(tmp_path, 2, command=command, **settings) as world:
        world.trains_on([0, 1, 2, 3], limit=PATIENCE)
        victim = world.rank(1)["pid"]
        world.wait(lambda: any(line.iteration == 6 for line in megatron_lm.lines(world.array.logs)), "iteration 6")
        os.kill(victim, signal.SIGKILL)
        assert world.array.wait() == [0, 0], world.array.logs[-3000:]
        log = world.array.logs
    wanted = undisturbed_log(command, 2)
    check(megatron_lm.lines(log), megatron_lm.lines(wanted), 16, log)
    found, theirs = megatron_lm.values(log), megatron_lm.values(wanted)
    assert (
        [where for where, _ in found]
        == [where for where, _ in theirs]
        == [
            *(f"iteration {iteration}" for iteration in (3, 6, 9, 12)),
            *(f"iteration 14 on {what} set" for what in ("validation", "test")),
        ]
    )
    assert [value for _, value in found] == pytest.approx([value for _, value in theirs], rel=TOLERANCE)


EXPERTS = "--num-experts 4 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 --mtp-num-layers 1".split()
COMMUNICATE = "--log-params-norm 1 --log-straggler 1 --check-weight-hash-across-dp-replicas-interval 2".split()
LOGGED = ("params norm", "load_balancing_loss", "z_loss", "mtp_1 loss")


@pytest.mark.wide
@pytest.mark.parametrize("options", [[], SHARDED], ids=["whole", "sharded"])
def test_a_loss_between_two_iterations_leaves_out_their_numbers_alone(dataset, tmp_path, options):
    """A rank dies where the others wait for it to log the norm of the parameters. The numbers of all other iterations
    are those of all ranks, and all checks but one are made."""
    command = megatron_lm.stand_in(dataset, *EXPERTS, *COMMUNICATE, *options, "--train-iterations", "20")
    dies = ["--micro-batch-seconds", "0.02", "--dies", f"6 {tmp_path / 'died'}"]
    with World(tmp_path, 2, command=[*command, *dies], UNICRON_MODE="session") as world:
        assert world.array.wait() == [0, 0], world.array.logs[-3000:]
        log = world.array.logs
    wanted = undisturbed_log(command, 2)
    check(megatron_lm.lines(log), megatron_lm.lines(wanted), 16, log)
    for name in LOGGED[1:] if options else LOGGED:  # the stand-in's norm is of what the ranks have not gathered yet
        found, theirs = megatron_lm.numbers(log, name), megatron_lm.numbers(wanted, name)
        assert theirs.keys() - found.keys() == {6} and len(found) == 19, name
        if name != "z_loss":  # Megatron-core itself logs that of the last rank alone
            assert found == pytest.approx({at: theirs[at] for at in found}, rel=1e-4), name
    hashes = "Weight hashes match after {} iterations"
    assert [at for at in range(21) if hashes.format(at) in log] == [2, 4, *range(8, 21, 2)]
    assert "left out: a rank was lost meanwhile" in log


def killed_and_back(tmp_path: Path, command: list[str]) -> str:
    """The log of two ranks, of which the last is killed and comes back."""
    with World(tmp_path, 2, command=command, UNICRON_MODE="session") as world:
        world.trains_on([0, 1], limit=PATIENCE)
        os.kill(world.rank(1)["pid"], signal.SIGKILL)
        world.wait(lambda: len(world.job()["members"]) < 2, "the other goes on")
        world.trains_on([0, 1], limit=PATIENCE)
        assert world.array.wait() == [0, 0], world.array.logs[-3000:]
        return world.array.logs


@pytest.mark.wide
def test_tensorboard_is_written_by_whoever_is_the_last_rank(dataset, tmp_path):
    """The last one is killed, and comes back as the last one. What it had not logged yet is not there."""
    command = megatron_lm.stand_in(
        dataset, "--train-iterations", "60", "--micro-batch-seconds", "0.05", "--tensorboard-dir", str(tmp_path / "tb")
    )
    log = killed_and_back(tmp_path, command)
    assert len([*(tmp_path / "tb").iterdir()]) == 3, log[-3000:]
    shown = megatron_lm.shown(tmp_path / "tb")
    logged = {line.iteration: line.loss for line in megatron_lm.lines(log) if line.iteration != 2}  # that of two
    assert len(shown) >= 59 and shown.keys() >= logged.keys()
    assert {step: shown[step] for step in logged} == pytest.approx(logged, rel=TOLERANCE)


@pytest.mark.wide
def test_a_batch_that_grows_is_the_same_after_a_loss(dataset, tmp_path):
    """From 4 samples to 16 by 4, over 120; a rank is killed on the way, and comes back. Since 0.18 Megatron ignores the
    option, and it is refused."""
    words = ["--train-iterations", "60", "--rampup-batch-size", "4 4 120", "--micro-batch-seconds", "0.05"]
    command = megatron_lm.stand_in(dataset, *words)
    if seams.growing_batches() is None:
        done = Script(*megatron_lm.LAUNCHER, *command[1:], environment=outside_slurm()).wait(PATIENCE)
        assert done.returncode == 1 and "--rampup-batch-size, which this Megatron-LM ignores" in done.stderr
        return
    log = killed_and_back(tmp_path, command)
    found, wanted = sorted(megatron_lm.lines(log), key=lambda line: line.iteration), undisturbed(command, 1)
    assert [(line.iteration, line.samples) for line in found] == [(line.iteration, line.samples) for line in wanted]
    assert len({after.samples - before.samples for before, after in itertools.pairwise(wanted)}) == 4
    assert [line.loss for line in found] == pytest.approx([line.loss for line in wanted], rel=TOLERANCE)


def test_what_cannot_be_healed_is_one_line(dataset, tmp_path):
    command = megatron_lm.stand_in(dataset, "--non-persistent-save-interval", "10")
    done = Script(*megatron_lm.LAUNCHER, *command[1:], environment=outside_slurm()).wait(PATIENCE)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "unicron: can't heal --non-persistent-save-interval: leave it out, ranks keep the state in memory; or run the "
        "job with --unicron-mode=restart"
    )
    script = tmp_path / "train.py"
    script.write_text("")
    done = Script(*megatron_lm.LAUNCHER, script, environment=outside_slurm()).wait(PATIENCE)
    if find_spec("megatron.training") is None:
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.splitlines()[-1].startswith("unicron: no megatron.training beside the script or in PYTHON")
    else:  # megatron-core's wheel has it from 0.17 on, and the script does nothing
        assert (done.returncode, done.stdout) == (0, "")
    done = call(sys.executable, *megatron_lm.LAUNCHER, tmp_path / "gone.py")
    assert (done.returncode, done.stderr) == (2, f"unicron: {tmp_path}/gone.py: no such file; check the path\n")


OTHER = """
import sys
sys.path.insert(0, {folder!r})
from unicron_transition.seams import megatron_lm as seams
seams.check()
import megatron.core, megatron.training.training as training
def refusal():
    try:
        seams.check()
    except seams.CannotHeal as error:
        print(error)
training.train_step = lambda forward_step_func, data_iterator: None
refusal()
del training.train_step
refusal()
megatron.core.__version__ = "0.99.0"
refusal()
"""


def test_a_release_that_is_not_known_is_refused(tmp_path):
    script = tmp_path / "other.py"
    script.write_text(OTHER.format(folder=str(megatron_lm.HERE)))
    done = Script(script, environment=outside_slurm()).wait(PATIENCE)
    instead = "check one of those out, or run the job with --unicron-mode=restart"
    named = f"this is not Megatron-LM core_v{version('megatron-core')}, in which {table.TRAINING}.train_step"
    tested = ", ".join(f"core_v{each}" for each in table.KNOWN_RELEASES["megatron-core"])
    assert done.stdout.splitlines()[-3:] == [
        f"{named} takes (forward_step_func, data_iterator): {instead}",
        f"{named} is not there: {instead}",
        f"knows Megatron-LM {tested}, and this is core_v0.99.0: {instead}; UNICRON_TRUST_VERSIONS=1 tries it",
    ], done


# ------------------------------------------------------------ the real one
SHARED_EXPERTS = (
    "--num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 "
    "--moe-router-load-balancing-type aux_loss --disable-bias-linear --check-weight-hash-across-dp-replicas-interval 4"
).split()


@pytest.mark.megatron_lm
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(4, TENSOR), (4, SHARDED), (4, SHARED_EXPERTS), (4, SHARED_EXPERTS + SHARDED)],
    ids=["tensor", "sharded", "experts", "sharded-experts"],
)
def test_the_real_program_goes_on_as_if_nothing_had_been(tmp_path, ranks, options):
    command = megatron_lm.real(*options, "--train-iters", str(MANY), healed=True)
    found, log = healed(tmp_path, command, 1)
    plain = megatron_lm.real(*options, "--train-iters", str(MANY), healed=False)
    wanted = megatron_lm.lines(undisturbed_with_its_own([*plain, "--exit-interval", str(len(found))], ranks))
    # Megatron-LM puts its first iteration into the mean of the second line once more, in a loop that begins anew, too.
    check(found, wanted, 8, log)


@pytest.mark.megatron_lm
@pytest.mark.parametrize("options", [TENSOR, SHARDED], ids=["tensor", "sharded"])
def test_the_real_program_evaluates_as_if_nothing_had_been(tmp_path, options):
    """A rank is killed as soon as the iteration before an evaluation is logged."""
    words = "--train-iters 20 --eval-interval 5 --eval-iters 8".split()
    settings = {"UNICRON_MODE": "session", "UNICRON_RANKS_PER_NODE": "2"}
    with World(tmp_path, 2, command=megatron_lm.real(*options, *words, healed=True), **settings) as world:
        world.trains_on([0, 1, 2, 3], limit=PATIENCE)
        victim = world.rank(1)["pid"]
        world.wait(lambda: any(line.iteration == 10 for line in megatron_lm.lines(world.array.logs)), "iteration 10")
        os.kill(victim, signal.SIGKILL)
        assert world.array.wait() == [0, 0], world.array.logs[-3000:]
        log = world.array.logs
    wanted = undisturbed_with_its_own(megatron_lm.real(*options, *words, healed=False), 4)
    check(megatron_lm.lines(log), megatron_lm.lines(wanted), 8, log)
    found, theirs = megatron_lm.values(log), megatron_lm.values(wanted)
    assert [where for where, _ in found] == [where for where, _ in theirs]
    assert len(found) == 6
    assert [value for _, value in found] == pytest.approx([value for _, value in theirs], rel=TOLERANCE)


EIGHT = ["--train-iters", "8"]
LLAMAS = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--ffn-hidden-size 128 --train-iters 2"
).split()


@pytest.mark.megatron_lm
@pytest.mark.parametrize("options", [[], SHARDED], ids=["whole", "sharded"])
def test_the_real_program_goes_on_from_an_export(tmp_path, options):
    """options: of the session. Megatron's distributed optimizer loads no checkpoint without Transformer Engine's."""
    saves, out = tmp_path / "saves", tmp_path / "out"
    words = [*EIGHT, *options, "--save", str(saves), "--exit-interval", "4"]
    undisturbed_with_its_own(megatron_lm.real(*words, healed=True), 1)
    said: list[str] = []
    convert.export(opening.index_of(saves), out, "torch_dist", say=said.append)
    assert said == []
    again = undisturbed_with_its_own(megatron_lm.real(*EIGHT, "--load", str(out), healed=False), 1)
    wanted = undisturbed_with_its_own(megatron_lm.real(*EIGHT, healed=False), 1)
    found, losses = megatron_lm.lines(again), [line.loss for line in megatron_lm.lines(wanted)[4:]]
    losses[1] = sum(losses[:2]) / 2  # a loop that begins anew has its first iteration in the second line, too
    assert [(line.iteration, line.samples) for line in found] == [(number, 8 * number) for number in range(5, 9)]
    assert [line.loss for line in found] == pytest.approx(losses, rel=TOLERANCE)


@pytest.mark.megatron_lm
def test_the_real_program_takes_a_model_of_hugging_faces_without_finetune(tmp_path):
    layer = {
        **dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (64,)),
        **{f"self_attn.{one}_proj.weight": (64, 64) for one in "qkvo"},
        **{f"mlp.{one}_proj.weight": (128, 64) for one in ("gate", "up")},
        "mlp.down_proj.weight": (64, 128),
    }
    shapes = {f"layers.{number}.{name}": shape for number in range(2) for name, shape in layer.items()}
    shapes |= {"embed_tokens.weight": (257, 64), "norm.weight": (64,), "lm_head.weight": (257, 64)}
    torch.manual_seed(1)
    (theirs := tmp_path / "hf").mkdir()
    save_file({name: 0.02 * torch.randn(shape) for name, shape in shapes.items()}, theirs / "model.safetensors")
    about = {"num_attention_heads": 4, "hidden_act": "silu", "rope_theta": 10000.0, "max_position_embeddings": 64}
    (theirs / "config.json").write_text(json.dumps(about))
    convert.export(opening.index_of(theirs), tmp_path / "out", "torch_dist")
    load = ["--load", str(tmp_path / "out")]
    one, other = (
        megatron_lm.lines(undisturbed_with_its_own(megatron_lm.real(*LLAMAS, *load, *more, healed=False), 1))
        for more in ([], ["--finetune"])
    )
    assert [line.iteration for line in one] == [1, 2] and one == other
