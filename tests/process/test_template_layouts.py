"""The template's model in Megatron's own loop: one seed gives one training in every layout, with dropout too, and a
checkpoint of one layout is gone on with in any other."""

from __future__ import annotations

import json

import pytest

from tests.support.template_training import (
    INTERLEAVED,
    ITERATIONS,
    OVERLAP,
    PLAIN,
    PP,
    SESSION,
    SHARDED,
    TP,
    run,
    train,
)

DROPOUT = ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
# fp32: sums in another order. Seen: losses 9e-8, norms 6e-7.
TOLERANCE = 1e-5
# fp16 in slices of a tensor: each rank's part of a sum is rounded to 11 bits before it is sent. Seen: norms 3.3e-5.
ROUNDED = 2e-4

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def reference(dataset):
    return train(dataset, 1)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(2, "", marks=pytest.mark.long),
        pytest.param(2, SHARDED + OVERLAP + "--overlap-param-gather", marks=pytest.mark.long),
        pytest.param(2, TP, marks=pytest.mark.long),
        pytest.param(2, PP, marks=pytest.mark.long),
        pytest.param(2, INTERLEAVED + OVERLAP, marks=pytest.mark.long),
        pytest.param(4, TP + PP + SHARDED, marks=pytest.mark.wide),
        pytest.param(4, TP + SHARDED + OVERLAP + "--overlap-param-gather", marks=pytest.mark.long),
        pytest.param(4, INTERLEAVED + SHARDED + OVERLAP + "--overlap-param-gather", marks=pytest.mark.long),
        pytest.param(
            2, PP + "--decoder-first-pipeline-num-layers 3 --calculate-per-token-loss", marks=pytest.mark.wide
        ),
    ],
)
def test_one_seed_gives_one_training_in_every_layout(dataset, reference, ranks, options):
    found = train(dataset, ranks, *options.split())
    assert reference["losses"][-1] < reference["losses"][0] - 0.3
    assert found["losses"] == pytest.approx(reference["losses"], rel=TOLERANCE)
    assert found["norms"] == pytest.approx(reference["norms"], rel=TOLERANCE)


EXPERTS = "--num-experts 4 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 "
BIASES = (
    "--num-experts 4 --moe-router-enable-expert-bias --moe-router-score-function sigmoid "
    "--moe-router-load-balancing-type none --moe-router-bias-update-rate 0.01 "
)
FURTHER = "--mtp-num-layers 2 --untie-embeddings-and-output-weights "
FP16 = "--fp16 --initial-loss-scale 4194304 --hysteresis 1 "  # too large for two iterations or more


