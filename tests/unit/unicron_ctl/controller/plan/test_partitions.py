"""Permissions of a partition in the controller: who is healed, the requests to Slurm, whose hold is whose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.support.questions import told
from tests.support.scenarios import restart_controller, start, submit
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.api import answers
from unicron_ctl.controller.model.asker import EVERYBODY, NOBODY
from unicron_ctl.controller.model.fold import replay
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.settings.config import PlannerConfig
from unicron_ctl.shared.settings.partitions import Claim, PartitionConfig


def world_of(nodes: int, **partitions: PartitionConfig) -> tuple[World, FakeSlurm]:
    slurm = FakeSlurm(nodes)
    return World(slurm, observe=None, partitions=partitions), slurm


def would(world: World) -> list[str]:
    return [event.record.would for event in world.log if event.kind == "observed" and event.record.action != "plan"]


def plan_of(world: World) -> dict[str, int]:
    return world.core.state.assignment


@pytest.mark.parametrize(
    ("partitions", "facts"),
    [
        pytest.param({}, {}, id="the admin has said nothing"),
        pytest.param(
            {"gpu": PartitionConfig(mode="act"), "slow": PartitionConfig(mode="observe")},
            {"partition": "gpu,slow"},
            id="one of the job's partitions only observes",
        ),
    ],
)
def test_nothing_is_asked_of_slurm_unless_the_admin_says_so(partitions, facts) -> None:
    world, slurm = world_of(2, **partitions)
    submit(world, "1", 3, **facts)
    world.run(4.0)
    assert world.job().phase == "running" and slurm.calls == [] and would(world) == ["hold 1_2"]


def test_one_partition_acts_and_another_is_only_watched() -> None:
    world, slurm = world_of(4, gpu=PartitionConfig(mode="act", max_weight=9.0))
    for node, name in (("n1", "gpu"), ("n2", "gpu"), ("n3", "cpu"), ("n4", "cpu")):
        slurm.node_facts[node] = {"partitions": (name, "all")}
    submit(world, "1", 3, weight=9.0, partition="gpu")
    submit(world, "2", 2, partition="cpu")
    slurm.queue["1", 2].update(state="PENDING", node=None, reason="Resources")
    slurm.queue["2", 0].update(state="RUNNING", node="n3")
    slurm.queue["2", 1].update(state="RUNNING", node="n4")
    world.agents.clear()
    start(world, "1", 3, 9.0)
    start(world, "2", 2)
    world.run(5.0)
    assert plan_of(world) == {"1": 2}, "the other job is not planned for"
    assert slurm.calls == [("hold", "1", 2, "")]
    assert answers.modes(world.core) == {
        "all": "observe",
        "cpu": "observe",
        "default": "observe",
        "gpu": "act",
    }


def test_what_is_not_among_the_actions_is_only_said(snapshot: SnapshotAssertion) -> None:
    world, slurm = world_of(3, default=PartitionConfig(mode="act", actions=["hold", "pin"]))
    submit(world, "1", 4)
    world.run(4.0)
    assert ("hold", "1", 3, "") in slurm.calls
    world.dead_nodes.add("n2")
    world.agents[1].silent = True
    world.run(4.0)
    assert "down" not in {call[0] for call in slurm.calls} and "down n2" in would(world)
    said = next(event.record.reason for event in world.log if event.kind == "observed")
    assert said == snapshot


def test_a_pause_changes_nothing_in_slurm_until_it_is_over(snapshot: SnapshotAssertion) -> None:
    world, slurm = world_of(2, main=PartitionConfig(mode="act"))
    answer = told(world.core, "pause", seconds=30)
    assert answer["until"] == {"": world.core.now + 30} and answer["modes"] == {"default": "observe", "main": "observe"}
    submit(world, "1", 3)
    world.run(4.0)
    assert slurm.calls == [] and would(world) == ["hold 1_2"] and world.job().phase == "running"
    said = next(event.record.reason for event in world.log if event.kind == "observed")
    assert said == snapshot
    assert replay(world.log).paused == world.core.state.paused, "a restart does not end it"
    world.run(30.0)
    assert ("hold", "1", 2, "") in slurm.calls and answers.modes(world.core)["main"] == "act"


def _refusal(world: World, order: str, **args: Any) -> str:
    with pytest.raises(answers.Unanswerable) as refused:
        told(world.core, order, **args)
    return str(refused.value)


def test_one_partition_is_paused_and_resumed_by_admins_alone(snapshot: SnapshotAssertion) -> None:
    world, _ = world_of(2, gpu=PartitionConfig(mode="act"), main=PartitionConfig(mode="act"))
    assert told(world.core, "pause", partition="gpu")["modes"]["gpu"] == "observe"
    assert told(world.core, "status")["controller"]["modes"]["main"] == "act"
    assert told(world.core, "status")["controller"]["paused"] == {"gpu": 0.0}
    refused = [_refusal(world, "pause", partition=name) for name in ("cpu", "default")]  # a table of unicron.toml
    refused += [_refusal(world, order, asker=NOBODY) for order in ("pause", "resume")]
    told(world.core, "pause")
    assert [*refused, _refusal(world, "resume", partition="gpu")] == snapshot
    assert told(world.core, "resume") == {
        "time": world.core.now,
        "until": {},
        "modes": {"default": "observe", "gpu": "act", "main": "act"},
    }


def test_in_a_partition_that_is_off_agents_are_told_to_train_unprotected(snapshot: SnapshotAssertion) -> None:
    world, slurm = world_of(2, main=PartitionConfig(mode="off"))
    slurm.submit("1", 1)
    agent = FakeAgent(world, "1", 0, "n1")
    agent.obedient = False  # a real one asks again after a while, not at once
    agent.register()
    assert not agent.heard, "Slurm has not shown yet whose partition it is"
    world.run(1.5)
    (told,) = [message for message in agent.heard if isinstance(message, wire.Refusal) and message.final]
    assert not told.replaced
    assert told.reason == snapshot and not world.core.state.jobs


def test_without_slurm_the_default_says_whether_jobs_are_protected() -> None:
    world = World(observe=None, partitions={"default": PartitionConfig(mode="off")})
    agent = FakeAgent(world, "1", 0, "n1")
    agent.obedient = False  # a real one asks again after a while, not at once
    agent.register()
    assert [m.final for m in agent.heard if isinstance(m, wire.Refusal)] == [True]


def test_a_weight_counts_for_no_more_than_its_account_or_qos_may_claim(snapshot: SnapshotAssertion) -> None:
    main = PartitionConfig(
        mode="act", account={"lab": Claim(max_weight=4.0)}, qos={"high": Claim(max_weight=8.0)}, max_weight=2.0
    )
    bounds = []
    for facts, counts in (({}, 2.0), ({"account": "lab"}, 4.0), ({"account": "lab", "qos": "high"}, 8.0)):
        world, _slurm = world_of(2, main=main)
        submit(world, "1", 2, weight=1e6, **facts)
        world.run(3.0)
        assert f"w{counts:g} " in world.core.state.plan_inputs
        bounds.append(answers.answer(world.core, None, "explain", {"job": "1"}, EVERYBODY).bounds)  # type: ignore[arg-type]
    assert bounds == snapshot


def test_a_huge_weight_takes_no_nodes_of_others() -> None:
    world, _slurm = world_of(6, default=PartitionConfig(mode="act"))
    submit(world, "1", 3)
    submit(world, "2", 6, weight=1e6)
    world.run(6.0)
    assert plan_of(world) == {"1": 3, "2": 3}


def test_flops_are_compared_among_the_jobs_of_one_user_unless_the_admin_says_otherwise() -> None:
    for compare, owner in (("user", "ann"), ("account", "account lab"), ("flops", "all users")):
        world, _slurm = world_of(2, default=PartitionConfig(mode="act"))
        world.core.config.planner = PlannerConfig(compare=compare)
        submit(world, "1", 2, account="lab")
        world.run(3.0)
        assert world.core.state.plan_inputs.endswith(f"of {owner}")


def test_an_element_is_not_sent_where_slurm_would_not_start_it(snapshot: SnapshotAssertion) -> None:
    """Release 0.1 pinned an 8-GPU element to a CPU node."""
    world, slurm = world_of(4, default=PartitionConfig(mode="act"))
    slurm.node_facts["n4"] = {"gres": "", "partitions": ("main", "cpu")}
    slurm.node_facts["n3"] = {"gres": "gpu:1"}
    submit(world, "1", 2, gres="gpu:1")
    world.run(3.0)
    world.dead_nodes |= {"n1", "n2"}
    slurm.queue["9", 0] = slurm.queue["1", 0] | {"state": "RUNNING", "node": "n3"}  # somebody else's
    for agent in world.agents:
        agent.silent = agent.node == "n1"
    world.run(4.0)
    assert "n4" not in {call[3] for call in slurm.calls if call[0] == "pin"}
    said = answers.answer(world.core, None, "explain", {"job": "1"}, EVERYBODY).bounds  # type: ignore[arg-type]
    assert said == snapshot


@pytest.mark.by_hand
def test_a_node_that_is_about_to_go_to_a_pending_job_of_higher_priority_is_left_to_it() -> None:
    for priority, planned, taken in ((5, frozenset({"n3"}), False), (5, frozenset(), False), (0, frozenset(), True)):
        world, slurm = world_of(3, default=PartitionConfig(mode="act"))
        submit(world, "1", 3, priority=1)
        world.run(1.5)
        rival = {"planned_nodes": planned, "priority": priority, "partition": "main", "reason": "Resources"}
        slurm.queue["1", 2].update(state="PENDING", node=None, reason="BeginTime")
        slurm.queue["9", 0] = slurm.queue["1", 2] | rival | {"pin": "n9"}
        world.agents = [agent for agent in world.agents if agent.element != 2]
        world.core.state.jobs["1"].agents.pop(2, None)
        world.core.view.live.remove("1", 2)
        world.run(4.0)
        assert (("pin", "1", 2, "n3") in slurm.calls) is taken


def test_growth_leaves_the_spare_nodes_and_a_lost_node_may_be_replaced_by_one() -> None:
    world, slurm = world_of(4, default=PartitionConfig(mode="act", spare_nodes=1))
    slurm.node_states["n4"] = {"DOWN"}
    submit(world, "1", 4)
    world.run(3.0)
    slurm.node_states["n4"] = {"IDLE"}
    world.run(3.0)
    assert plan_of(world) == {"1": 3}, "it does not grow onto the spare"
    world.dead_nodes.add("n1")
    world.agents[0].silent = True
    world.run(4.0)
    assert "n4" in {call[3] for call in slurm.calls if call[0] == "pin"}


@pytest.mark.parametrize("comment", ["", "unicron: held, the plan has no node for it"])
def test_only_what_the_log_says_was_held_here_is_released(comment: str) -> None:
    """Release 0.1 went by the Comment, which users write."""
    world, slurm = world_of(3, default=PartitionConfig(mode="act"))
    slurm.submit("1", 3)
    slurm.queue["1", 2].update(
        state="PENDING", node=None, reason="JobHeldAdmin", comment=comment or "unicron", admin_comment=comment
    )
    start(world, "1", 3)
    world.run(6.0)
    assert "release" not in {call[0] for call in slurm.calls} and slurm.queue["1", 2]["reason"] == "JobHeldAdmin"


def test_what_was_held_here_is_released_here_also_after_a_restart_and_the_comment_stays() -> None:
    world, slurm = world_of(2, default=PartitionConfig(mode="act"))
    submit(world, "1", 3, comment="mine")
    world.run(4.0)
    assert slurm.queue["1", 2]["reason"] == "JobHeldAdmin" and slurm.queue["1", 2]["comment"] == "mine"
    assert world.core.state.held == {("1", 2)}
    restart_controller(world)
    slurm.node_states["n3"], slurm.starts["n3"] = {"IDLE"}, 1.0
    world.run(3.0)
    assert ("release", "1", 2, "n3") in slurm.calls and not world.core.state.held
    slurm.hold("1", 2, "the admin's")
    slurm.queue["1", 2].update(state="PENDING", node=None)
    before = len(slurm.calls)
    world.run(40.0)
    assert "release" not in {call[0] for call in slurm.calls[before:]}


def _held_and_released() -> tuple[World, FakeSlurm]:
    """A job of two on two nodes; its third element was held here, and is to start on the node that comes back."""
    world, slurm = world_of(2, default=PartitionConfig(mode="act"))
    submit(world, "1", 3)
    world.run(4.0)
    assert world.core.state.held == {("1", 2)} and slurm.queue["1", 2]["reason"] == "JobHeldAdmin"
    return world, slurm


@pytest.mark.parametrize("restarted", [False, True])
def test_a_release_that_slurmctld_forgot_is_asked_for_again(restarted: bool) -> None:
    """Defect: it was killed before it had saved its state. The element was held for ever, as if by somebody else."""
    world, slurm = _held_and_released()
    before = dict(slurm.queue["1", 2])
    slurm.node_states["n3"], slurm.starts["n3"] = {"IDLE"}, 1.0
    world.run(3.0)
    assert slurm.queue["1", 2]["node"] == "n3" and not world.core.state.held
    slurm.queue["1", 2].update(before)  # as of the last time that its state was saved
    if restarted:
        restart_controller(world)
    calls = len(slurm.calls)
    world.run(6.0)
    assert [event.kind for event in world.log].count("held_again") == 1
    assert ("release", "1", 2, "n3") in slurm.calls[calls:] and slurm.queue["1", 2]["node"] == "n3"


def test_a_hold_that_came_when_the_element_had_started_is_ours_at_its_next_requeue() -> None:
    """Defect: Slurm takes a hold of what runs, and remembers it."""
    world, slurm = _held_and_released()
    slurm.queue["1", 2].update(state="RUNNING", node="n3", reason="")
    slurm.node_states["n3"], slurm.starts["n3"] = {"IDLE"}, 1.0
    agent = FakeAgent(world, "1", 2, "n3", nodes=3)
    agent.register()
    agent.ready()
    world.run(6.0)
    assert not world.core.state.held and world.job().agents[2].node == "n3"
    slurm.queue["1", 2].update(state="PENDING", node=None, reason="JobHeldAdmin", restarts=1)
    agent.silent = True
    world.run(8.0)
    assert slurm.queue["1", 2]["state"] == "RUNNING" and "held_again" in [event.kind for event in world.log]


@pytest.mark.parametrize("reason", ["JobHeldAdmin", "JobHeldUser"])
def test_who_holds_an_element_that_was_released_here_has_the_last_word(reason: str) -> None:
    """A release changes the comment; users hold with a reason of their own."""
    world, slurm = _held_and_released()
    comment = slurm.queue["1", 2]["admin_comment"]
    slurm.node_states["n3"], slurm.starts["n3"] = {"IDLE"}, 1.0
    world.run(3.0)
    assert slurm.queue["1", 2]["node"] == "n3" and slurm.queue["1", 2]["admin_comment"] == "unicron: released"
    slurm.queue["1", 2].update(state="PENDING", node=None, reason=reason)
    if reason == "JobHeldUser":
        slurm.queue["1", 2].update(admin_comment=comment)
    calls = len(slurm.calls)
    world.run(20.0)
    assert "release" not in {call[0] for call in slurm.calls[calls:]} and slurm.queue["1", 2]["reason"] == reason


@pytest.mark.by_hand
def test_flops_are_bounded_by_what_the_nodes_gpus_can_do() -> None:
    world, slurm = world_of(4, default=PartitionConfig(mode="act"))
    for node in slurm.node_states:
        slurm.node_facts[node] = {"gres": "gpu:t4:2"}
    agents = submit(world, "1", 2, gres="gpu:2")
    world.run(3.0)
    job = world.job()
    job.measured[2] = 1e30
    job.members = dict(job.members)
    found = told(world.core, "scenario")["job"][0]["flops"]
    assert agents and found["2"] == pytest.approx(4 * 65e12)
    shown = replace(slurm.nodes()[0], gres="")
    assert shown.gpus == 1


def test_the_event_of_a_pause_says_what_is_paused_and_for_how_long(snapshot: SnapshotAssertion) -> None:
    world, _ = world_of(2, gpu=PartitionConfig(mode="act"))
    told(world.core, "pause", partition="gpu", seconds=7200)
    told(world.core, "pause")
    told(world.core, "resume")
    world.run(0.1)
    said = [event.record.reason.partition(": ")[0] for event in world.log if event.kind in ("paused", "unpaused")]
    assert said == snapshot
