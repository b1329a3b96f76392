"""Actions that do not come to their end lead to the next severity; living nodes are set down only so many at a time."""

from __future__ import annotations

import pytest

from detector.escalation import Policy, State
from tests.support.world import FakeSlurm, World
from tests.unit.unicron_ctl.controller.test_reconcile import follow
from unicron_ctl.config import ControllerConfig, problems
from unicron_ctl.controller.log import records
from unicron_ctl.controller.nodes.isolation import attention
from unicron_ctl.controller.sense.overdue import pending
from unicron_ctl.protocol import wire

ECC = wire.Fault(type="RuntimeError", text="CUDA error: uncorrectable ECC error encountered", at=0.0, fatal=True)


def failed(world: World) -> list[tuple[str, str]]:
    """(action that failed, what follows) of all events."""
    return [(e.record.failed, e.record.action) for e in world.log if e.kind == "action_failed"]


def on_slurm(nodes: int, elements: int, **settings) -> tuple[World, FakeSlurm]:
    slurm = FakeSlurm(nodes)
    world = World(slurm, **settings)
    slurm.submit("1", elements)
    follow(world, "1", elements)
    world.run(0.6)
    for agent in world.agents:
        agent.ready()
    world.run(3.0)
    world.iterate("1", 0)
    return world, slurm


# ---------------------------------------------------------------- time limits
def test_a_started_process_that_never_gets_ready_is_killed_and_the_next_severity_follows():
    world = World(restart_seconds=60.0, isolate_seconds=40.0)
    agents = world.start_job()
    agents[1].die(1)
    world.run(50)
    assert failed(world) == [] and agents[1].ranks[1].state == "starting"
    world.run(12)
    assert failed(world) == [("restart", "isolate")]
    event = next(e for e in world.log if e.kind == "action_failed")
    assert "not done within 60 s: its process (incarnation 1) is not ready" in event.record.reason
    assert agents[1].ranks[1].incarnation == 2, "without Slurm no node can be put aside: it is started again"
    assert world.job().failures[-1].detected_by == "time limit"
    world.run(41)
    assert failed(world) == [("restart", "isolate"), ("isolate", "isolate")] and agents[1].ranks[1].incarnation == 3
    agents[1].ready()
    world.run(1)
    for agent in agents:
        agent.take_offer()
    world.iterate("1", 5)
    world.run(100)
    assert len(failed(world)) == 2, "who takes part again is not asked any more"
    world.check_replay()


def test_a_restart_that_times_out_puts_the_node_aside_in_slurm():
    world, slurm = on_slurm(4, 3, restart_seconds=60.0)
    agent = next(a for a in world.agents if a.element == 1)
    agent.die(1)
    world.run(64)
    assert failed(world) == [("restart", "isolate")]
    assert slurm.node_states["n2"] == {"DOWN"} and "not done within 60 s" in slurm.reasons["n2"]
    assert slurm.queue["1", 1]["node"] == "n4"
    world.check_replay()


def test_a_regroup_that_never_comes_about_becomes_a_restart():
    world = World(regroup_seconds=40.0, enter_timeout=1000.0)
    agents = world.start_job()
    agents[1].obedient = False
    stopped = wire.Fault(type="RuntimeError", text="Connection reset by peer", at=world.now)
    agents[1].set(1, state="stopped", broken=agents[1].ranks[1].generation, fault=stopped)
    world.run(1)
    assert world.job().failures[-1].action == "reattempt" and world.job().phase == "entering"
    world.run(36)
    assert failed(world) == []
    world.run(8)
    assert failed(world) == [("reattempt", "restart")]
    assert any(isinstance(m, wire.StopRank) and m.slot == 1 for m in agents[1].heard)
    assert sorted(world.job().members) == [0, 2], "nobody waits for it"
    world.check_replay()


def test_the_clock_stands_still_while_the_plan_has_no_node_for_the_element():
    world, slurm = on_slurm(3, 3, restart_seconds=20.0, isolate_seconds=20.0)
    agent = next(a for a in world.agents if a.element == 1)
    agent.set(1, fault=ECC)
    world.run(2)
    assert slurm.node_states["n2"] == {"DOWN"} and slurm.queue["1", 1]["state"] == "PENDING"
    follow(world, "1", 3)
    world.run(120)
    assert failed(world) == []


def test_an_element_that_slurm_does_not_start_again_costs_its_node():
    world, slurm = on_slurm(3, 3, restart_seconds=30.0)
    slurm.requeue = lambda job, element: None  # accepted, and nothing comes of it
    next(a for a in world.agents if a.element == 1).silent = True
    world.run(25)
    assert failed(world) == []
    world.run(10)
    assert failed(world) == [("restart", "isolate")]
    assert any("no agent came back within 30 s" in f.reason for f in world.job().failures)


def test_a_restarted_controller_begins_the_clock_anew():
    world = World(restart_seconds=60.0)
    agents = world.start_job()
    agents[1].die(1)
    world.run(50)
    world.core.clocks.excused.clear()
    world.core.view.started_at = world.now
    world.run(50)
    assert failed(world) == []
    world.run(15)
    assert failed(world) == [("restart", "isolate")]


def test_a_newcomer_that_a_restart_mode_job_keeps_waiting_is_not_late():
    world = World()
    agents = world.start_job()
    agents[1].set(1, state="waiting")
    job, view = world.job(), world.core.view.job(world.job())
    assert pending(view, 1, State.RESTARTING, "n2", set()) == "it is waiting while the job is running"
    job.settings.mode = wire.RESTART
    assert pending(view, 1, State.RESTARTING, "n2", set()) == ""