@pytest.mark.wide
@pytest.mark.parametrize(
    ("ranks", "layout", "model"),
    [
        pytest.param(2, INTERLEAVED, EXPERTS + FURTHER, marks=pytest.mark.long),
        (2, "", FP16 + BIASES + "--moe-input-jitter-eps 0.01 "),  # which is another in other layouts, as dropout is
        pytest.param(2, PP + SHARDED, FP16 + BIASES, marks=pytest.mark.long),
        pytest.param(2, SHARDED + OVERLAP, EXPERTS + "--calculate-per-token-loss ", marks=pytest.mark.long),
        pytest.param(2, TP, FP16 + FURTHER, marks=pytest.mark.long),
    ],
)
def test_experts_further_tokens_and_fp16_give_one_training_too(dataset, tmp_path, ranks, layout, model):
    """In a session as in Megatron's own loop: auxiliary losses, biases of experts and the loss scale.

    With fp16 Megatron's own loop overflows sooner in two replicas than in one, since each weighs a micro-batch by its
    own number of them; a session weighs them alike however many replicas there are, so it is compared with one.
    """
    alone = train(dataset, 1, *model.split())
    found = train(dataset, ranks, *layout.split(), *model.split())
    paced = ["--micro-batch-seconds", "0.001"]  # else it lets all others go first, and other tests run beside
    run(dataset, ranks, *layout.split(), *model.split(), *paced, "--metrics", tmp_path / "metrics", script=SESSION)
    steps = [json.loads(line) for line in (tmp_path / "metrics.slot0").read_text().splitlines()]
    session = {"losses": [step["loss"] for step in steps], "norms": [step["grad_norm"] for step in steps]}
    for each in (session,) if FP16 in model else (found, session):
        assert each["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE)
        assert [norm is None for norm in each["norms"]] == [norm is None for norm in alone["norms"]]
        most = ROUNDED if FP16 in model and TP in layout else TOLERANCE
        assert [norm or 0.0 for norm in each["norms"]] == pytest.approx([n or 0.0 for n in alone["norms"]], rel=most)
    assert ("--fp16" in model) == (alone["norms"][0] is None), "the first step overflows"


@pytest.mark.long
def test_the_output_layer_of_its_own_is_the_same_in_every_layout_too(dataset, reference):
    one, other = (train(dataset, ranks, "--untie-embeddings-and-output-weights", *more) for ranks, more in UNTIED)
    assert one["losses"] == pytest.approx(other["losses"], rel=TOLERANCE)
    assert one["losses"] != pytest.approx(reference["losses"], rel=1e-3)


UNTIED = ((1, []), (4, (TP + PP).split()))


# ------------------------------------------------------------ dropout
def test_dropout_is_the_same_whoever_computes_a_micro_batch(dataset, reference):
    one = train(dataset, 1, *DROPOUT)
    two = train(dataset, 2, *DROPOUT, PLAIN_ORDER="reversed")
    assert one["losses"] == pytest.approx(two["losses"], rel=TOLERANCE)
    assert one["norms"] == pytest.approx(two["norms"], rel=TOLERANCE)
    assert one["losses"] != pytest.approx(reference["losses"], rel=1e-3), "there is dropout"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, ""), *(pytest.param(ranks, more, marks=pytest.mark.long) for ranks, more in ((4, TP + PP), (2, INTERLEAVED)))],
)
def test_recomputed_activations_have_the_same_dropout_bit_for_bit(dataset, ranks, options):
    kept, recomputed = (train(dataset, ranks, *DROPOUT, *options.split(), *more) for more in ([], RECOMPUTED))
    assert recomputed == kept


GRADIENTS = """
import json, runpy, sys
sys.argv[0] = {plain!r}
plain = runpy.run_path({plain!r})
import gpt_model, gpt_options, torch, train_gpt
import torch.distributed as dist
from megatron.core import parallel_state
options = gpt_options.parse(sys.argv[1:])
device, backend = train_gpt.prepare(options)
dist.init_process_group(backend)
parallel_state.initialize_model_parallel()
chunks = gpt_model.build_model(options, device)
loop = plain["Loop"](options, device, chunks, None, None)

def gradient(index):
    chunks[0].zero_grad_buffer()
    loop.mine = [index]
    loop.compute(0)
    return torch.cat([parameter.main_grad.reshape(-1) for parameter in chunks[0].parameters()]).clone()

first = [gradient(index) for index in range(4)]
again = [gradient(index) for index in (3, 3, 1, 0, 2)]
print(json.dumps([[float((one - other).abs().max()) for other in first] for one in again]))
"""


@pytest.mark.parametrize("more", [[], pytest.param(RECOMPUTED, marks=pytest.mark.wide)], ids=["kept", "recomputed"])
def test_a_micro_batch_has_one_gradient_in_whatever_order_and_however_often(dataset, tmp_path, more):
    script = tmp_path / "gradients.py"
    script.write_text(GRADIENTS.format(plain=str(PLAIN)))
    differences = train(dataset, 1, *DROPOUT, *more, script=script)
    for index, found in zip((3, 3, 1, 0, 2), differences, strict=True):
        assert [difference == 0.0 for difference in found] == [other == index for other in range(4)]


