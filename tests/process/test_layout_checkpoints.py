"""Checkpoints of jobs in any layout, under the generation protocol: ranks that are lost in a save, a job that goes on
in another layout."""

from __future__ import annotations

import pytest

from tests.support import proof
from tests.support.matrix import size_of
from tests.support.rank_harness import Ranks
from unicron_transition.snapshot.checkpoint import Checkpoints

pytestmark = pytest.mark.process

SHARDED = " sharded"
LOSSES = 1e-5  # relative, in fp32
# Another layout sums in another order: a token between two experts may go to the other one, and fp16 rounds; 3e-4 seen.
LOSSES_ROUNDED = 1e-3


def train(out, layout: str, replicas: int, saves, iterations: int, *faults: dict, **keywords) -> Ranks:
    """Run it to its end; a checkpoint every other iteration. layout: TP PP VPP, and whether sharded."""
    sharded, layout = layout.endswith(SHARDED), layout.removesuffix(SHARDED)
    settings = {"TINY_LAYOUT": layout, "TINY_LAYERS": "4", "TINY_ITERATIONS": str(iterations)}
    settings |= {"TINY_CHECKPOINTS": str(saves), "TINY_DISTOPT": str(int(sharded))}
    out.mkdir()
    size = size_of(layout)
    ranks = Ranks(out, replicas * size, list(faults), fork=True, replica=size, **settings, **keywords)
    ranks.drive()
    return ranks


def losses(out) -> dict[int, float]:
    found = proof.losses(out)
    assert all(len(values) == 1 for values in found.values()), found
    return {iteration: values.pop() for iteration, values in found.items()}


