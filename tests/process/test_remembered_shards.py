"""The shards of a distributed optimizer outlive their ranks: the next processes go on from the node's memory.

Real ranks with gloo; decisions by the controller's own functions. The folder is what an agent gives its ranks.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest

from tests.support import proof
from tests.support.moments import fault
from tests.support.rank_harness import Ranks
from unicron_detector.formats import IMAGE
from unicron_transition.snapshot import checkpoint_file
from unicron_transition.snapshot.image_format import ImagePage, inventory

pytestmark = pytest.mark.process

ITERATIONS = 6
HIT, SAVED = 3, 2  # the iteration that is broken off, that of the newest checkpoint
# layout, ranks of a replica, of the job
SHAPES = {"dp": ("1 1 1", 1, 3), "tp": ("2 1 1", 2, 4), "ep": ("1 1 1 2 1", 2, 4)}
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


def same_training(out: Path, reference: Path, shape: str, unsaid: int | None = None) -> None:
    """Not one bit of a gradient differs, and no loss. unsaid: an iteration of which nobody lived to tell the loss."""
    proof.same_losses(out, reference, 0.0)
    assert {*proof.losses(out), *([] if unsaid is None else [unsaid])} == set(range(ITERATIONS))
    found = proof.gradient_differences(out, reference, ITERATIONS, SHAPES[shape][1])
    assert not any(found.values()), found


def begun(ranks: Ranks) -> tuple[int, int] | None:
    """The state from which new processes formed the job."""
    plan = [plan for plan in ranks.plans if not plan.boundary][-1]
    assert "memory" in plan.reason, plan
    return plan.state


@pytest.mark.wide
@pytest.mark.parametrize("shape", [pytest.param("dp", marks=pytest.mark.long), "tp"])
def test_all_ranks_are_killed_and_go_on_from_memory_with_no_iteration_lost(tmp_path, memory, undisturbed, shape):
    late = all_at(shape, "fetch", kind="late", delay=0.1)
    ranks = train(tmp_path, shape, late, UNICRON_MEMORY=str(memory))
    assert set(map(tuple, ranks.exits.values())) == {(-14, 0)}
    assert begun(ranks)[1] == HIT
    proof.exactly_once(ranks, ITERATIONS)
    same_training(tmp_path, undisturbed(shape), shape)


@pytest.mark.parametrize(
    ("shape", "at", "more"),
    [
        pytest.param("dp", "export", {}, marks=pytest.mark.long),
        ("dp", "filled", {}),
        pytest.param("tp", "copies", {}, marks=pytest.mark.long),
        pytest.param("dp", "confirm", {}, marks=pytest.mark.long),
        pytest.param("tp", "confirm", {"kind": "late", "delay": 0.002}, marks=pytest.mark.long),
    ],
)
def test_all_ranks_are_killed_while_they_keep_a_state(tmp_path, memory, undisturbed, shape, at, more):
    """The state after the step, or the one before it, is whole; whoever ended first waits for nobody."""
    ranks = train(tmp_path, shape, all_at(shape, at, **more), UNICRON_MEMORY=str(memory))
    version = begun(ranks)[1]
    assert version in (HIT, HIT + 1)
    same_training(tmp_path, undisturbed(shape), shape, HIT if version > HIT else None)


@pytest.mark.parametrize("shape", ["dp", pytest.param("tp", marks=pytest.mark.long)])
def test_a_rank_and_its_partner_are_killed_and_the_others_go_on_with_their_next_processes(
    tmp_path, memory, undisturbed, shape
):
    """The survivors keep their processes; nobody alive has the shards, but their node's memory does."""
    size, count = SHAPES[shape][1:]
    pair = [size, (2 * size) % count]
    both = [fault(slot, HIT, "fetch", kind="late", delay=0.1) for slot in pair]
    ranks = train(tmp_path, shape, both, UNICRON_MEMORY=str(memory))
    assert {slot for slot, codes in ranks.exits.items() if codes == [-14, 0]} == set(pair)
    plan = [plan for plan in ranks.plans if not plan.boundary][-1]
    assert plan.state[1] == HIT and sorted(plan.members) == list(range(count))
    same_training(tmp_path, undisturbed(shape), shape)


def test_survivors_go_back_with_the_others_to_the_newest_state_that_is_whole(tmp_path, memory, undisturbed):
    """A rank and its partner are killed, and what they leave of the newest state is spoiled."""
    both = [fault(slot, HIT, "fetch", kind="flip", delay=0.3) for slot in (1, 2)]
    ranks = train(tmp_path, "dp", both, UNICRON_MEMORY=str(memory))
    assert ranks.exits == {0: [0], 1: [-9, 0], 2: [-9, 0]}
    plan = [plan for plan in ranks.plans if not plan.boundary][-1]
    assert plan.state[1] == HIT - 1 and sorted(plan.members) == [0, 1, 2]
    same_training(tmp_path, undisturbed("dp"), "dp")


@pytest.mark.wide
def test_what_is_not_trained_comes_from_memory_too(tmp_path, memory):
    """A parameter that has its value from the first processes alone."""
    train(tmp_path / "reference", "tp", [], TINY_FROZEN="1")
    late = all_at("tp", "fetch", kind="late", delay=0.1)
    ranks = train(tmp_path, "tp", late, TINY_FROZEN="1", UNICRON_MEMORY=str(memory))
    assert begun(ranks)[1] == HIT
    same_training(tmp_path, tmp_path / "reference", "tp")


@pytest.mark.wide
def test_of_experts_each_lane_finds_what_it_does_not_train(tmp_path, memory):
    experts = {"TINY_EXPERTS": "aux_loss", "TINY_EXPERT_COUNT": "8", "TINY_DISPATCHER": "alltoall", "TINY_FROZEN": "1"}
    late = all_at("ep", "fetch", kind="late", delay=0.1)
    assert begun(train(tmp_path, "ep", late, UNICRON_MEMORY=str(memory), **experts))[1] == HIT


