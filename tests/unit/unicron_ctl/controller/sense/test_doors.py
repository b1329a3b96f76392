"""An agent that does not answer after its peers' connections broke: when a refusal at its door is its end."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.world import FakeAgent, FakeSlurm, World
from tests.unit.unicron_ctl.controller.sense.test_silence import head_cut, on_slurm
from unicron.ctl.controller.failure_detector import doors, quorum
from unicron.ctl.controller.model.inquiry import OWN
from unicron.ctl.controller.model.requests import Greeting, Probe
from unicron.ctl.protocol import wire
from unicron.ctl.protocol.reach import Reach

SLOW = {"heartbeat_period": 5.0, "report_timeout": 20.0, "restart_grace": 10.0}  # the lease is 9 s


def trained(slurm: bool = True, nodes: int = 5, refuses: bool = False) -> World:
    """A job of as many nodes, one more being there; what comes for its doors may be refused all along."""
    world = World(FakeSlurm(nodes + 1) if slurm else None, **SLOW)
    if slurm:
        world.slurm.submit("1", nodes)
    if refuses:
        firewall(world)
    world.start_job(nodes=nodes)
    world.run(2.0)
    return world


def firewall(world: World, *nodes: str) -> None:
    """From now on something on the way refuses what comes for the doors, of these nodes or of all."""
    answer = world.answer

    def refused(witness: str, target: str) -> Reach:
        node, _, port = target.partition(":")
        closed = port != "slurmd" and (not nodes or node in nodes)
        return Reach.REFUSED if closed else answer(witness, target)

    world.answer = refused


def broken(world: World, silent: list[FakeAgent], killed: bool = True) -> float:
    """Agents are silent from now on, and the connections of the others' ranks break. Returns the time."""
    for agent in silent:
        agent.silent, agent.killed, agent.cut = True, killed, not killed
    for agent in world.agents:
        if agent not in silent:
            agent.set(agent.slots[0], state="stopped", broken=agent.ranks[agent.slots[0]].generation)
    return world.now


def died(world: World, began: float, seconds: float) -> list[str]:
    """The nodes of agents that are on record as dead by then, or lost with them."""
    world.run(began + seconds - world.now)
    return sorted(failure.node for failure in world.job().failures if failure.kind in ("agent", "node"))


def deaf(agent: FakeAgent) -> None:
    """From now on it answers no question about others."""
    hears = agent.get
    agent.get = lambda message: None if isinstance(message, wire.Reach) else hears(message)


def keeps_its_lease(world: World, lost: FakeAgent) -> None:
    """It is on record as dead when its lease is over, and not before."""
    began = broken(world, [lost])
    assert not died(world, began, 3.0)
    assert died(world, began, 11.0) == [lost.node]


