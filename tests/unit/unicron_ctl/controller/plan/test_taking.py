"""Nodes and elements that the controller takes: on whose word, how many, after a crash, and how it gives them back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.support.scenarios import (
    asked,
    boundary,
    follow,
    grow_back,
    kill_agent,
    on_slurm,
    power_off,
    restart_controller,
    start,
    tell,
)
from tests.support.world import FakeSlurm, World
from unicron_ctl.controller.model.requests import Action, Run
from unicron_ctl.controller.nodes.isolation import attention
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import structs
from unicron_ctl.shared.protocol.reach import Reach
from unicron_ctl.shared.settings.partitions import PartitionConfig
from unicron_ctl.shared.slurm import drains
from unicron_ctl.shared.slurm.slurm_client import SlurmError
from unicron_detector.failures.escalation_table import MOVE


def store(world: World) -> None:
    """The events are in the log before the controller ends."""
    world.log += world.core.events
    world.core.events = []


def nodes_taken(slurm: FakeSlurm) -> list[str]:
    """Nodes that were taken out of service."""
    return asked(slurm, "down") + asked(slurm, "drain")


# ---------------------------------------------------------------- who says it
@pytest.mark.parametrize(
    ("code", "line"),
    [(-9, ""), (1, "ValueError: shapes cannot be multiplied"), (1, "OSError: [Errno 28] No space left on device")],
)
def test_what_kills_a_rank_from_outside_or_by_its_own_fault_never_blames_the_node(code, line):
    """Defect: two SIGKILLs within 30 minutes set a healthy node down."""
    world, slurm = on_slurm(4, 3, isolation_window_seconds=60.0)
    for iteration in range(1, 7):
        agent = next(a for a in world.agents if a.element == 1 and not a.silent)
        agent.die(1, code, lived=600.0, last_line=line)
        world.run(65)
        follow(world, "1", 3)
        for agent in world.agents:
            if not agent.silent and any(rank.state == "starting" for rank in agent.ranks.values()):
                agent.ready()
        world.run(1)
        boundary(world, 0.0)
        assert sorted(world.job().members) == [0, 1, 2]
        world.iterate("1", iteration)
    actions = {failure.record.action for failure in world.job().failures if failure.record.kind_of_failure == "rank"}
    assert actions <= {"restart", MOVE} and not nodes_taken(slurm) and not attention(world.core.view)
    assert code != -9 or MOVE in actions, "the same again is tried on another node"


def test_a_job_without_another_node_is_restarted_in_place_for_what_blames_nobody(snapshot):
    world, slurm = on_slurm(3, 3)
    for _ in range(3):
        agent = next(a for a in world.agents if a.element == 1)
        agent.die(1, -9, lived=600.0)
        world.run(5)
        agent.ready()
        world.run(1)
        boundary(world, 0.0)
        world.iterate("1", world.job().iteration + 1)
    assert not asked(slurm, "requeue_hold") and sorted(world.job().members) == [0, 1, 2]
    assert [failure.actions for failure in world.job().failures] == snapshot


def test_slurm_does_not_start_a_moved_element_on_the_node_that_it_left():
    world, slurm = on_slurm(3, 3)
    ecc = structs.Fault(type="RuntimeError", text="CUDA error: uncorrectable ECC error encountered", at=0.0, fatal=True)
    next(a for a in world.agents if a.element == 1).set(1, fault=ecc)
    world.run(10)
    slurm.schedule()
    world.run(2)
    entry = slurm.queue["1", 1]
    assert entry["state"] == "PENDING" and "held" in entry["reason"] and "n2" in slurm.free()
    follow(world, "1", 3)  # what Slurm has ended is gone
    tell(world, "n2", "good", source="pair-test")
    world.run(3)
    assert slurm.queue["1", 1]["node"] == "n2" and not attention(world.core.view), "the pair test has cleared it"


def test_a_rank_that_dies_on_a_drained_node_is_started_on_another():
    world, slurm = on_slurm(4, 3)
    tell(world, "n2", "bad", "gpu: 7 of 8", drain=True)
    world.run(8)
    assert asked(slurm, "drain") == ["n2"] and sorted(world.job().members) == [0, 1, 2], "what runs there goes on"
    next(a for a in world.agents if a.element == 1).die(1, lived=600.0)
    world.run(3)
    assert slurm.queue["1", 1]["node"] == "n4"


def test_roots_health_check_drains_and_other_jobs_run_on():
    world, slurm = on_slurm(4, 3)
    slurm.queue["9", 0] = {**slurm.queue["1", 1], "node": "n4", "comment": ""}
    tell(world, "n4", "bad", "kernel: Xid 79", drain=False)
    world.run(10)
    assert not nodes_taken(slurm), "its admin wants it reported only"
    tell(world, "n4", "good")
    tell(world, "n4", "bad", "kernel: Xid 79", drain=True)
    world.run(10)
    assert slurm.node_states["n4"] == {"IDLE", "DRAIN"} and asked(slurm, "down") == []
    assert slurm.reasons["n4"] == "unicron[health]: kernel: Xid 79" and slurm.queue["9", 0]["state"] == "RUNNING"
    world.run(5)
    assert asked(slurm, "drain") == ["n4"]
    tell(world, "n4", "good")
    world.run(3)
    assert slurm.node_states["n4"] == {"IDLE"} and asked(slurm, "resume") == ["n4"], "its checks have passed"


def test_no_more_nodes_are_drained_than_the_limit_allows():
    world, slurm = on_slurm(9, 3, max_isolated_nodes=2)
    for node in ("n5", "n6", "n7", "n8"):
        tell(world, node, "bad", "memory: a wrong line in unicron.toml", drain=True)
    world.run(20)
    assert asked(slurm, "drain") == ["n5", "n6"]
    assert {item.node for item in attention(world.core.view)} == {"n7", "n8"}
    assert len([e for e in world.log if e.kind == "isolation_withheld"]) == 2, "said once"


def test_a_node_that_drained_itself_is_given_back_and_one_that_an_admin_drained_is_not():
    world, slurm = on_slurm(5, 3)
    slurm.drain("n4", "unicron[health]: gpu: 7 of 8")
    slurm.drain("n5", "fan 2")
    for node in ("n4", "n5"):
        tell(world, node, "bad", "gpu: 7 of 8", drain=True)
    world.run(10)
    assert not nodes_taken(slurm)
    for node in ("n4", "n5"):
        tell(world, node, "good")
    world.run(5)
    assert slurm.node_states["n4"] == {"IDLE"} and slurm.reasons["n5"] == "fan 2" and asked(slurm, "resume") == ["n4"]


def test_a_proven_bad_node_that_slurm_has_down_is_drained_as_it_would_have_drained_itself(snapshot):
    """Defect: it was left, and came back into service by itself with the next word of its slurmd."""
    world, slurm = on_slurm(5, 3)
    slurm.node_states["n4"], slurm.reasons["n4"] = {"DOWN"}, "Not responding"
    slurm.node_states["n5"], slurm.reasons["n5"] = {"DOWN"}, "board, ticket 7"
    for node in ("n4", "n5"):
        tell(world, node, "bad", "gpu: 7 of 8", drain=True)
    world.run(10)
    assert asked(slurm, "drain") == ["n4"] and slurm.reasons["n4"] == snapshot


def test_a_node_that_a_pair_test_took_is_not_given_back_once_its_checks_pass():
    """Defect: where the test's verdict had not reached the controller, it took the drain for the checks'."""
    world, slurm = on_slurm(4, 3)
    slurm.drain("n4", drains.drain_reason(drains.HEALTH, "pair test failed with n5 and n6"))
    tell(world, "n4", "bad", "gpu: 7 of 8", drain=True)
    world.run(10)
    tell(world, "n4", "good")
    world.run(10)
    assert "DRAIN" in slurm.node_states["n4"] and not asked(slurm, "resume")


def test_a_drain_that_an_admin_was_quicker_with_is_his(monkeypatch):
    """Defect: his reason was overwritten, and the node given back once its checks passed."""
    world, slurm = on_slurm(4, 3)
    drain = drains.drain_node

    def admin_first(client, name, said):
        slurm.node_states[name], slurm.reasons[name] = {"IDLE", "DRAIN"}, "fan 2"
        return drain(client, name, said)

    monkeypatch.setattr(drains, "drain_node", admin_first)
    tell(world, "n4", "bad", "gpu: 7 of 8", drain=True)
    world.run(10)
    tell(world, "n4", "good")
    world.run(10)
    assert slurm.node_states["n4"] == {"IDLE", "DRAIN"} and slurm.reasons["n4"] == "fan 2"
    assert not asked(slurm, "resume") and not attention(world.core.view)
    slurm.resume("n4")
    world.run(5)
    assert not world.core.state.out_of_service


def test_what_a_pair_test_proved_bad_stays_drained_until_a_pair_test_passes():
    world, slurm = on_slurm(4, 3)
    tell(world, "n4", "bad", "kernel: Xid 79", drain=True)
    world.run(10)
    tell(world, "n4", "bad", "wrong sum", source="pair-test")
    tell(world, "n4", "good")
    world.run(10)
    assert "DRAIN" in slurm.node_states["n4"]
    tell(world, "n4", "good", source="pair-test")
    world.run(10)
    assert slurm.node_states["n4"] == {"IDLE"}


# ---------------------------------------------------------------- others on the node
def refuse(node: str, reason: str) -> None:
    raise SlurmError("slurm_update error: Invalid user id")


def beside(slurm: FakeSlurm, node: str, state: str = "RUNNING") -> dict[str, Any]:
    """Somebody else's element on that node."""
    slurm.queue["9", 0] = {**slurm.queue["1", 1], "node": node, "state": state}
    return slurm.queue["9", 0]


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED", "COMPLETING"])
def test_other_jobs_on_a_lost_node_are_not_ended_with_it(state: str, snapshot: SnapshotAssertion):
    """Defect: a node that was cut off for seconds was set DOWN, and Slurm ended all that ran there."""
    world, slurm = on_slurm(4, 3)
    other = beside(slurm, "n2", state)
    world.run(2)
    power_off(world, "n2")
    world.run(60)
    assert asked(slurm, "down") == [] and asked(slurm, "drain") == ["n2"] and other["state"] == state
    (failure,) = world.job().failures
    assert [slurm.reasons["n2"], failure.actions] == snapshot
    assert any(e.kind == "slurm_action" and "9_0" in e.record.reason for e in world.log), "it says whose"
    assert sorted(world.job().members) == [0, 2] and not asked(slurm, "requeue") + asked(slurm, "requeue_hold")
    assert world.core.state.isolated.keys() == {"n2"}, "it counts against the limit"
    slurm.down("n2", slurm.reasons["n2"])  # SlurmdTimeout is over
    slurm.node_states["n2"] = {"DOWN", "DRAIN", "NOT_RESPONDING"}
    world.run(5)
    grow_back(world)
    assert sorted(world.job().members) == [0, 1, 2] and slurm.queue["1", 1]["node"] == "n4"


