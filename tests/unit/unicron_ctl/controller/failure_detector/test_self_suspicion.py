"""Many that fall silent together: the controller suspects itself although somebody is heard."""

from __future__ import annotations

import pytest

from tests.support.scenarios import calls, cut_off, follow, heal, power_off
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.api import answers
from unicron_ctl.controller.failure_detector import self_suspicion
from unicron_ctl.controller.model.asker import EVERYBODY
from unicron_ctl.controller.model.requests import Action
from unicron_ctl.controller.model.view import Outcome
from unicron_ctl.controller.plan import slurm_actions
from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.log import records
from unicron_ctl.shared.settings.partitions import PartitionConfig

JOBS = 5


def many(nodes: int = 16, jobs: int = JOBS, **settings) -> World:
    """Jobs of three nodes each, and a spare."""
    world = World(FakeSlurm(nodes), **{"max_isolated_nodes": 100, **settings})
    for job in range(1, jobs + 1):
        world.slurm.submit(str(job), 3)
    for job in range(1, jobs + 1):
        for agent in follow(world, str(job), 3):
            agent.ready()
    world.run(3.0)
    assert all(len(world.job(str(job)).members) == 3 for job in range(1, jobs + 1))
    return world


def cut_off_with_a_rack(world: World) -> list[FakeAgent]:
    """The controller hears two elements of job 1 only; returns all others."""
    far = [agent for agent in world.agents if agent.job != "1" or not agent.element]
    cut_off(world, far)
    return far


def stopped(world: World) -> list[tuple[str, str, int, str]]:
    return calls(world, "down", "drain", "requeue", "requeue_hold")


def kinds(world: World) -> list[str]:
    return [event.kind for event in world.log if event.kind in ("most_silent", "most_heard", "alone")]


def head(world: World) -> str:
    """What `unicronctl status` says above its tables."""
    return str(status_tables.status(answers.answer(world.core, None, "status", {}, EVERYBODY))[0])


@pytest.mark.parametrize("slurm_too", [False, True])
def test_one_voice_does_not_make_the_controller_sure_of_itself(slurm_too: bool):
    """Defect: the head and one rack were cut from the others, and all whom a witness of that rack missed were set
    DOWN, while all the others suspected the head."""
    world = many()
    far = cut_off_with_a_rack(world)
    if slurm_too:
        for agent in far:
            world.slurm.node_states[agent.node].add("NOT_RESPONDING")
    world.run(30.0)
    assert not stopped(world) and kinds(world) == ["most_silent"] and not world.core.view.alone
    (said,) = [event.record for event in world.log if event.kind == "most_silent"]
    assert (said.silent, said.nodes) == (13, 15)
    assert "fell silent" in head(world)
    assert sorted(world.job("1").members) == [1, 2], "a job is healed within what it has"
    for states in world.slurm.node_states.values():
        states.discard("NOT_RESPONDING")
    heal(world)
    world.run(10.0)
    assert kinds(world) == ["most_silent", "most_heard"] and "fell silent" not in head(world)
    assert not stopped(world) and not world.core.state.deferred


def test_a_node_that_is_dead_all_the_same_is_taken_once_silence_is_to_be_believed_again():
    world = many()
    far = cut_off_with_a_rack(world)
    world.run(20.0)
    assert world.core.state.deferred and not stopped(world)
    dead = next(agent for agent in far if agent.job == "1")
    heal(world)
    dead.silent = True
    world.dead_nodes.add(dead.node)
    world.run(10.0)
    assert [call[:1] + call[3:] for call in stopped(world)] == [("down", dead.node)]
    assert world.slurm.queue["1", 0]["node"] == "n16" and not world.core.state.deferred


def test_a_node_whose_agent_came_back_and_died_there_is_not_taken_for_its_silence_before():
    """Defect: that the agent was gone, however it went, counted as its node's being lost still."""
    world = many()
    far = cut_off_with_a_rack(world)
    world.run(20.0)
    back = next(agent for agent in far if agent.job == "1")
    assert (back.node, "1", 0) in world.core.state.deferred
    back.silent = back.cut = False
    world.cuts = {pair for pair in world.cuts if back.node not in pair}
    world.run(3.0)
    back.silent = True
    world.run(5.0)
    assert world.job("1").agents[0].gone == "agent died" and kinds(world) == ["most_silent"]
    heal(world)
    back.silent = True
    world.run(10.0)
    assert not world.core.state.deferred and not [call for call in stopped(world) if call[0] in ("down", "drain")]


def test_nothing_is_taken_before_it_is_known_whether_others_fell_silent_too():
    """One agent's last word is older than the others': its lease is over before they are late."""
    world = many()
    first = world.agents[0]
    first.silent = True
    world.dead_nodes.add(first.node)
    world.run(0.75)
    cut_off(world, [agent for agent in world.agents if not (agent.job == "1" and agent.element)])
    world.run(20.0)
    assert not stopped(world) and kinds(world) == ["most_silent"]