@pytest.mark.parametrize("slurm", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_a_killed_agent_is_found_before_its_lease_is_over(slurm: bool, count: int):
    world = trained(slurm)
    lost = world.agents[1 : 1 + count]
    began = broken(world, lost)
    assert died(world, began, 0.8) == [agent.node for agent in lost]
    assert {failure.detected_by for failure in world.job().failures} == {"its port is closed"}
    gone = {agent.element for agent in lost}
    assert sorted(world.job().members) == [slot for slot in range(5) if slot not in gone]
    world.check_replay()


def test_one_that_is_slow_to_answer_keeps_its_lease():
    world = trained()
    began = broken(world, [world.agents[1]], killed=False)
    assert not died(world, began, 3.0)
    world.agents[1].silent = False
    world.run(5.0)
    assert not any(failure.kind == "agent" for failure in world.job().failures)
    assert not world.core.view.live.unanswered
    began = broken(world, [world.agents[1]])
    assert died(world, began, 0.8)[-1:] == ["n2"], "and the next time it is found as soon"


def test_a_firewall_that_has_refused_all_along_is_no_evidence_before_the_lease():
    """Defect, of the first two tries at this: living agents that took 0.9 s to answer were requeued."""
    world = trained(refuses=True)
    began = broken(world, world.agents[1:3], killed=False)
    assert not died(world, began, 3.0)
    assert not [call for call in world.slurm.calls if call[0] == "requeue"]


def test_a_firewall_that_comes_up_refuses_many_at_once_and_ends_nobody_early():
    world = trained()
    firewall(world)
    began = broken(world, world.agents[1:4], killed=False)
    assert not died(world, began, 3.0)


def test_a_firewall_that_comes_up_later_is_no_evidence_though_few_are_slow_to_answer():
    """Defect: many were slow, all but two answered in time, and these two were requeued. Another agent's door refuses
    at the same time."""
    world = trained(nodes=8)
    firewall(world)
    slow = world.agents[1:5]
    began = broken(world, slow, killed=False)
    world.run(0.4)
    for agent in slow[:2]:
        agent.silent = False
        agent.status()
    assert not died(world, began, 3.0)
    assert world.core.view.inquiries.open.keys() == {("1", agent.element) for agent in slow[2:]}


@pytest.mark.parametrize("late", ["in the first round", "in the second"])
def test_this_controllers_own_word_alone_is_not_enough(late: str):
    """Defect: something between it and the node refuses, and those that reach the node's door said so 0.1 s later."""
    world = trained()
    living = world.agents[1]
    answer = world.answer
    world.answer = lambda witness, target: (
        Reach.REFUSED if not witness and target == f"{living.node}:{living.agent}" else answer(witness, target)
    )
    began = broken(world, [living], killed=False)
    world.run(1.0 if late == "in the second" else 0.0)
    for agent in world.agents:
        deaf(agent)
    assert not died(world, began, 5.0)


def test_one_of_those_who_are_asked_and_does_not_answer_is_waited_for():
    world = trained()
    deaf(world.agents[2])
    keeps_its_lease(world, world.agents[1])


def test_a_refusal_that_only_a_witness_hears_waits_for_the_lease():
    world = trained()
    lost = world.agents[1]
    answer = world.answer
    world.answer = lambda witness, target: (
        Reach.SILENT if not witness and target.startswith(f"{lost.node}:") else answer(witness, target)
    )
    keeps_its_lease(world, lost)


def test_a_process_that_comes_again_has_a_door_that_is_not_known():
    world = trained()
    old = world.agents[1]
    assert world.core.view.live.agent("1", 1).answers_at == f"n2:{old.agent}"
    firewall(world, "n2")
    world.agents.remove(old)
    FakeAgent(world, "1", 1, "n2", nodes=5, name="another").register()
    world.run(1.0)
    agent = world.core.view.live.agent("1", 1)
    assert agent.agent == "another" and not agent.answers_at


def test_what_was_silent_before_its_word_was_late_is_asked_again():
    """A node is lost on what witnesses say at its lease, and not on a moment's silence before."""
    world = on_slurm(6, 5)
    lost = world.agents[1]
    world.dead_nodes.add(lost.node)
    began = broken(world, [lost], killed=False)
    world.run(0.8)
    words = [word.door for word in world.core.view.inquiries.open["1", 1].words.values()]
    assert words == [Reach.SILENT] * 3
    world.dead_nodes.clear()  # its network is back, and its messages are still on their way
    assert not died(world, began, 3.0)


def test_a_try_that_is_under_way_when_it_is_asked_again_says_nothing():
    """Defect: slurmd's silence, found by the try before, was taken for the whole word, and the door not tried again."""
    world = on_slurm(6, 5)
    perform, tried = world._perform, []

    def slow(request: object) -> None:  # who gets no answer tries for 0.7 s
        if isinstance(request, Probe):
            tried.append((world.now, request))
        else:
            perform(request)

    world._perform = slow
    lost = world.agents[1]
    world.dead_nodes.add(lost.node)
    began = broken(world, [lost], killed=False)
    world.run(1.0)
    early, late = tried
    assert early[0] - began < 0.5 and late[0] - early[0] < 0.7
    world.core.on_probe(early[1], 1, Reach.SILENT)
    assert OWN not in world.core.view.inquiries.open["1", 1].words
    for place, answer in enumerate((Reach.SILENT, Reach.SILENT, Reach.REACHED)):
        world.core.on_probe(late[1], place, answer)
    assert died(world, began, 2.0) == [lost.node]


def test_who_was_reached_early_lives_until_the_next_answers_are_there():
    """Defect: a round that began early was forgotten whole, and Slurm's word alone took the node before others had
    answered again."""
    world = on_slurm(6, 5)
    living = world.agents[1]
    began = broken(world, [living], killed=False)
    world.run(0.7)
    assert world.core.view.inquiries.open["1", 1].words
    for agent in world.agents:
        deaf(agent)
    perform = world._perform
    world._perform = lambda request: None if isinstance(request, Probe) else perform(request)
    world.slurm.node_states[living.node].add("NOT_RESPONDING")
    assert not died(world, began, 2.7)


@pytest.mark.parametrize("how", ["after nobody was heard", "after a stall"])
def test_whoever_has_a_whole_lease_again_has_it(how: str):
    world = trained(nodes=3)
    broken(world, world.agents[1:], killed=False)
    world.run(0.1, heartbeats=False)
    assert len(world.core.view.live.unanswered) == 2
    if how == "after a stall":
        world.now += 5.0
        world.core.tick(world.now)
    else:
        world.agents[0].silent = world.agents[0].cut = True
        world.run(20.0)
        assert world.core.view.alone
        world.agents[0].silent = False
    firewall(world, "n2", "n3")
    world.agents[0].status()
    assert not died(world, world.now, 0.3)


def test_who_died_before_a_stall_is_not_taken_for_heard_after_it():
    """Defect: its last word was put forward by the stall, and the time at which others had stopped was not."""
    world = trained()
    lost = world.agents[1]
    broken(world, [lost])
    world.now += 5.0
    world.core.tick(world.now)
    assert died(world, world.now, 1.0) == [lost.node]


def test_the_time_to_answer_begins_with_the_question():
    world = trained()
    broken(world, [world.agents[1]])
    began, world.now = world.now, world.now + 0.45  # a turn that took so long, and is no stall
    world.core.tick(world.now)
    world.deliver()
    assert world.core.view.live.unanswered == {("1", 1): began + 0.45} and not list(doors.hushed(world.core.view))


def holding(nodes: int) -> tuple[World, list[Greeting]]:
    """A job of as many nodes, and the tries of doors that have not ended."""
    world, under_way = World(None, **SLOW), list[Greeting]()

    def hold(request: object) -> None:
        assert isinstance(request, Greeting)
        under_way.append(request)

    world._perform = hold
    world.start_job(nodes=nodes)
    return world, under_way


def turns(world: World, under_way: list[Greeting], answer: Reach | None = Reach.REACHED) -> list[list[Greeting]]:
    """Lets tries end, until there are no more. Returns those that were under way at a time."""
    found = []
    while under_way:
        found.append(list(under_way))
        under_way.clear()
        for greeting in found[-1]:
            world.core.on_greeting(greeting, answer)
        world.run(0.05)
    return found


def test_few_doors_are_tried_at_once_and_again_after_a_while():
    world, under_way = holding(30)
    found = turns(world, under_way)
    assert max(map(len, found)) == doors.AT_ONCE and len({each for some in found for each in some}) == 30
    assert not world.core.view.live.trying
    assert all(agent.answers_at == agent.door for agent in world.core.view.live.agents())
    world.run(doors.TRY_SECONDS / 2)
    assert not under_way
    world.run(doors.TRY_SECONDS / 2)
    assert len({each for some in turns(world, under_way, None) for each in some}) == 30
    assert not any(agent.answers_at for agent in world.core.view.live.agents()), "a try that failed says nothing"


def test_one_that_is_away_when_its_door_is_due_is_tried_later():
    world, under_way = holding(3)
    turns(world, under_way)
    agent = world.core.view.live.agent("1", 1)
    agent.expired = True
    world.run(doors.TRY_SECONDS)
    turns(world, under_way)
    agent.expired = False
    world.run(doors.TRY_SECONDS)
    assert {greeting.element for greeting in under_way} == {0, 1, 2}


def test_what_fails_elsewhere_loses_no_try(monkeypatch):
    """Defect: eight tries that were counted and never made, and no door was tried any more."""
    world, under_way = holding(12)
    under_way.clear()
    world.core.view.live.trying = 0
    whole = quorum.look
    monkeypatch.setattr(quorum, "look", lambda *words: 1 / 0)
    world.run(0.2)
    monkeypatch.setattr(quorum, "look", whole)
    assert len(turns(world, under_way)) == 1 and not world.core.view.live.trying


@pytest.mark.parametrize("what", [{"answered": -doors.KNOWN_SECONDS}, {"answers_at": "elsewhere:1"}])
def test_what_was_known_long_ago_or_elsewhere_is_not_known(what: dict[str, Any]):
    world = trained()
    agent = world.core.view.live.agent("1", 1)
    for name, value in what.items():
        setattr(agent, name, value)
    assert not died(world, broken(world, [world.agents[1]]), 3.0)


def test_nothing_is_tried_while_nobody_is_heard():
    world, under_way = holding(3)
    turns(world, under_way)
    head_cut(world)
    world._perform = lambda request: under_way.append(request) if isinstance(request, Greeting) else None
    world.run(doors.TRY_SECONDS + 20.0)
    assert world.core.view.alone and not under_way


def test_many_that_are_slow_to_answer_are_not_asked_about():
    world = trained(nodes=12)
    began = broken(world, world.agents[1:5], killed=False)
    world.run(3.0)
    assert not world.core.view.inquiries.open and len(world.core.view.live.unanswered) == 4
    for agent in world.agents[1:3]:
        agent.silent = False
        agent.status()
    world.run(0.2)
    assert world.core.view.inquiries.open.keys() == {("1", 3), ("1", 4)} and not died(world, began, 4.0)


def test_after_a_restart_doors_are_tried_when_slurm_has_said_where_the_nodes_are():
    world = trained()
    world.slurm.refuse = "squeue: no answer"
    world.restart()
    world.run(3.0)
    agents = list(world.core.view.live.agents())
    assert len(agents) == 5 and not any(agent.answers_at for agent in agents)
    world.slurm.refuse = ""
    world.run(3.0)
    assert {agent.answers_at for agent in agents} == {f"{agent.node}:{agent.agent}" for agent in agents}
