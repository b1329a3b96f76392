"""Actions that do not come to their end lead to the next severity; living nodes are set down only so many at a time."""

from __future__ import annotations

import pytest

from tests.support.scenarios import calls, follow, on_slurm, power_off
from tests.support.world import World
from unicron_ctl.controller.nodes.isolation import attention
from unicron_ctl.controller.sense import overdue
from unicron_ctl.controller.sense.overdue import lacking
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import structs, wire
from unicron_detector.failures.escalation_table import State
from unicron_detector.failures.fault_history import Policy

ECC = structs.Fault(type="RuntimeError", text="CUDA error: uncorrectable ECC error encountered", at=0.0, fatal=True)


def failed_actions(world: World) -> list[tuple[str, str]]:
    """(action that failed, what follows) of all events."""
    return [(e.record.failed, e.record.action) for e in world.log if e.kind == "action_failed"]


# ---------------------------------------------------------------- time limits
def test_many_that_are_started_at_once_are_looked_at_later_and_no_limit_is_lost(monkeypatch):
    looked = []
    real = overdue.lacking
    monkeypatch.setattr(overdue, "lacking", lambda *args: looked.append(args[1]) or real(*args))
    world = World(restart_seconds=20.0)
    agents = world.start_job(nodes=60, ranks=4)
    with world.at_once():
        for agent in agents:
            for slot in agent.slots:
                agent.die(slot)
    world.run(0.5)
    assert not looked, "what has just begun is not looked at"
    world.run(24.0)
    assert {slot for each in world.log if each.kind == "action_failed" for slot in [each.record.slot]} == set(
        range(240)
    )


def test_a_started_process_that_never_gets_ready_is_killed_and_the_next_severity_follows(snapshot):
    world = World(restart_seconds=60.0, isolate_seconds=40.0)
    agents = world.start_job()
    agents[1].die(1)
    world.run(50)
    assert failed_actions(world) == [] and agents[1].ranks[1].state == "starting"
    world.run(12)
    assert failed_actions(world) == [("restart", "move")]
    event = next(e for e in world.log if e.kind == "action_failed")
    assert event.record.reason == snapshot
    assert agents[1].ranks[1].incarnation == 2, "without Slurm there is no other node: it is started again"
    assert world.job().failures[-1].record.detected_by == "time limit"
    world.run(41)
    assert failed_actions(world) == [("restart", "move"), ("move", "move")] and agents[1].ranks[1].incarnation == 3
    agents[1].ready()
    world.run(1)
    for agent in agents:
        agent.take_offer()
    world.iterate("1", 5)
    world.run(100)
    assert len(failed_actions(world)) == 2, "who takes part again is not asked any more"


def test_a_restart_that_times_out_is_tried_on_another_node_and_blames_none():
    world, slurm = on_slurm(4, 3, restart_seconds=60.0)
    agent = next(a for a in world.agents if a.element == 1)
    agent.die(1)
    world.run(64)
    assert failed_actions(world) == [("restart", "move")]
    assert slurm.node_states["n2"] == {"IDLE"} and not [c for c in slurm.calls if c[0] in ("down", "drain")]
    assert slurm.queue["1", 1]["node"] == "n4" and ("requeue_hold", "1", 1, "n2") in slurm.calls
    assert not attention(world.core.view) and world.job().failures[-1].record.severity == 2


def test_a_regroup_that_never_comes_about_becomes_a_restart():
    world = World(regroup_seconds=40.0, enter_timeout=1000.0)
    agents = world.start_job()
    agents[1].obedient = False
    stopped = structs.Fault(type="RuntimeError", text="Connection reset by peer", at=world.now)
    agents[1].set(1, state="stopped", broken=agents[1].ranks[1].generation, fault=stopped)
    world.run(1)
    assert world.job().failures[-1].record.action == "reattempt" and world.job().phase == "entering"
    world.run(36)
    assert failed_actions(world) == []
    world.run(8)
    assert failed_actions(world) == [("reattempt", "restart")]
    assert any(isinstance(m, wire.StopRank) and m.slot == 1 for m in agents[1].heard)
    assert sorted(world.job().members) == [0, 2], "nobody waits for it"


def test_the_clock_stands_still_while_the_plan_has_no_node_for_the_element():
    world, slurm = on_slurm(3, 3, restart_seconds=20.0, isolate_seconds=20.0)
    agent = next(a for a in world.agents if a.element == 1)
    agent.set(1, fault=ECC)
    world.run(2)
    assert slurm.queue["1", 1]["state"] == "PENDING", "n2 is free, but this job avoids it"
    assert slurm.node_states["n2"] == {"IDLE"}
    follow(world, "1", 3)
    world.run(120)
    assert failed_actions(world) == []


def test_an_element_that_slurm_does_not_start_again_is_started_on_another_node(snapshot):
    world, slurm = on_slurm(4, 3, restart_seconds=30.0)
    slurm.requeue = lambda job, element: None  # accepted, and nothing comes of it
    next(a for a in world.agents if a.element == 1).silent = True
    world.run(25)
    assert failed_actions(world) == []
    world.run(10)
    assert failed_actions(world) == [("restart", "move")]
    assert [failure.record.reason for failure in world.job().failures] == snapshot
    assert len([c for c in slurm.calls if c[0] == "requeue"]) == 1, "what may be starting is not requeued again"
    assert ("requeue_hold", "1", 1, "n2") in slurm.calls and slurm.queue["1", 1]["node"] == "n4"


def test_a_restarted_controller_begins_the_clock_anew():
    world = World(restart_seconds=60.0)
    agents = world.start_job()
    agents[1].die(1)
    world.run(50)
    world.core.runtimes["1"].sensors.actions.excused.clear()
    world.core.view.started_at = world.now
    world.run(50)
    assert failed_actions(world) == []
    world.run(15)
    assert failed_actions(world) == [("restart", "move")]