def test_an_element_whose_agent_nobody_hears_is_not_requeued_meanwhile():
    """Its node's slurmd is reached, so it counts as dead, and is started again once silence is to be believed."""
    world = many()
    far = cut_off_with_a_rack(world)
    answer = world.answer
    world.answer = lambda witness, target: answer("n1", target) if target == "n1:slurmd" else answer(witness, target)
    world.run(20.0)
    assert world.job("1").agents[0].gone == "agent died" and not stopped(world)
    for agent in far:
        if (agent.job, agent.element) != ("1", 0):
            agent.silent = agent.cut = False
    world.cuts.clear()
    world.run(5.0)
    assert [call[:3] for call in stopped(world)] == [("requeue", "1", 0)]


def test_after_a_restart_the_deferred_wait_until_all_had_the_time_to_come_back():
    world = many()
    cut_off_with_a_rack(world)
    world.run(20.0)
    assert world.core.state.deferred
    world.restart()
    world.run(30.0)
    assert not stopped(world) and kinds(world) == ["most_silent", "most_silent"]
    heal(world)
    world.run(10.0)
    assert not stopped(world) and not world.core.state.deferred


def test_where_only_observing_is_allowed_it_is_not_said_what_the_doubt_forbids():
    """Nothing is taken there in any case; once silence is to be believed, the log says what would be."""
    world = many(partitions={"default": PartitionConfig(mode="observe", max_weight=100.0)})
    cut_off_with_a_rack(world)
    world.run(20.0)

    def would() -> set[str]:
        return {e.record.action for e in world.log if isinstance(e.record, records.ActionObserved)}

    assert kinds(world) == ["most_silent"] and sorted(world.job("1").members) == [1, 2]
    assert not would() & {"down", "drain", "requeue"} and not stopped(world)
    heal(world)
    power_off(world, world.agents[0].node)
    world.run(10.0)
    assert "down" in would() and not stopped(world)


def test_a_tick_looks_at_few_while_nobody_is_silent(monkeypatch: pytest.MonkeyPatch):
    world = many()
    monkeypatch.setattr(self_suspicion, "_silent_nodes", lambda *_: pytest.fail("all are heard"))
    world.run(10.0)


def small_jobs_without_their_nodes(jobs: int) -> tuple[World, list[FakeAgent]]:
    """Jobs of one node each, the 13th on that of the first; ten of twelve nodes are cut off, for Slurm, too. There is a
    node for each job."""
    world = World(FakeSlurm(jobs), max_isolated_nodes=100)
    for job in range(1, jobs + 1):
        world.slurm.submit(str(job), 1)
    if jobs > 12:
        world.slurm.queue["13", 0].update(state="RUNNING", node="n1", reason="")
    for job in range(1, jobs + 1):
        for agent in follow(world, str(job), 1):
            agent.ready()
    world.run(4.0)
    far = [agent for agent in world.agents if agent.node not in ("n11", "n12")]
    cut_off(world, far)
    for agent in far:
        world.slurm.node_states[agent.node].add("NOT_RESPONDING")
    world.run(20.0)
    assert not stopped(world)
    return world, far


@pytest.mark.parametrize("reached", [False, True])
def test_those_that_were_given_up_before_a_restart_are_most_after_it(reached: bool):
    """Defect: the new controller knew of no other silent agent, and set ten nodes DOWN at once. reached: it is the
    agents that are silent now, and not their nodes."""
    world, _ = small_jobs_without_their_nodes(12)
    assert len(world.core.state.deferred) == 10
    world.restart()
    if reached:
        world.cuts.clear()
    world.run(20.0)
    assert kinds(world) == ["most_silent"] * (1 if reached else 2)
    assert reached or not stopped(world)


def test_agents_that_report_in_step_keep_no_element_from_being_requeued():
    """Defect: between two heartbeats most might have fallen silent, as far as was known, and nothing was requeued."""
    world = many()
    stopped_one = world.agents[0]
    stopped_one.silent = stopped_one.cut = True
    world.run(3.0)
    for agent in world.agents:
        agent.status()
    world.run(1.2, heartbeats=False)
    out = Outcome()
    slurm_actions.request_actions(
        world.core.view, world.core.slurm.retries, [Action("requeue", "1", 0, "n1", "it ended")], out
    )
    assert world.core.view.suspicions.unsure and out.requests


@pytest.mark.parametrize("ends", ["1", "13"])
def test_a_node_that_two_jobs_lost_is_taken_also_when_one_of_them_ends_first(ends: str):
    """Defect: the second loss took the place of the first, and went with its job."""
    world, far = small_jobs_without_their_nodes(13)
    dead = world.agents[0].node
    assert len([key for key in world.core.state.deferred if key[0] == dead]) == 2
    world.slurm.cancel(ends)
    world.dead_nodes.add(dead)
    world.run(12.0)
    for node, states in world.slurm.node_states.items():
        if node != dead:
            states.discard("NOT_RESPONDING")
    world.cuts.clear()
    for agent in far:
        agent.silent = agent.cut = agent.node == dead
    world.run(12.0)
    assert [call[3] for call in stopped(world) if call[0] == "down"] == [dead] and not world.core.state.deferred