def test_a_drained_node_that_was_only_cut_off_is_a_candidate_again_by_itself():
    world, slurm = on_slurm(4, 3)
    other = beside(slurm, "n2")
    world.run(2)
    cut = next(agent for agent in world.agents if agent.node == "n2")
    power_off(world, "n2")
    world.run(4)
    assert asked(slurm, "drain") == ["n2"] and sorted(world.job().members) == [0, 2]
    world.dead_nodes.clear()
    cut.silent = False
    world.run(5)
    assert "DRAIN" in slurm.node_states["n2"], "not at its first word"
    world.run(12)
    assert slurm.node_states["n2"] == {"IDLE"} and asked(slurm, "resume") == ["n2"]
    assert world.core.state.nodes["n2"].unverified and not world.core.state.out_of_service
    assert other["state"] == "RUNNING" and not asked(slurm, "down")
    cut.ready()
    world.run(1)
    boundary(world, 0.0)
    assert sorted(world.job().members) == [0, 1, 2]


def shared_node() -> tuple[World, FakeSlurm]:
    """Elements of two managed jobs are on n2."""
    world, slurm = on_slurm(5, 3)
    slurm.queue["2", 0] = {**slurm.queue["1", 1], "node": "n4"}
    slurm.queue["2", 1] = {**slurm.queue["1", 1], "node": "n2"}
    start(world, "2", 2)
    world.run(3)
    return world, slurm