@pytest.mark.by_hand  # the mode is set after the job was registered
def test_a_newcomer_that_a_restart_mode_job_keeps_waiting_is_not_late(snapshot):
    world = World()
    agents = world.start_job()
    agents[1].set(1, state="waiting")
    job, view = world.job(), world.core.view.job(world.job())
    assert lacking(view, 1, State.RESTARTING, "n2", set()) == snapshot
    job.settings.mode = structs.RESTART
    assert lacking(view, 1, State.RESTARTING, "n2", set()) == ""


# ---------------------------------------------------------------- Slurm refuses
def test_a_dead_node_that_slurm_does_not_set_down_gets_no_work_and_an_admin_is_called(snapshot):
    world, slurm = on_slurm(3, 3)
    slurm.refuse_down = "slurm_update error: Invalid user id"
    power_off(world, "n2")
    world.run(20)
    assert "n2" in world.core.state.out_of_service and sorted(world.job().members) == [0, 2]
    item = attention(world.core.view)[0]
    assert item.node == "n2" and item.reason == snapshot
    assert len(calls(world, "down")) > 2, "Slurm is asked again"
    slurm.refuse_down = ""
    world.run(8)
    assert slurm.node_states["n2"] == {"DOWN"} and attention(world.core.view) == []


def test_a_node_that_an_admin_sets_down_instead_is_not_asked_for_any_more():
    world, slurm = on_slurm(3, 3)
    slurm.refuse_down = "slurm_update error: Invalid user id"
    power_off(world, "n2")
    world.run(10)
    assert attention(world.core.view)
    slurm.node_states["n2"], slurm.reasons["n2"] = {"IDLE", "DRAIN"}, "bad fan"
    world.run(3)
    assert attention(world.core.view) == [] and "n2" in world.core.state.out_of_service
    before = len(slurm.calls)
    slurm.node_states["n2"] = {"IDLE"}
    world.run(3)
    assert not [c for c in slurm.calls[before:] if c[0] == "down"] and "n2" not in world.core.state.out_of_service


def test_what_a_controller_died_over_is_asked_of_slurm_again_but_not_by_a_listing_of_before():
    world, slurm = on_slurm(4, 3)
    world.now += 0.01
    world.core.now = world.now
    world.core.append("1", 1, records.SlurmAction(action="down", element=1, node="n4", slurm_reason="unicron[x]: y"))
    world.core.on_listing(slurm.nodes(), slurm.elements())
    world.deliver()
    assert ("down", "", -1, "n4") not in slurm.calls
    world.run(2)
    assert slurm.calls.count(("down", "", -1, "n4")) == 1 and slurm.reasons["n4"] == "unicron[x]: y"


# ---------------------------------------------------------------- many at once
def test_a_job_leaves_so_many_of_its_nodes_and_no_more():
    world, _ = on_slurm(9, 5, max_isolated_job_share=0.4)
    for element in (1, 2, 3):
        next(a for a in world.agents if a.element == element and not a.silent).set(element, fault=ECC)
        world.run(3)
        follow(world, "1", 5)
        world.run(1)
    assert [call[3] for call in calls(world, "requeue_hold")] == ["n2", "n3"] and not calls(world, "down", "drain")
    event = next(e for e in world.log if e.kind == "isolation_withheld")
    assert event.record.node == "n4" and "has left n2, n3 within 3600 s" in event.record.reason
    assert {item.node for item in attention(world.core.view)} == {"n2", "n3", "n4"}
    agent = next(a for a in world.agents if a.element == 3 and not a.silent)
    assert agent.ranks[3].incarnation == 1, "its process is started again in place"
    assert any("stays on n4" in text for text in world.job().failures[-1].actions)


def test_dead_nodes_count_too_and_the_job_goes_on_where_a_limit_is_reached(snapshot):
    world, slurm = on_slurm(8, 6, max_isolated_nodes=2)
    power_off(world, "n2", "n3", "n4")
    world.run(4)
    down = [node for node, states in slurm.node_states.items() if states == {"DOWN"}]
    assert len(down) == 2 and sorted(world.job().members) == [0, 4, 5], "healing needs no node"
    (left,) = {"n2", "n3", "n4"} - set(down)
    item = next(item for item in attention(world.core.view) if item.node == left)
    assert item.reason == snapshot
    assert left in world.job().avoid, "its next start avoids it"
    world.run(600)
    power_off(world, "n5")
    world.run(4)
    assert slurm.node_states["n5"] == {"IDLE"}, "nobody has looked, and the hour is not over"
    for node in down:  # Slurm itself does so where ReturnToService is 2, so it made room each time
        slurm.resume(node)
    world.run(2)
    assert not any(world.core.state.nodes[node].downed for node in down)
    power_off(world, "n6")
    world.run(4)
    assert slurm.node_states["n6"] == {"IDLE"}, "they count, whoever gave them back"


# ---------------------------------------------------------------- a job that fails by its own bug
@pytest.mark.by_hand
def test_a_loss_that_shows_the_job_to_fail_by_its_own_bug_ends_it():
    """Its ranks hang in the making of a generation until the escalation has seen enough."""
    world = World(enter_timeout=2.0)
    agents = world.start_job(nodes=2)
    job = world.job()
    world.core.state.history.policy = Policy(stuck_faults=1)
    agents[1].set(1, state="waiting", incarnation=1)
    assert job.ended.code == 1 and "failed 1 time " in job.ended.reason
    agents[0].set(0, state="waiting", incarnation=1)
    assert len(job.failures) == 1 and "break" not in world.kinds(), "nothing happens to a job that has ended"
