"""A node that ends after an agent on it did: it refuses connections first, and then nobody reaches its slurmd."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.plain_agent import PlainAgent
from tests.support.scenarios import follow, trained
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.api import answers
from unicron_ctl.controller.failure_detector.ending_nodes import AT_ONCE, UNREACHED_SECONDS
from unicron_ctl.controller.model.asker import EVERYBODY
from unicron_ctl.controller.model.requests import Probe
from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.protocol.reach import Reach
from unicron_ctl.shared.settings.partitions import PartitionConfig

MINUTE = 60.0


def on_slurm(nodes: int = 5, count: int = 4, kind: type[FakeAgent] = FakeAgent, **config: Any) -> World:
    """A job trains, and what a controller asks again after its start has been asked."""
    world, _ = trained(count, nodes - count, kind=kind, config=config, seconds=7.0)
    return world


def more(world: World, job: str, *nodes: str) -> list[FakeAgent]:
    """Another job, with an element on each of these nodes."""
    world.slurm.submit(job, len(nodes))
    for element, node in enumerate(nodes):
        world.slurm.queue[job, element].update(state="RUNNING", node=node, reason="")
    found = [FakeAgent(world, job, element, node, nodes=len(nodes)) for element, node in enumerate(nodes)]
    for agent in found:
        agent.settings.user = "bob"
        agent.register()
        agent.ready()
    world.run(2.0)
    return found


def refuse(world: World, *agents: FakeAgent) -> None:
    """Their nodes are shut down: nothing listens there any more, and the kernel says so."""
    for agent in agents:
        agent.silent = True
        world.refusing.add(agent.node)
        world.slurm.unheard.add(agent.node)


def off(world: World, *agents: FakeAgent) -> None:
    """... and then their network is down, too."""
    world.dead_nodes |= {agent.node for agent in agents}


def died(world: World, *agents: FakeAgent) -> None:
    """Time passes until the controller says that these agents died."""
    until = world.now + 5.0
    while world.now < until and any(world.job(a.job).agents[a.element].gone != "agent died" for a in agents):
        world.run(0.1)
    assert {world.job(a.job).agents[a.element].gone for a in agents} == {"agent died"}


def taken(world: World) -> list[tuple[str, str]]:
    return [(call[0], call[3]) for call in world.slurm.calls if call[0] in ("down", "drain")]


def asked(world: World) -> set[str]:
    return set(world.core.view.suspicions.ending_nodes)


@pytest.mark.parametrize("then", ["refuses", "silent"])
@pytest.mark.parametrize("kind", [FakeAgent, PlainAgent])
def test_the_node_is_lost_and_slurm_gives_the_element_another(then: str, kind: type[FakeAgent], snapshot):
    """Defect: only the agent had died, by the word of its kernel, and from then on nobody asked about its node any
    more: the element was COMPLETING there until slurmctld itself found the node dead."""
    world = on_slurm(kind=kind)
    lost = world.agents[1]
    refuse(world, lost)
    died(world, lost)
    (failure,) = world.job().failures
    plans = sum(event.kind == "plan" for event in world.log)
    assert failure.record.reason == snapshot
    if then == "silent":
        off(world, lost)
    world.run(UNREACHED_SECONDS - 0.5)
    assert not taken(world) and asked(world) == {"n2"}
    assert sum(event.kind == "plan" for event in world.log) == plans + (kind is PlainAgent)
    breaks = world.kinds().count("break")
    world.run(5.0)
    assert taken(world) == [("down", "n2")] and world.slurm.queue["1", 1]["node"] == "n5"
    assert world.slurm.queue["1", 1]["restarts"] == 1 and not asked(world)
    assert list(world.job().failures) == [failure] and world.kinds().count("failure_detected") == 1
    assert world.kinds().count("break") == breaks, "those that go on are left alone"
    assert (failure.record.kind_of_failure, failure.record.severity, failure.record.action) == ("agent", 1, "isolate")
    word = "refused" if then == "refuses" else "silent"
    assert all(
        f"{who}: agent {word}, slurmd {word}" in failure.record.reason
        for who in ("the controller", "1_2 on n3", "1_3 on n4")
    )
    assert "own sockets and witnesses" in failure.record.reason and any(
        "set n2 down" in text for text in failure.actions
    )
    kinds = world.kinds()
    assert kinds.index("failure_detected") < kinds.index("node_lost") < kinds.index("isolated")
    (fresh,) = follow(world, "1", 4) if kind is FakeAgent else [PlainAgent(world, "1", 1, "n5", nodes=4)]
    if kind is PlainAgent:
        fresh.register()
    fresh.ready()
    world.run(20.0)
    assert world.job().agents[1].node == "n5" and taken(world) == [("down", "n2")]


@pytest.mark.parametrize("how", ["asked to end", "asked to end, and Slurm heard of it", "killed while slurmd answers"])
def test_a_shutdown_that_begins_with_the_agent_and_takes_a_while(how: str):
    """systemd asks all processes to end first, and the node goes later.

    Defect: where the script had ended before the network did, Slurm had heard that it failed, and the element was not
    started on another node."""
    world = on_slurm()
    lost = world.agents[1]
    if how != "killed while slurmd answers":
        lost.status(leaving="stopped by SIGTERM")
    if how == "asked to end, and Slurm heard of it":
        world.slurm.failed.add(("1", 1))
        world.slurm.queue["1", 1].update(state="COMPLETING")
    lost.silent = True
    world.slurm.unheard.add("n2")
    world.run(4.0)
    assert world.job().agents[1].gone in ("stopped by SIGTERM", "agent died")
    off(world, lost)
    world.run(40.0)
    assert taken(world) == [("down", "n2")] and world.slurm.queue["1", 1]["node"] == "n5"
    assert len(world.job().failures) == 1 and not asked(world)


def test_a_stall_of_the_controller_is_nobodys_word():
    world = on_slurm(8, 4)
    shared, *_ = more(world, "2", "n2", "n6", "n7")
    lost = world.agents[1]
    refuse(world, lost)
    shared.silent = True
    answer = world.answer
    world.answer = lambda witness, target: Reach.SILENT if target == f"n2:{shared.agent}" else answer(witness, target)
    died(world, lost)
    world.now += 10.0
    for agent in world.agents:
        agent.status()
    world.run(1.0)
    assert asked(world) == {"n2"}


@pytest.mark.parametrize("back", [False, True])
def test_the_next_controller_asks_again(back: bool):
    world = on_slurm()
    lost = world.agents[1]
    refuse(world, lost)
    died(world, lost)
    world.run(2.0)
    world.restart()
    if back:
        world.refusing.clear()
    world.run(20.0)
    assert taken(world) == ([] if back else [("down", "n2")]) and not asked(world)
    assert len(world.job().failures) == 1


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("with_a_rack", [False, True])
def test_the_head_node_is_cut_off_in_that_very_moment(back: bool, with_a_rack: bool):
    """Its own sockets reach nobody, and nor do those of a rack that is cut off with it."""
    world = on_slurm(9, 8)
    lost, near = world.agents[1], world.agents[2:5] if with_a_rack else []
    refuse(world, lost)
    died(world, lost)
    world.run(1.0)
    near_nodes = {"", *(agent.node for agent in near)}
    for agent in world.agents:
        if agent is not lost and agent not in near:
            agent.silent = agent.cut = True
            world.cuts |= {frozenset((agent.node, other)) for other in near_nodes}
    world.cuts |= {frozenset(("n2", other)) for other in near_nodes}
    if back:
        world.refusing.clear()
    world.run(5.0)
    number = world.core.view.suspicions.last_number
    world.run(MINUTE / 2)
    assert not taken(world) and (with_a_rack or world.core.view.suspicions.last_number == number), "nobody is asked"
    assert ("most_silent" if with_a_rack else "alone") in [event.kind for event in world.log]
    world.cuts.clear()
    for agent in world.agents:
        agent.silent = agent.cut = agent is lost
    while world.core.view.alone or world.core.view.suspicions.doubt:
        world.run(0.1)
    world.run(UNREACHED_SECONDS - 0.5)
    assert not taken(world), "what was asked before does not count"
    world.run(15.0)
    assert taken(world) == ([] if back else [("down", "n2")])


@pytest.mark.parametrize("alive", [False, True])
def test_a_node_that_two_jobs_share_is_set_down_when_both_have_lost_their_agents(alive: bool):
    world = on_slurm(6, 4)
    shared, _ = more(world, "2", "n2", "n6")
    lost = world.agents[1]
    refuse(world, lost, shared)
    died(world, lost, shared)
    if alive:  # an element of which only Slurm knows
        world.slurm.queue["3", 0] = {**world.slurm.queue["2", 0], "state": "RUNNING", "node": "n2"}
    world.run(12.0)
    assert taken(world)[-1] == (("drain" if alive else "down"), "n2") and not asked(world)
    assert {world.job(job).agents[element].gone for job, element in (("1", 1), ("2", 0))} == {"node ended"}
    assert [len(world.job(job).failures) for job in "12"] == [1, 1]
    if alive:
        assert ("down", "n2") not in taken(world)


def test_a_node_that_was_drained_for_the_element_that_waits_is_set_down_in_the_end():
    """One of two jobs lost its agent there by silence: the other's element was on the node, and not lost."""
    world = on_slurm(6, 4)
    shared, _ = more(world, "2", "n2", "n6")
    refuse(world, shared)
    died(world, shared)
    lost = world.agents[1]
    lost.silent = True
    off(world, shared)
    world.run(3.0)
    assert taken(world) == [("drain", "n2")] and asked(world) == {"n2"}
    world.run(6.0)
    assert taken(world) == [("drain", "n2"), ("down", "n2")] and not asked(world)