def test_a_node_is_set_down_once_all_that_slurm_shows_there_is_lost_with_it():
    """Two jobs share it: the first that is found lost has it drained for the other's sake."""
    world, slurm = shared_node()
    power_off(world, "n2")
    world.run(3)
    assert asked(slurm, "drain") == ["n2"] and asked(slurm, "down") == ["n2"]
    assert slurm.node_states["n2"] == {"DOWN"} and [len(world.job(name).failures) for name in "12"] == [1, 1]
    world.dead_nodes.clear()
    world.run(20)
    assert slurm.node_states["n2"] == {"IDLE"}


def test_a_drained_node_of_which_slurm_refuses_the_down_is_not_done_with(monkeypatch: pytest.MonkeyPatch):
    """Defect: that it was drained counted as its being down."""
    world, slurm = shared_node()
    with monkeypatch.context() as patched:
        patched.setattr(slurm, "down", refuse)
        power_off(world, "n2")
        world.run(10)
    assert slurm.node_states["n2"] == {"IDLE", "DRAIN"} and world.core.state.nodes["n2"].going_down
    assert attention(world.core.view)[0].node == "n2"
    world.run(10)
    assert slurm.node_states["n2"] == {"DOWN"} and not attention(world.core.view)


def test_what_began_on_a_node_that_slurm_did_not_set_down_is_not_ended_later():
    world, slurm = on_slurm(4, 3)
    slurm.refuse_down = "slurm_update error: Communication connection failure"
    power_off(world, "n2")
    world.run(4)
    slurm.queue["1", 1].update(state="PENDING", node=None, reason="BeginTime")
    other = beside(slurm, "n2")
    other.update(state="RUNNING", reason="")
    slurm.refuse_down, refused = "", len(asked(slurm, "down"))
    world.run(10)
    assert len(asked(slurm, "down")) == refused and "DRAIN" in slurm.node_states["n2"] and other["state"] == "RUNNING"