# ---------------------------------------------------------------- what lies there is not as it was written
def first_life(out: Path, memory: Path, **settings: str) -> list[ImagePage]:
    """All ranks are killed, and stay away; generations are counted anew afterwards, as after a log was lost. What was
    set aside becomes files, as an agent makes them; this is returned."""
    layout, size, count = SHAPES["dp"]
    agent = {"UNICRON_MEMORY": str(memory), "UNICRON_IMAGE_FORMAT": str(IMAGE.number)}
    environment = {**SLOW, "TINY_LAYOUT": layout, **agent, **settings}
    late = all_at("dp", "fetch", kind="late", delay=0.1)
    ranks = Ranks(out, count, late, fork=True, replica=size, **environment)
    ranks.drive()
    assert set(map(tuple, ranks.exits.values())) == {(-14,)}
    set_aside = checkpoint_file.asides(memory)
    for found in set_aside:
        checkpoint_file.persist(found, Path(settings["TINY_CHECKPOINTS"]))
        checkpoint_file.release_aside(found.path)
    return set_aside


def images(memory: Path, shard: int) -> list[Path]:
    """Those of a shard: its rank's own, and the copy, of the state after HIT steps; then of the one before."""
    found = sorted(inventory(memory), key=lambda each: -each.key.iteration)
    paths = [each.path for each in found if each.key.kind == "shard" and each.key.shard == shard]
    assert len(paths) == 4
    return paths


def flip(path: Path) -> None:
    """One bit, in the middle of the data."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def tear(path: Path) -> None:
    """As a writer that was killed leaves it."""
    data = bytearray(path.read_bytes())
    data[12:16] = bytes(4)
    path.write_bytes(data)


@pytest.mark.parametrize("spoil", [flip, pytest.param(tear, marks=pytest.mark.long)])
def test_a_spoiled_image_is_seen_and_the_other_holders_is_used(tmp_path, memory, undisturbed, capfd, spoil):
    first_life(tmp_path, memory)
    spoil(images(memory, 1)[0])
    ranks = train(tmp_path, "dp", [], UNICRON_MEMORY=str(memory))
    assert begun(ranks)[1] == HIT
    assert capfd.readouterr().err.count("training state in memory passed over") == 1
    same_training(tmp_path, undisturbed("dp"), "dp")


@pytest.mark.wide  # as in the test of survivors, who go back with the others
def test_both_holders_of_a_shard_are_lost_and_the_state_before_it_is_whole(tmp_path, memory, undisturbed):
    """One iteration is done again."""
    first_life(tmp_path, memory)
    for path in images(memory, 1)[:2]:
        flip(path)
    ranks = train(tmp_path, "dp", [], UNICRON_MEMORY=str(memory))
    assert begun(ranks)[1] == HIT - 1
    same_training(tmp_path, undisturbed("dp"), "dp")


@pytest.mark.parametrize("agent_reads", [str(IMAGE.number), ""], ids=["agent", "agent of 0.2"])
def test_both_holders_of_a_shard_are_lost_and_the_job_goes_on_from_the_file_and_says_so(
    tmp_path, memory, undisturbed, capfd, agent_reads
):
    """For an agent that does not read their images the ranks write the file."""
    saves = {"TINY_CHECKPOINTS": str(tmp_path / "saves")}
    set_aside = first_life(tmp_path, memory, **saves, UNICRON_IMAGE_FORMAT=agent_reads)
    assert bool(set_aside) == bool(agent_reads)
    for path in images(memory, 1):
        flip(path)
    ranks = train(tmp_path, "dp", [], UNICRON_MEMORY=str(memory), **saves)
    plan = ranks.plans[0]
    assert plan.state is None and plan.iteration == SAVED
    assert "the nodes' memory has only a part of the state after 3 steps" in plan.reason
    assert f"iteration {SAVED}" in plan.reason
    assert capfd.readouterr().err.count("training state in memory passed over") == 4
    same_training(tmp_path, undisturbed("dp"), "dp")


@pytest.mark.wide
def test_where_what_is_not_trained_is_nowhere_the_shards_are_passed_over_and_the_file_is_taken(tmp_path, memory, capfd):
    """Nobody goes on with trained parameters and with what the script has made of the others."""
    saves = {"TINY_CHECKPOINTS": str(tmp_path / "saves"), "TINY_FROZEN": "1"}
    train(tmp_path / "reference", "dp", [], TINY_FROZEN="1")
    first_life(tmp_path, memory, **saves)
    for path in memory.glob("untrained-*"):
        path.unlink()
    ranks = train(tmp_path, "dp", [], UNICRON_MEMORY=str(memory), **saves)
    plans = [plan for plan in ranks.plans if not plan.boundary]
    tried = [plan.state[1] for plan in plans[:-1]]  # once more where a rank was stopped before it knew of the others
    assert [version for version, _ in itertools.groupby(tried)] == [HIT, HIT - 1], "none after it was passed over"
    assert plans[-1].state is None and plans[-1].iteration == SAVED
    assert capfd.readouterr().err.count("is in no node's memory") >= 2 * SHAPES["dp"][2]
    same_training(tmp_path, tmp_path / "reference", "dp")


def test_without_room_the_job_trains_on_and_says_so_once(tmp_path, undisturbed, capfd):
    """Each rank says it."""
    train(tmp_path, "dp", [], UNICRON_MEMORY=str(tmp_path / "nothing" / "here"))
    assert capfd.readouterr().err.count("no room for") == SHAPES["dp"][2]
    same_training(tmp_path, undisturbed("dp"), "dp")