def test_a_firewall_that_refuses_one_group_after_the_other_takes_no_node():
    """Each group is less than half of those that are left; together they are most, so this controller suspects
    itself."""
    world = on_slurm(17, 16, max_isolated_nodes=100)
    first, second = world.agents[:5], world.agents[5:10]
    refuse(world, *first)
    died(world, *first)
    refuse(world, *second)
    died(world, *second)
    world.run(20.0)
    assert not taken(world) and "most_silent" in [event.kind for event in world.log]
    world.restart()
    world.run(20.0)
    assert not taken(world) and len(asked(world)) == 10
    world.refusing.clear()
    world.run(20.0)
    assert not taken(world) and not asked(world) and not world.core.view.suspicions.doubt


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"max_isolated_nodes": 0, "max_isolated_share": 0.0}, records.IsolationWithheld),
        ({"partitions": {"default": PartitionConfig(mode="observe", max_weight=100.0)}}, records.ActionObserved),
    ],
)
def test_limits_and_permissions_hold(settings: dict, kind: type):
    world = on_slurm(**settings)
    lost = world.agents[1]
    refuse(world, lost)
    died(world, lost)
    world.run(20.0)
    assert not taken(world) and not asked(world)
    said = [event.record for event in world.log if isinstance(event.record, kind)]
    assert any(getattr(record, "node", "") == "n2" or "n2" in record.reason for record in said)
    assert any("is not set down" in text for text in world.job().failures[0].actions)