@pytest.mark.parametrize("mode", ["observe", "act"])
def test_draining_a_lost_node_needs_the_permission_to_drain(mode: str, snapshot: SnapshotAssertion):
    rules = PartitionConfig(mode=mode, actions=["down"], max_weight=100.0)
    world, slurm = on_slurm(4, 3, partitions={"default": rules})
    beside(slurm, "n2")
    world.run(2)
    power_off(world, "n2")
    world.run(10)
    assert not nodes_taken(slurm) and sorted(world.job().members) == [0, 2]
    (said,) = [e.record for e in world.log if e.kind == "observed" and e.record.node == "n2"]
    assert said.would == "drain n2" and [said.reason, world.job().failures[-1].actions] == snapshot


def test_slurms_word_on_a_node_that_was_only_drained_is_its_own():
    """Another job has a single node there, so nobody else can say that it is lost."""
    world, slurm = on_slurm(4, 3)
    slurm.queue["2", 0] = {**slurm.queue["1", 1], "node": "n2"}
    start(world, "2", 1)
    world.run(3)
    answer = world.answer
    world.answer = lambda witness, target: Reach.UNKNOWN if target == "n2:2-0-n2-3" else answer(witness, target)
    power_off(world, "n2")
    world.run(5)
    assert asked(slurm, "drain") == ["n2"] and not world.job("2").failures
    slurm.node_states["n2"] |= {"NOT_RESPONDING"}
    world.run(5)
    assert [failure.record.kind_of_failure for failure in world.job("2").failures] == ["node"]


# ---------------------------------------------------------------- giving back
def test_a_node_that_was_cut_off_and_is_back_is_a_candidate_again_by_itself():
    """Its slurmd was never started again: defect, no node came back by itself."""
    world, slurm = on_slurm(4, 3)
    power_off(world, "n2")
    world.run(5)
    assert slurm.node_states["n2"] == {"DOWN"}
    world.run(30)
    assert slurm.node_states["n2"] == {"DOWN"}, "it does not answer"
    world.dead_nodes.clear()
    world.run(8)
    assert slurm.node_states["n2"] == {"DOWN"}, "not at its first word"
    world.run(12)
    assert slurm.node_states["n2"] == {"IDLE"} and world.core.state.nodes["n2"].unverified