def whole(saves) -> list[int]:
    return [each.iteration for each in Checkpoints(saves).whole_ones()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Losses of the whole run, from the model that the first layout begins with."""
    made = {}

    def of(layout: str, replicas: int, **settings: str) -> dict[int, float]:
        key = layout, *settings.items()
        if key not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            train(folder / "run", layout, replicas, folder / "saves", 6, **settings)
            made[key] = losses(folder / "run")
        return made[key]

    return of


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(("2 2 1", 1), ("1 1 1", 2), marks=pytest.mark.long),
        pytest.param(("1 1 1", 2), ("1 2 2", 2), marks=pytest.mark.long),
        (("2 1 1" + SHARDED, 2), ("1 2 1" + SHARDED, 2)),
    ],
)
@pytest.mark.wide  # as in test_template_layouts
def test_a_job_goes_on_in_another_layout(tmp_path, undisturbed, one, other):
    saves = tmp_path / "saves"
    train(tmp_path / "one", *one, saves, 4)
    assert whole(saves) == [4, 2]
    train(tmp_path / "other", *other, saves, 6)
    assert whole(saves) == [6, 4]
    found = losses(tmp_path / "one") | losses(tmp_path / "other")
    assert sorted(losses(tmp_path / "other")) == [4, 5]
    proof.close(found, undisturbed(*one), LOSSES)


@pytest.mark.long
@pytest.mark.parametrize(
    ("one", "other"),
    [(("1 2 1", 2), ("1 1 1", 1)), (("1 2 1" + SHARDED, 2), ("1 2 2" + SHARDED, 1))],
)
def test_experts_with_their_biases_and_further_tokens_go_on_too(tmp_path, undisturbed, one, other):
    saves = tmp_path / "saves"
    settings = {"TINY_EXPERTS": "bias", "TINY_MTP": "1"}
    train(tmp_path / "one", *one, saves, 4, **settings)
    train(tmp_path / "other", *other, saves, 6, **settings)
    found = losses(tmp_path / "one") | losses(tmp_path / "other")
    proof.close(found, undisturbed(*one, **settings), LOSSES_ROUNDED)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("1 1 1 2 1", 1), ("1 1 1", 1)),
        pytest.param(("1 1 1", 1), ("1 1 1 2 1", 2), marks=pytest.mark.long),
        pytest.param(("1 2 1 2 1", 1), ("1 1 1 4 1", 1), marks=pytest.mark.long),
        (("1 1 1 2 1" + SHARDED, 2), ("1 1 1" + SHARDED, 1)),
        pytest.param(("1 1 1" + SHARDED, 2), ("1 1 1 2 1" + SHARDED, 2), marks=pytest.mark.long),
    ],
)
def test_experts_that_ranks_share_go_on_with_others(tmp_path, undisturbed, one, other):
    saves = tmp_path / "saves"
    settings = {"TINY_EXPERTS": "aux_loss", "TINY_EXPERT_COUNT": "8", "TINY_DISPATCHER": "alltoall"}
    train(tmp_path / "one", *one, saves, 4, **settings)
    train(tmp_path / "other", *other, saves, 6, **settings)
    found = losses(tmp_path / "one") | losses(tmp_path / "other")
    assert sorted(losses(tmp_path / "other")) == [4, 5]
    proof.close(found, undisturbed(*one, **settings), LOSSES_ROUNDED)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("1 2 1", 2), ("1 1 1", 1)),
        pytest.param(("1 2 1" + SHARDED, 2), ("1 2 2" + SHARDED, 1), marks=pytest.mark.long),
    ],
)
def test_the_loss_scale_goes_on_too(tmp_path, undisturbed, one, other):
    saves = tmp_path / "saves"
    settings = {"TINY_FP16": str(2.0**22)}
    train(tmp_path / "one", *one, saves, 4, **settings)
    train(tmp_path / "other", *other, saves, 6, **settings)
    found = losses(tmp_path / "one") | losses(tmp_path / "other")
    proof.close(found, undisturbed(*one, **settings), LOSSES_ROUNDED)
    scales = [float(proof.losses(tmp_path / name, "scale")[last].pop()) for name, last in (("one", 3), ("other", 4))]
    assert scales[0] < 2.0**22 and scales[1] in (scales[0] / 2, scales[0], scales[0] * 2)


@pytest.mark.wide
@pytest.mark.parametrize(
    "layout", ["2 1 1" + SHARDED, *(pytest.param(layout, marks=pytest.mark.long) for layout in ("2 1 1", "1 2 1"))]
)
def test_a_rank_lost_in_a_save_costs_that_checkpoint_alone(tmp_path, undisturbed, layout):
    """Of the first replica, whose ranks write; then the other one's do. Or all do, each a shard."""
    saves = tmp_path / "saves"
    fault = {"slot": 1, "iteration": 3, "at": "save", "count": 0, "kind": "kill"}
    ranks = train(tmp_path / "run", layout, 2, saves, 6, fault)
    assert ranks.breaks[-1][1] == [1]
    proof.close(losses(tmp_path / "run"), undisturbed(layout, 2), LOSSES)
    assert whole(saves) == [6, 2], "the other replica's ranks came by iteration 4 before they had to write"


# test_checkpoints has all ranks lost, and test_training_script a newest checkpoint that is not sound.
@pytest.mark.wide
@pytest.mark.parametrize("layout", ["1 2 1", pytest.param("2 1 1", marks=pytest.mark.long)])
def test_all_ranks_lost_in_a_save_go_on_from_the_checkpoint_before(tmp_path, undisturbed, layout):
    saves = tmp_path / "saves"
    faults = [{"slot": slot, "iteration": 3, "at": "save", "count": 0, "kind": "kill"} for slot in (0, 1)]
    faults += [{**fault, "slot": fault["slot"] + 2, "at": "outside"} for fault in faults]
    ranks = train(tmp_path / "run", layout, 2, saves, 6, *faults, restart=True)
    assert ranks.reformed
    found = [float(value) for value in losses(tmp_path / "run").values()]
    assert found == pytest.approx(list(undisturbed(layout, 2).values()), rel=LOSSES)
    assert whole(saves) == [6, 4]


@pytest.mark.long
def test_main_parameters_beside_a_tied_embedding_stay_what_they_were(tmp_path):
    """Defect: the stages that share the embedding made all their fp32 main parameters anew from the bf16 ones."""
    calm = train(tmp_path / "calm", "1 2 1", 2, tmp_path / "calm-saves", 6, TINY_BF16="1")
    train(tmp_path / "one", "1 2 1", 2, tmp_path / "saves", 2, TINY_BF16="1")
    train(tmp_path / "other", "1 2 1", 2, tmp_path / "saves", 6, TINY_BF16="1")
    assert not calm.breaks
    assert losses(tmp_path / "one") | losses(tmp_path / "other") == losses(tmp_path / "calm")