# ---------------------------------------------------------------- Slurm refuses
def test_a_node_that_slurm_does_not_set_down_gets_no_work_and_an_admin_is_called():
    world, slurm = on_slurm(3, 3)
    slurm.refuse_down = "slurm_update error: Invalid user id"
    agent = next(a for a in world.agents if a.element == 1)
    agent.set(1, fault=ECC)
    world.run(20)
    assert failed(world) == [("isolate", "isolate")]
    assert "n2" in world.core.state.out_of_service and sorted(world.job().members) == [0, 2]
    item = attention(world.core.view)[0]
    assert item.node == "n2" and "by hand: `scontrol update NodeName=n2 State=DOWN" in item.reason
    assert len([c for c in slurm.calls if c[0] == "down"]) > 2, "Slurm is asked again"
    slurm.refuse_down = ""
    world.run(8)
    assert slurm.node_states["n2"] == {"DOWN"} and attention(world.core.view) == []
    world.check_replay()


def test_a_node_that_an_admin_sets_down_instead_is_not_asked_for_any_more():
    world, slurm = on_slurm(3, 3)
    slurm.refuse_down = "slurm_update error: Invalid user id"
    next(a for a in world.agents if a.element == 1).set(1, fault=ECC)
    world.run(10)
    assert attention(world.core.view)
    slurm.node_states["n2"], slurm.reasons["n2"] = {"IDLE", "DRAIN"}, "bad fan"
    world.run(3)
    assert attention(world.core.view) == [] and "n2" in world.core.state.out_of_service
    asked = len(slurm.calls)
    slurm.node_states["n2"] = {"IDLE"}
    world.run(3)
    assert not [c for c in slurm.calls[asked:] if c[0] == "down"] and "n2" not in world.core.state.out_of_service
    world.check_replay()


def test_what_a_controller_died_over_is_asked_of_slurm_again_but_not_by_a_listing_of_before():
    world, slurm = on_slurm(4, 3)
    world.now += 0.01
    world.core.now = world.now
    world.core.append("1", 1, records.SlurmAction(action="down", element=1, node="n2", slurm_reason="unicron[x]: y"))
    world.core.on_listing(slurm.nodes(), slurm.elements())
    world.deliver()
    assert ("down", "", -1, "n2") not in slurm.calls
    world.run(2)
    assert slurm.calls.count(("down", "", -1, "n2")) == 1 and slurm.reasons["n2"] == "unicron[x]: y"


# ---------------------------------------------------------------- many nodes at once
def test_a_third_node_within_the_window_is_not_set_down_without_an_admin():
    world, slurm = on_slurm(8, 6, max_isolated_job_share=1.0, isolation_window_seconds=600.0)
    for element in (1, 2, 3):
        next(a for a in world.agents if a.element == element and not a.silent).set(element, fault=ECC)
        world.run(3)
    down = [name for name, states in slurm.node_states.items() if states == {"DOWN"}]
    assert down == ["n2", "n3"]
    event = next(e for e in world.log if e.kind == "isolation_withheld")
    assert event.record.node == "n4" and "n2, n3 were set down within 600 s" in event.record.reason
    assert "scontrol update NodeName=n4 State=DRAIN" in event.record.reason
    assert attention(world.core.view)[0].node == "n4"
    agent = next(a for a in world.agents if a.element == 3 and not a.silent)
    assert agent.ranks[3].incarnation == 1, "its process is started again in place"
    assert any("n4 is not set down" in text for text in world.job().failures[-1].actions)
    world.check_replay()
    world.core.append("", 0, records.NodeResumed(node="n2", reason="an admin gave it back"))
    agent.ready()
    agent.set(3, state="exited", exit=wire.Exit(code=1, at=world.now, lived=60.0), fault=ECC)
    world.run(3)
    assert slurm.node_states["n4"] == {"DOWN"}, "an admin has looked: there is room again"
    assert not attention(world.core.view)


def test_nodes_that_are_dead_are_facts_and_do_not_count():
    world, slurm = on_slurm(8, 6, max_isolated_job_share=1.0)
    for node in ("n2", "n3", "n4"):
        world.dead_nodes.add(node)
        for agent in world.agents:
            agent.silent = agent.silent or agent.node == node
    world.run(4)
    assert [slurm.node_states[node] for node in ("n2", "n3", "n4")] == [{"DOWN"}] * 3
    assert world.core.state.isolated == {}
    next(a for a in world.agents if a.element == 4 and not a.silent).set(4, fault=ECC)
    world.run(3)
    assert slurm.node_states["n5"] == {"DOWN"}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"restart_seconds": 0.0}, "restart_seconds = 0"),
        ({"regroup_seconds": 5.0}, "above report_timeout"),
        ({"max_isolated_share": 1.5}, "max_isolated_share = 1.5 must be 0 to 1"),
        ({"max_isolated_nodes": -1}, "max_isolated_nodes = -1"),
    ],
)
def test_limits_that_make_no_sense_are_refused(settings, text):
    assert text in problems(ControllerConfig(**settings))[0]


# ---------------------------------------------------------------- a job that fails by its own bug
def test_a_loss_that_shows_the_job_to_fail_by_its_own_bug_ends_it():
    """Its ranks hang in the making of a generation until the escalation has seen enough."""
    world = World(enter_timeout=2.0)
    agents = world.start_job(nodes=2)
    job = world.job()
    world.core.state.history.policy = Policy(stuck_faults=1)
    agents[1].set(1, state="waiting", incarnation=1)
    assert job.ended.code == 1 and "failed 1 times" in job.ended.reason
    agents[0].set(0, state="waiting", incarnation=1)
    assert len(job.failures) == 1 and "break" not in world.kinds(), "nothing happens to a job that has ended"