def test_a_node_that_is_back_has_to_pass_its_checks_where_nodes_report_them():
    world, slurm = on_slurm(4, 3, admission_seconds=60.0)
    tell(world, "n1", "good")
    power_off(world, "n2")
    world.run(5)
    world.dead_nodes.clear()
    world.run(30)
    assert slurm.node_states["n2"] == {"DOWN"}
    tell(world, "n2", "good")
    world.run(3)
    assert slurm.node_states["n2"] == {"IDLE"} and not world.core.state.nodes["n2"].unverified


# ---------------------------------------------------------------- limits
def test_requeues_of_a_job_are_bounded_and_another_job_is_not_held_up(snapshot):
    world, slurm = on_slurm(6, 3, max_requeues_per_job=3, isolation_window_seconds=300.0)
    for _ in range(4):
        kill_agent(world, 1)
        before = len(asked(slurm, "requeue"))
        world.run(6)
        if len(asked(slurm, "requeue")) == before:
            break
        grow_back(world, seconds=2)
    assert len(asked(slurm, "requeue")) == 3
    (item,) = [item for item in attention(world.core.view) if not item.node]
    assert item.reason == snapshot
    assert sorted(world.job().members) == [0, 2], "it goes on with those that it has"
    world.run(310)
    assert not [item for item in attention(world.core.view) if not item.node]
    assert len(asked(slurm, "requeue")) == 4


def test_holds_and_requeues_of_all_jobs_are_bounded_by_the_minute():
    slurm = FakeSlurm(2)
    world = World(slurm, max_holds_per_minute=4, max_requeues_per_minute=1)
    slurm.submit("1", 12)
    start(world, "1", 12)
    world.run(20)
    assert len(asked(slurm, "hold")) == 4 and world.job().phase == "running"
    assert any("max_holds_per_minute" in item.reason for item in attention(world.core.view))
    world.run(60)
    assert len(asked(slurm, "hold")) == 8
    for element in (0, 1):
        kill_agent(world, element)
    world.run(10)
    assert len(asked(slurm, "requeue")) == 1
    world.run(60)
    assert len(asked(slurm, "requeue")) == 2


def test_an_element_that_is_starting_is_not_requeued_again():
    """Defect: a starting element was requeued four times in four seconds."""
    world, slurm = on_slurm(4, 3)
    kill_agent(world, 1)
    world.run(4)
    assert asked(slurm, "requeue") == ["n2"] and slurm.queue["1", 1]["state"] == "RUNNING"
    world.run(20)
    assert asked(slurm, "requeue") == ["n2"], "its agent has not come yet"
    slurm.queue["1", 1].update(state="FAILED", node=None)  # Slurm ended what was starting
    world.run(3)
    assert asked(slurm, "requeue") == ["n2"]
    world.run(30)
    assert len(asked(slurm, "requeue")) == 2, "that did not come to anything"


def test_a_replacement_that_ends_before_its_agent_came_is_started_again():
    """Defect: what came back with the lost node cancelled the same step of its replacement, which then was FAILED for
    ever, and the job a node short."""
    world, slurm = on_slurm(4, 3)
    power_off(world, "n2")
    world.run(4)
    again = slurm.queue["1", 1]
    assert (again["state"], again["node"], again["restarts"]) == ("RUNNING", "n4", 1)
    again.update(state="FAILED", node=None)
    world.run(3)
    assert len(asked(slurm, "requeue")) == 1 and again["state"] == "RUNNING" and again["restarts"] == 2
    again.update(state="FAILED", node=None)
    world.run(20)
    assert len(asked(slurm, "requeue")) == 1, "not at once a second time"
    world.run(20)
    assert len(asked(slurm, "requeue")) == 2


def test_an_element_that_is_no_member_and_ends_is_started_again():
    """Defect: Slurm showed its end before that was judged, so the plan went on without it and it counted as taken away:
    nobody started it again. The same where agents had gone on without it while the controller was away."""
    world, slurm = on_slurm(4, 3)
    kill_agent(world, 1)
    world.run(4)
    (again,) = follow(world, "1", 3)
    world.run(30)
    again.silent = True
    slurm.queue["1", 1].update(state="FAILED", node=None)
    world.run(40)
    assert len(asked(slurm, "requeue")) == 2 and slurm.queue["1", 1]["state"] == "RUNNING"


