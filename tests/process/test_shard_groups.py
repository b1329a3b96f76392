"""Shard groups with a real unicrond, real agents and real ranks: each element has one rank, and two of them are a
replica."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests.support.jobs import FOREVER, HERE, World, json_lines

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
SHARDED = [sys.executable, str(HERE / "tiny_sharded.py")]
SETTINGS = {"TINY_ITERATIONS": FOREVER, "TINY_SLOW": "0.02"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Five elements with `Layout(shard=2)`."""
    with World(tmp_path_factory.mktemp("groups"), 5, command=SHARDED, **SETTINGS) as started:
        started.wait(lambda: len(started.job().get("members", [])) == 4, "two groups train")
        started.wait(lambda: len(started.job()["standbys"]) == 1, "one rank completes no group")
        started.trains_on(started.job()["members"])  # all of them have the state
        yield started


def groups(world: World) -> list[list[int]]:
    """The slots of each group."""
    members = world.events("plan", "offer")[-1]["plan"]["members"]
    return [members[:2], members[2:]]


def losses_agree(world: World) -> None:
    """All ranks have had the same loss in each iteration that they have trained."""
    found: dict[int, set[float]] = {}
    for slot in range(5):
        for step in json_lines(world.folder / f"losses.{slot}"):
            found.setdefault(step["iteration"], set()).add(step["loss"])
    assert found and all(max(losses) - min(losses) < 1e-6 for losses in found.values())


def four_train(world: World, generation: int) -> None:
    """In a generation after that one."""
    world.wait(lambda: world.job()["generation"] > generation and len(world.job()["members"]) == 4, "four train again")
    world.trains_on(world.job()["members"])
    assert world.job()["ledger_violations"] == 0


@pytest.mark.wide
def test_elements_of_one_rank_make_groups_and_the_rest_waits(world):
    job = world.job()
    assert (job["layout"], job["replica"], job["replicas"]) == ("F2", 2, 2)
    assert sorted([*job["members"], *job["standbys"]]) == list(range(5))
    for group, done in zip(groups(world), ([0, 1, 4, 5], [2, 3, 6, 7]), strict=True):
        for slot in group:
            assert json_lines(world.folder / f"losses.{slot}")[-1]["micro_batches"] == done
    losses_agree(world)


def test_a_lost_rank_takes_its_group_out_and_who_is_left_comes_back(world):
    """With the lost rank's next process, or with the standby if that has its place and is there before."""
    generation, ((lost, mate), others) = world.job()["generation"], groups(world)
    os.kill(world.rank(lost)["pid"], signal.SIGKILL)
    four_train(world, generation + 1)
    plan, offer = world.events("plan", "offer")[-2:]
    assert plan["plan"]["members"] == others and plan["reused"] == 4
    assert len(offer["joiners"]) == 2 and mate in offer["joiners"]
    losses_agree(world)


@pytest.mark.wide
def test_ranks_of_two_groups_are_lost_at_once(world):
    """One of each place: the others make a group, and the new processes join it."""
    generation, ((first, _), (_, second)) = world.job()["generation"], groups(world)
    for slot in (first, second):
        os.kill(world.rank(slot)["pid"], signal.SIGKILL)
    four_train(world, generation)
    losses_agree(world)


def test_a_job_with_too_few_ranks_for_a_group_ends_with_one_line(tmp_path):
    with World(tmp_path, 2, command=SHARDED, TINY_SHARD="4", **SETTINGS) as world:
        assert world.array.wait() == [1, 1]
        said = [line for line in world.agents[0].log.splitlines() if "a replica (F4) needs 4 ranks" in line]
        assert len(said) == 1 and "the job has at most 2" in said[0]


@pytest.mark.long
def test_spares_take_a_lost_ranks_place(tmp_path):
    with World(tmp_path, 6, command=SHARDED, UNICRON_SPARES="2", **SETTINGS) as world:
        world.wait(lambda: len(world.job().get("members", [])) == 4, "two groups train, maybe first one alone")
        world.wait(lambda: world.job()["spares_ready"] == 2, "two ranks are ready")
        members = world.job()["members"]
        world.trains_on(members)  # both have the state
        world.agents[members[1]].kill()
        world.wait(lambda: members[1] not in world.job()["members"] and len(world.job()["members"]) == 4, "four again")
        world.trains_on(world.job()["members"])
        (failure,) = world.failures()
        assert failure["whole_at"] and world.job()["ledger_violations"] == 0