# ------------------------------------------------------------ checkpoints
def follows(found: dict, reference: dict, first: int) -> None:
    """The iterations from `first` on are those of the undisturbed run."""
    count = len(found["losses"])
    assert count
    for what in ("losses", "norms"):
        assert found[what] == pytest.approx(reference[what][first : first + count], rel=TOLERANCE)


@pytest.mark.wide
def test_a_checkpoint_of_any_layout_is_gone_on_with_in_any_other(dataset, reference, tmp_path):
    """Tied embeddings, with and without the distributed optimizer; one iteration in each."""
    layouts = ((2, ""), (2, TP + SHARDED), (2, PP), (4, PP + SHARDED), (4, TP + PP), (4, INTERLEAVED + SHARDED))
    for iteration, (ranks, options) in enumerate(layouts):
        saves = ["--save", tmp_path / "saves"]
        follows(
            train(dataset, ranks, *options.split(), *saves, PLAIN_LAST=str(iteration + 1)), reference, first=iteration
        )
    kept = sorted(path.name for path in (tmp_path / "saves").iterdir())
    assert kept == ["iteration-00000005", "iteration-00000006"]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(2, SHARDED + "--bf16", marks=pytest.mark.long),
        pytest.param(
            2,
            PP + "--untie-embeddings-and-output-weights --attention-dropout 0.1 --hidden-dropout 0.1",
            marks=pytest.mark.long,
        ),
    ],
)
def test_in_the_same_layout_it_goes_on_bit_for_bit(dataset, tmp_path, ranks, options):
    whole = train(dataset, ranks, *options.split())
    saves = [*options.split(), "--save", tmp_path / "saves"]
    halves = [train(dataset, ranks, *saves, PLAIN_LAST=last) for last in ("3", str(ITERATIONS))]
    for what in whole:
        assert whole[what] == halves[0][what] + halves[1][what]


ALONE = """
import runpy, sys
sys.argv[0] = {plain!r}
runpy.run_path({plain!r})
import os
import gpt_model, gpt_options, train_gpt
from megatron.core import parallel_state
from unicron_transition.generations import groups
from unicron_transition.snapshot.checkpoint import Checkpoints, Writer
from unicron_transition.generations.layout import Layout
from unicron_transition.snapshot.migrate import TrainingState
slot, layout = int(os.environ["RANK"]), Layout(tensor=2, pipeline=2)
options = gpt_options.parse(sys.argv[1:])
device, _ = train_gpt.prepare(options)
os.environ["UNICRON_MAX_RANKS"] = os.environ["WORLD_SIZE"]
groups.init_without_peers(layout, slot)
parallel_state.initialize_model_parallel(2, 2)
chunks = gpt_model.build_model(options, device)
state = TrainingState(chunks, *gpt_model.build_optimizer(options, chunks))
assert Checkpoints(options.save).load(state) == 1
shard = slot // 4, int(os.environ["WORLD_SIZE"]) // 4
if not options.use_distributed_optimizer:
    shard = 0, 1
Checkpoints(options.save + ".again").save_last(state, 1, Writer(slot % 4, 4, *shard))
print("null")
"""


@pytest.mark.wide
@pytest.mark.parametrize(("ranks", "sharded"), [(8, SHARDED), pytest.param(4, "", marks=pytest.mark.long)])
def test_ranks_read_their_parts_alone_in_worlds_without_peers(dataset, reference, tmp_path, ranks, sharded):
    """And write what they have read, each for itself; that is a checkpoint, too."""
    saves, script = tmp_path / "saves", tmp_path / "alone.py"
    train(dataset, 2, *SHARDED.split(), "--save", saves, PLAIN_LAST="1")
    script.write_text(ALONE.format(plain=str(PLAIN)))
    train(dataset, ranks, *(TP + PP + sharded).split(), "--save", saves, script=script)
    follows(train(dataset, 1, "--save", f"{saves}.again"), reference, first=1)