def test_an_element_whose_agent_never_comes_is_given_up():
    """A script that fails at once everywhere."""
    world, slurm = on_slurm(2, 1, max_requeues_per_job=100)
    power_off(world, "n1")
    for _ in range(10):
        world.run(40)
        if slurm.queue["1", 0]["state"] == "RUNNING":
            slurm.queue["1", 0].update(state="FAILED", node=None)
    assert len(asked(slurm, "requeue")) == 4
    assert world.core.state.jobs["1"].ended, "nothing of it is to come any more"


def test_a_lost_element_that_slurm_may_not_start_again_is_let_go():
    """Its submission has --no-requeue."""
    world, slurm = on_slurm(4, 3)
    power_off(world, "n2")
    world.run(3)
    assert slurm.node_states["n2"] == {"DOWN"}
    slurm.queue["1", 1].update(state="NODE_FAIL", node=None, restarts=0)
    world.run(60)
    assert not asked(slurm, "requeue")


def test_an_element_that_slurm_has_moved_itself_is_not_requeued_for_its_dead_agent():
    world, slurm = on_slurm(4, 3)
    slurm.queue["1", 1].update(node="n4", restarts=1)
    kill_agent(world, 1)
    world.run(10)
    assert not asked(slurm, "requeue")


# ---------------------------------------------------------------- a crash between intent and outcome
CRASHES: dict[str, tuple[Callable[[FakeSlurm], Any], Callable[[FakeSlurm], bool]]] = {
    # what Slurm had done of it when the controller ended, beside nothing; and what must hold in the end
    "down": (lambda s: s.down("n4", "unicron[x]: y"), lambda s: s.node_states["n4"] == {"DOWN"}),
    "drain": (lambda s: s.drain("n4", "unicron[x]: y"), lambda s: "DRAIN" in s.node_states["n4"]),
    "requeue": (lambda s: s.requeue("1", 1), lambda s: s.queue["1", 1]["restarts"] == 1),
    "requeue_hold": (lambda s: s.requeue_hold("1", 1, "unicron: x"), lambda s: s.queue["1", 1]["restarts"] == 1),
    "hold": (lambda s: s.hold("1", 3, "unicron: x"), lambda s: "Held" in s.queue["1", 3]["reason"]),
    "release": (lambda s: s.release("1", 3), lambda s: "Held" in s.queue["1", 3]["reason"]),
    "pin": (lambda s: s.pin("1", 3, "n4"), lambda s: True),
    "start_now": (lambda s: s.start_now("1", 3), lambda s: True),
    "cancel": (lambda s: s.cancel("1", 3), lambda s: True),
}


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("action", CRASHES)
def test_what_a_controller_died_over_is_finished_or_undone(action, done):
    """Defect: a `down` whose outcome was not heard was taken for given back by somebody else."""
    world, slurm = on_slurm(4, 4 if action not in ("down", "drain") else 3)
    if action not in ("down", "drain"):
        slurm.node_states["n4"], slurm.reasons["n4"] = {"IDLE", "DRAIN"}, "fan"  # the plan has three nodes
        power_off(world, "n4")
        slurm.queue["1", 3].update(state="PENDING", node=None, reason="Priority", restarts=0)
        world.run(8)
        assert slurm.queue["1", 3]["reason"] == "JobHeldAdmin"
    on_node = action in ("down", "drain")
    where = ("", -1, "n4") if on_node else ("1", 1 if "requeue" in action else 3, "n4")
    slurm.calls.clear()
    world.core.append(
        where[0],
        0,
        records.SlurmAction(
            action=action, element=where[1], node=where[2], slurm_reason="unicron[x]: y", restarts=0, reason="a test"
        ),
    )
    assert world.core.state.intents
    if done:
        CRASHES[action][0](slurm)
    store(world)
    restart_controller(world)
    world.run(6)
    assert CRASHES[action][1](slurm), slurm.queue
    assert not world.core.state.intents, "its outcome is on record"
    again = [
        call for call in slurm.calls if call[0] == action and call[1:] in ((where[0], where[1], "n4"), ("", -1, "n4"))
    ]
    assert len(again) == (not done and action in ("down", "drain", "requeue", "requeue_hold"))
    assert not [e for e in world.log if e.kind == "node_resumed"]
    if action == "pin":
        assert ("1", 3) not in world.core.state.pins