def test_a_racks_shutdown_asks_about_a_few_nodes_at_a_time(monkeypatch: pytest.MonkeyPatch):
    world = on_slurm(130, 128, max_isolated_nodes=1000)
    rack = world.agents[:60]
    refuse(world, *rack)
    died(world, *rack)
    off(world, *rack)
    assert len(asked(world)) == 60
    sent, tries = len(world.sent), []
    perform = world._perform
    monkeypatch.setattr(world, "_perform", lambda one: tries.append(one) if isinstance(one, Probe) else perform(one))
    world.run(4.0)
    assert len(tries) == len({probe.node for probe in tries}) == AT_ONCE, "one own try of each is under way"
    questions = [message for _, message in world.sent[sent:] if isinstance(message, wire.Reach)]
    assert len(questions) <= 2 * AT_ONCE
    monkeypatch.undo()
    for probe in tries:
        world.core.on_probe(probe, 0, Reach.SILENT)
        world.core.on_probe(probe, 1, Reach.SILENT)
    world.run(30.0)
    assert {node for _, node in taken(world)} == {agent.node for agent in rack} and not asked(world)


def test_nodes_under_question_are_shown_in_the_status():
    world = on_slurm()
    lost = world.agents[1]
    refuse(world, lost)
    died(world, lost)
    listed = answers.answer(world.core, None, "nodes", {}, EVERYBODY)
    assert [item.node for item in listed if item.asked_since is not None] == [lost.node]
    (line,) = [line for line in status_tables.nodes(listed).lines() if "its agent is silent or gone" in line]
    assert lost.node in line
    world.refusing.clear()
    world.slurm.unheard.clear()
    world.run(10.0)
    assert all(item.asked_since is None for item in answers.answer(world.core, None, "nodes", {}, EVERYBODY))


# ---------------------------------------------------------------- a port that is not slurmd's
@pytest.mark.parametrize("again", [False, True])
def test_a_refusal_at_a_port_that_never_answered_takes_no_node(again: bool):
    """Defect: with SlurmdPort other than 6818 a healthy node was set down when its agent died and its element took over
    6 s to end."""
    world = on_slurm()
    world.core.view.live.slurmds.clear()
    usual = world.answer
    world.answer = lambda who, target: Reach.REFUSED if target.endswith(":slurmd") else usual(who, target)
    victim = world.agents[1]
    victim.silent = victim.killed = True
    world.slurm.unheard.add("n2")
    world.run(3.0)
    if again:
        world.restart()
    world.run(MINUTE)
    assert world.job().agents[1].gone == "agent died" and asked(world) and not taken(world)


def test_that_a_slurmd_was_reached_is_put_on_record_when_it_matters():
    world = on_slurm()
    world.run(6 * MINUTE)
    assert "slurmd_reached" not in {event.kind for event in world.log}
    refuse(world, world.agents[1])
    died(world, world.agents[1])
    world.run(3.0)
    assert [e.record.address for e in world.log if e.kind == "slurmd_reached"] == ["n2:slurmd"]
    world.restart()
    assert world.core.state.node("n2").slurmd == "n2:slurmd"


def test_after_a_restart_slurmds_are_tried_when_slurm_has_said_where_the_nodes_are():
    world = World(FakeSlurm(5))
    world.slurm.submit("1", 5)
    world.start_job(nodes=5)
    world.run(2.0)
    world.slurm.refuse = "squeue: no answer"
    world.restart()
    world.run(3.0)
    assert len(list(world.core.view.live.agents())) == 5 and not world.core.view.live.slurmds
    world.slurm.refuse = ""
    world.run(3.0)
    assert len(world.core.view.live.slurmds) == 5 and not world.core.slurm.gate.reached, "of nodes in service"
