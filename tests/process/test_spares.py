"""Hot spares with a real unicrond, real agents and real ranks: a lost element is replaced before anybody starts one."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.jobs import FOREVER, PLAIN, TINY_PLAIN, World, json_lines
from tests.support.processes import wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def spares(world: World) -> dict[int, str]:
    return {one["element"]: one["state"] for one in world.job().get("spares", [])}


def until_ready(world: World, *elements: int) -> None:
    world.wait(lambda: spares(world) == dict.fromkeys(elements, "ready"), f"spares {elements} are ready")


def order(world: World, *kinds: str) -> list[tuple[str, object]]:
    """The events of these kinds, each with what tells it from others of its kind."""
    marks = {"agent_registered": "element", "offer": "joiners", "plan": "generation", "failure_detected": "element"}
    return [(event["kind"], event.get(marks.get(event["kind"], ""))) for event in world.events(*kinds)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Four elements, three of which train, for ever; each test leaves one of the others as the spare. While the file
    "slow" is there, a process that takes a dead one's place takes long to start."""
    when = {"iteration": -1, "at": "import", "file": "slow"}
    again = [{"slot": slot, "incarnation": later} for slot in range(4) for later in (1, 2)]
    slow = [each | when | {"kind": "sleep", "delay": 5} for each in again]
    settings = {"UNICRON_SPARES": "1", "TINY_ITERATIONS": FOREVER, "TINY_SLOW": "0.02", "TINY_FAULT": json.dumps(slow)}
    with World(tmp_path_factory.mktemp("spares"), 4, command=TINY_PLAIN, **settings) as started:
        started.wait(lambda: started.job().get("state") == "running", "the job trains")
        yield started


def test_three_train_and_the_fourth_waits(world):
    (spare,) = {0, 1, 2, 3} - set(world.job()["members"])
    until_ready(world, spare)
    assert world.rank(spare)["state"] == "waiting" and world.job()["generation"] == 1
    assert world.job()["spares_wanted"] == world.job()["spares_ready"] == 1


def test_a_lost_element_is_replaced_without_waiting_for_it(world):
    (spare,) = spares(world)
    lost = world.job()["members"][0]
    told = len(world.events())
    world.agents[lost].kill()
    left = sorted({0, 1, 2, 3} - {lost})
    world.trains_on(left)
    failure = world.failures()[-1]
    assert failure["element"] == lost and failure["whole_at"] > failure["resumed_at"] and failure["restored_at"] is None
    assert any(f"spare element {spare} on n{spare}" in text for text in failure["actions"])
    offers = [event for event in world.events("offer", "entered")[-3:] if event["id"] > told]
    assert [event["kind"] for event in offers] == ["entered", "offer", "entered"]
    assert offers[1]["time"] == offers[0]["time"], "the offer goes out in the turn in which the survivors are in"
    assert spares(world) == {}


def test_the_lost_element_comes_back_as_the_spare_and_nobody_stops_for_it(world):
    members, generation = world.job()["members"], world.job()["generation"]
    (lost,) = {0, 1, 2, 3} - set(members)
    world.start_agent(lost)
    until_ready(world, lost)
    world.trains_on(members)
    assert world.job()["generation"] == generation


@pytest.mark.wide
def test_a_rank_whose_new_process_takes_long_is_replaced_and_becomes_the_spare(world):
    (spare,) = spares(world)
    victim = world.job()["members"][1]
    slow = world.folder / "slow"
    slow.touch()
    os.kill(world.rank(victim)["pid"], signal.SIGKILL)
    left = sorted({0, 1, 2, 3} - {victim})
    world.trains_on(left)
    joined = [event for event in world.events("offer") if event["joiners"] == [spare]][-1]
    assert f"takes the place of element {victim}" in joined["reason"]
    until_ready(world, victim)
    slow.unlink()
    assert world.job()["members"] == left


def test_a_spare_that_dies_costs_the_members_nothing(world):
    (spare,) = spares(world)
    members, generation = world.job()["members"], world.job()["generation"]
    os.kill(world.rank(spare)["pid"], signal.SIGKILL)
    world.wait(lambda: world.rank(spare)["incarnation"] > 0 and spares(world) == {spare: "ready"}, "it starts again")
    world.agents[spare].kill()
    world.wait(lambda: spares(world) == {}, "it is gone")
    world.trains_on(members)
    assert world.job()["generation"] == generation


@pytest.mark.long
def test_a_spare_waits_longer_than_a_rank_that_has_lost_its_plan(tmp_path):
    settings = {"UNICRON_SPARES": "1", "UNICRON_PLAN_TIMEOUT": "4", "TINY_ITERATIONS": FOREVER}
    with World(tmp_path, 2, **settings) as world:
        world.wait(lambda: world.job().get("spares_ready") == 1, "one trains and one waits")
        (spare,) = spares(world)
        began = next(event["time"] for event in world.events("spares"))
        world.wait(lambda: world.status()["controller"]["time"] > began + 8, "twice that time is over")
        assert spares(world) == {spare: "ready"} and world.rank(spare)["incarnation"] == 0
        assert world.failures() == []


@pytest.mark.long
def test_two_lost_at_once_take_both_spares_of_a_job_with_two_ranks_a_node_and_tensors_over_both(tmp_path):
    settings = {"UNICRON_RANKS_PER_NODE": "2", "UNICRON_SPARES": "2", "TINY_LAYOUT": "2 1 1"}
    with World(tmp_path, 6, **settings, TINY_ITERATIONS=FOREVER, TINY_HIDDEN="32") as world:
        world.wait(lambda: len(world.job().get("members", [])) == 8, "four nodes train")
        inside = {slot // 2 for slot in world.job()["members"]}
        until_ready(world, *({*range(6)} - inside))
        lost = sorted(inside)[:2]
        for element in lost:
            world.agents[element].kill()
        left = sorted({*range(6)} - set(lost))
        world.trains_on([slot for element in left for slot in (2 * element, 2 * element + 1)])
        assert all(failure["whole_at"] for failure in world.failures())
        assert world.job()["ledger_violations"] == 0


@pytest.mark.wide
def test_a_plain_program_is_started_again_in_a_world_with_the_spare(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, str(PLAIN)]
    with World(tmp_path, 3, command=command, UNICRON_SPARES="1", PLAIN_OUT=str(out)) as world:
        world.wait(lambda: len(world.job().get("members", [])) == 2, "two train")
        (spare,) = {0, 1, 2} - set(world.job()["members"])
        until_ready(world, spare)
        lost = world.job()["members"][0]
        world.agents[lost].kill()
        left = sorted({0, 1, 2} - {lost})
        world.wait(lambda: world.job()["members"] == left and world.job()["state"] == "running", "a new world")
        wait_for(lambda: json_lines(Path(out) / f"steps.{spare}"), "the spare works in it", 120.0, world.told)
        generation = world.job()["generation"]
        world.start_agent(lost)
        until_ready(world, lost)
        assert world.job()["generation"] == generation and order(world, "newcomers_wait") == []