@pytest.mark.parametrize("action", ["down", "drain", "requeue", "requeue_hold"])
def test_what_is_not_allowed_any_more_is_given_up(action):
    """Defect: what a controller died over, and the next one may not do, stayed open for ever."""
    world, slurm = on_slurm(4, 3)
    where = ("", -1, "n4") if action in ("down", "drain") else ("1", 1, "n2")
    if not where[0]:
        world.core.append("", 0, records.NodeIsolated(node="n4", reason="a test"))
    job, element, node = where
    intent = records.SlurmAction(action=action, element=element, node=node, restarts=0, reason="a test")
    world.core.append(job, 0, intent)
    store(world)
    world.config.partitions = {}
    slurm.calls.clear()
    restart_controller(world)
    world.run(6)
    assert not world.core.state.intents and not slurm.calls and not world.core.state.out_of_service
    (failed,) = [event.record for event in world.log if event.kind == "slurm_error"]
    assert failed.action == action and "not allowed" in failed.reason


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_node_that_was_being_given_back_is_given_back(done):
    world, slurm = on_slurm(4, 3)
    power_off(world, "n4")
    world.core.append("", 0, records.SlurmAction(action="down", element=-1, node="n4", slurm_reason="unicron[x]: y"))
    slurm.down("n4", "unicron[x]: y")
    world.run(3)
    world.core.append("", 0, records.SlurmAction(action="resume", element=-1, node="n4"))
    if done:
        slurm.resume("n4")
    store(world)
    world.dead_nodes.clear()
    world.restart()
    world.run(2)
    assert not world.core.state.intents and world.core.state.nodes["n4"].downed != done
    resumed = [e.record for e in world.log if e.kind == "node_resumed"]
    assert len(resumed) == done and not any(record.by_others for record in resumed)
    world.run(25)
    assert slurm.node_states["n4"] == {"IDLE"} and not world.core.state.nodes["n4"].downed


def test_an_answer_from_before_a_node_was_taken_out_gives_it_to_nobody():
    """Defect: a dead node whose `down` overtook a listing was taken for given back, and an element was pinned to it."""
    world, slurm = on_slurm(4, 3)
    power_off(world, "n4")
    world.run(2)
    before = slurm.nodes(), slurm.elements()
    world.core.slurm.busy, world.core.slurm.asked_at = True, world.core.now  # Slurm is slow to answer
    world.core.append("", 0, records.SlurmAction(action="down", element=-1, node="n4", slurm_reason="unicron[x]: y"))
    slurm.down("n4", "unicron[x]: y")
    world.core.append("", 0, records.SlurmDone(action="down", element=-1, node="n4", reason="unicron[x]: y"))
    world.core.on_listing(*before)
    assert world.core.state.nodes["n4"].downed
    world.run(2)
    assert world.core.state.nodes["n4"].downed and not [e for e in world.log if e.kind == "node_resumed"]
    slurm.resume("n4")
    world.run(2)
    assert [e.record.by_others for e in world.log if e.kind == "node_resumed"] == [True], "an admin's doing counts"


def test_every_action_has_its_outcome_on_record():
    world, slurm = on_slurm(4, 3)
    kill_agent(world, 1)
    world.run(5)
    actions = [e.record.action for e in world.log if e.kind == "slurm_action"]
    outcomes = [e.record.action for e in world.log if e.kind == "slurm_done"]
    assert sorted(actions) == sorted(outcomes) and "requeue" in actions and not world.core.state.intents
    refused = replace(Action("hold", "1", 0, "", "why"), text="unicron: x")
    world.core._request(Run((refused,)))
    world.core.requests.clear()
    world.core.on_action(refused, "slurm_update error")
    assert not world.core.state.intents and not [t for t in world.core.state.taken if t.action == "hold"]
    assert slurm.queue["1", 0]["state"] == "RUNNING"
