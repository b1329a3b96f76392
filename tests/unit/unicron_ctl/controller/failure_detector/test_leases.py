"""Silence is not death: what it takes to lose a node, and what is no evidence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.api import answers
from unicron_ctl.controller.failure_detector import quorum
from unicron_ctl.controller.failure_detector.leases import VERDICTS, Row
from unicron_ctl.controller.model.asker import EVERYBODY
from unicron_ctl.controller.model.requests import Probe
from unicron_ctl.controller.model.suspicion import OWN
from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.protocol import datagrams, wire
from unicron_ctl.shared.protocol.reach import Reach


def on_slurm(nodes: int, count: int, **settings) -> World:
    world = World(FakeSlurm(nodes), **settings)
    world.slurm.submit("1", count)
    world.start_job(nodes=count)
    world.run(2.0)
    return world


def head_cut(world: World) -> None:
    for agent in world.agents:
        agent.silent = agent.cut = True


def heal(world: World) -> None:
    for agent in world.agents:
        agent.silent = agent.cut = False


def _shown(world: World) -> str:
    told = answers.answer(world.core, None, "status", {}, EVERYBODY)
    return "\n".join(str(part) for part in status_tables.status(told))


def taken(world: World) -> list[tuple]:
    return [call for call in world.slurm.calls if call[0] in ("down", "drain", "requeue", "requeue_hold", "hold")]


@pytest.mark.parametrize("seconds", [3, 15, 60])
@pytest.mark.parametrize("slurm_too", [False, True])
def test_a_silence_of_the_head_node_harms_nobody(seconds, slurm_too):
    world = on_slurm(5, 4)
    before = dict(world.job().members)
    head_cut(world)
    if slurm_too:  # slurmctld hears nobody either
        for states in world.slurm.node_states.values():
            states.add("NOT_RESPONDING")
    for _ in range(seconds):
        world.run(1.0)
    assert world.core.view.alone
    assert "hears no agent for" in _shown(world)
    for states in world.slurm.node_states.values():
        states.discard("NOT_RESPONDING")
    heal(world)
    world.run(5.0)
    assert not world.core.view.alone and not taken(world)
    assert world.job().members == before and world.job().phase == "running" and not world.job().failures
    assert [kind for kind in ("alone", "heard_again") if any(e.kind == kind for e in world.log)] == [
        "alone",
        "heard_again",
    ]
    world.check_replay()


@pytest.mark.parametrize("says", ["registers", "speaks", "speaks for an agent"])
def test_a_stranger_who_is_heard_ends_no_silence(says):
    """Defect: any message did, so whoever is on the head node itself had the controller judge its agents."""
    world = on_slurm(5, 4)
    for agent, key in zip(world.agents, "abcd", strict=True):
        world.job().agents[agent.element].key = world.core.view.live.agent("1", agent.element).key = key
    head_cut(world)
    world.run(5.0)
    assert world.core.view.alone
    stranger = FakeAgent(world, "9" if says != "speaks for an agent" else "1", 0, "n5", name=world.agents[0].agent)
    stranger.obedient = False
    for _ in range(20):
        stranger.register() if says == "registers" else stranger.status()
        world.run(0.5, heartbeats=False)
        assert world.core.view.alone
    world.agents.remove(stranger)
    world.agents[1].silent = False
    number = world.agents[1].number + 1
    world.core.receive(
        world.agents[1].route,
        wire.Status(job="1", element=1, agent=world.agents[1].agent, sent=0.0, number=number, ranks={}),
        world.now,
        "b",
    )
    assert not world.core.view.alone


def test_a_restart_while_nobody_can_reach_the_controller_harms_nobody():
    world = on_slurm(5, 4)
    before = dict(world.job().members)
    head_cut(world)
    world.run(5.0)
    world.restart()
    world.run(30.0)
    assert not taken(world) and world.job().members == before
    heal(world)
    world.run(5.0)
    assert not taken(world) and world.job().members == before and world.job().phase == "running"


def test_a_node_lost_during_the_heads_silence_is_healed_after_it():
    world = on_slurm(5, 4)
    head_cut(world)
    world.run(10.0)
    lost = world.agents[2]
    world.dead_nodes.add(lost.node)
    lost.cut = False
    for agent in world.agents:
        if agent is not lost:
            agent.silent = agent.cut = False
    healed = world.now
    while 2 in world.job().members and world.now < healed + 5.0:
        world.run(0.1)
    assert 2 not in world.job().members and world.job().failures[-1].record.node == lost.node
    assert len(world.job().failures) == 1


def test_an_agent_that_others_reach_is_not_lost():
    world = on_slurm(5, 4)
    world.agents[1].silent = world.agents[1].cut = True
    world.run(60.0)
    assert not world.job().failures and not taken(world)
    assert (
        "silent, not lost: element 1 (n2)"
        in status_tables.jobs(answers.answer(world.core, None, "jobs", {}, EVERYBODY)).lines()[-1]
    )
    assert any("others reach it" in event.record.reason for event in world.log if event.kind == "silence")


def test_an_agent_that_others_reach_is_not_lost_by_what_slurm_does_not_hear():
    """Also not between a round's questions and its answers."""
    world = on_slurm(8, 4)
    world.agents[1].silent = world.agents[1].cut = True
    world.cuts.add(frozenset(("", world.agents[1].node)))
    unheard(world, world.agents[1:2], "IDLE", "NOT_RESPONDING")
    world.run(20.0)
    assert not world.job().failures and not taken(world)


def test_two_witnesses_must_agree_where_there_are_so_many():
    world = on_slurm(5, 4)
    silent = world.agents[1]
    silent.silent = silent.cut = True
    world.cuts.add(frozenset((world.agents[2].node, silent.node)))  # one peer cannot reach it, the others can
    world.run(20.0)
    assert not world.job().failures


def test_a_witness_with_trouble_of_its_own_says_nothing(monkeypatch):
    world = on_slurm(5, 4)
    world.agents[1].silent = True
    world.dead_nodes.add(world.agents[1].node)
    monkeypatch.setattr(world, "answer", lambda witness, target: Reach.UNKNOWN)  # no descriptors, no names
    world.run(20.0)
    assert not world.job().failures
    world.slurm.node_states[world.agents[1].node] = {"DOWN", "NOT_RESPONDING"}
    world.run(3.0)
    assert (
        world.job().failures[-1].record.kind_of_failure == "node" and "Slurm" in world.job().failures[-1].record.reason
    )


def test_the_last_node_of_a_job_is_lost_when_slurm_says_so_and_not_before():
    world = on_slurm(3, 1)
    world.agents[0].silent = True
    world.dead_nodes.add(world.agents[0].node)
    world.run(30.0)
    assert not world.job().failures
    world.slurm.node_states[world.agents[0].node] = {"IDLE", "NOT_RESPONDING"}
    world.run(3.0)
    assert world.job().failures[-1].record.kind_of_failure == "node"


def cut_off(world: World, agents: list[FakeAgent]) -> None:
    """Neither the controller nor other nodes reach them, and they live."""
    apart = {agent.node for agent in agents}
    for agent in agents:
        agent.silent = agent.cut = True
        others = {other.node for other in world.agents if other.node not in apart}
        world.cuts |= {frozenset((agent.node, other)) for other in {"", *others}}


def unheard(world: World, agents: list[FakeAgent], *states: str, reason: str = "") -> None:
    """Slurm's word on their nodes."""
    for agent in agents:
        world.slurm.node_states[agent.node] = set(states)
        world.slurm.reasons[agent.node] = reason


def plans(world: World) -> int:
    return sum(event.kind in ("plan", "reform") for event in world.log)


def test_more_than_half_of_a_job_is_not_left_out_on_the_word_of_the_rest():
    """They may be a majority that goes on without this controller; Slurm is cut off from them likewise."""
    world = on_slurm(8, 5)
    cut_off(world, world.agents[:3])
    world.run(20.0)
    assert not world.job().failures and not taken(world)
    unheard(world, world.agents[:3], "IDLE", "NOT_RESPONDING")
    world.run(10.0)
    unheard(world, world.agents[:3], "DOWN", "NOT_RESPONDING", reason="Not responding")
    world.run(10.0)
    assert not world.job().failures and not taken(world)
    assert any("State=DOWN" in event.record.reason for event in world.log if event.kind == "silence")
    unheard(world, world.agents[:3], "DOWN", "NOT_RESPONDING", reason="rack 3 has burnt")
    world.run(3.0)
    assert sorted(failure.record.node for failure in world.job().failures) == ["n1", "n2", "n3"]
    world.run(10.0)
    assert not set(world.job().members) & {0, 1, 2} and plans(world) == 2
    world.check_replay()


@pytest.mark.parametrize(
    "reason",
    [
        "unicron[node_problem]: lost heartbeat of 1_0",
        "Low RealMemory (reported:1 < 100.00% of configured:2)",
        "gres/gpu count reported lower than configured (0 < 8)",
        "Node unexpectedly rebooted",
        "Kill task failed",
        "Prolog error",
        "Reboot timed out",
        "fan 2, seen to : Not responding",
    ],
)
def test_neither_slurms_own_reasons_nor_an_earlier_controllers_are_a_persons_word(reason: str):
    """Defect: with an emptied or older log nothing was known of what the controller before it had set down."""
    world = on_slurm(8, 5)
    cut_off(world, world.agents[:3])
    unheard(world, world.agents[:3], "DOWN", "NOT_RESPONDING", reason=reason)
    world.run(20.0)
    assert not world.job().failures and plans(world) == 1
    unheard(world, world.agents[:3], "DOWN", "NOT_RESPONDING", reason="rack 3 has burnt")
    world.run(3.0)
    assert sorted(failure.record.node for failure in world.job().failures) == ["n1", "n2", "n3"]


def test_a_reason_to_drain_a_node_does_not_say_that_it_is_dead():
    """Slurm sets a drained node DOWN when it hears nothing of it, and keeps the reason for which it was drained."""
    world = on_slurm(8, 5)
    unheard(world, world.agents[:3], "IDLE", "DRAIN", reason="fans at the next maintenance")
    cut_off(world, world.agents[:3])
    unheard(world, world.agents[:3], "DOWN", "DRAIN", "NOT_RESPONDING", reason="fans at the next maintenance")
    world.run(20.0)
    assert not world.job().failures and plans(world) == 1
    assert any("State=UNDRAIN`, then" in event.record.reason for event in world.log if event.kind == "silence")


def test_a_person_says_it_also_of_a_node_that_was_taken_out_of_service_here():
    """Its reason has replaced that of the controller."""
    world = on_slurm(8, 5)
    world.core.state.out_of_service |= {"n1", "n2", "n3"}
    cut_off(world, world.agents[:3])
    unheard(world, world.agents[:3], "DOWN", "NOT_RESPONDING", reason="rack 3 has burnt")
    world.run(5.0)
    assert sorted(failure.record.node for failure in world.job().failures) == ["n1", "n2", "n3"]


@pytest.mark.parametrize("dies", [False, True])
def test_ranks_of_the_smaller_half_that_stop_do_not_go_on_without_the_larger(dies: bool):
    """The collectives of the smaller half break, or one of its ranks dies. Nobody of the larger one stops in time, for
    nobody of it hears."""
    world = on_slurm(8, 5)
    cut_off(world, world.agents[:3])
    unheard(world, world.agents[:3], "IDLE", "NOT_RESPONDING")
    if dies:
        world.agents[4].die(4)
    else:
        for agent in world.agents[3:]:
            agent.set(agent.slots[0], state="stopped", broken=1)
    world.run(40.0)
    assert world.job().phase == ("breaking" if dies else "running") and plans(world) == 1
    assert not {0, 1, 2} & {slot for failure in world.job().failures for slot in failure.record.slots}
    for agent in world.agents[:3]:
        agent.silent = agent.cut = False
    world.cuts.clear()
    unheard(world, world.agents[:3], "IDLE")
    for agent in world.agents[:3]:
        agent.set(agent.slots[0], state="stopped", broken=1)
    world.run(5.0)
    assert plans(world) == 2 and len(world.job().members) == 5 - dies
    world.check_replay()


def test_elements_that_slurm_starts_elsewhere_do_not_prove_their_old_nodes_dead():
    world = on_slurm(8, 5)
    larger = world.agents[:3]
    cut_off(world, larger)
    unheard(world, larger, "DOWN", "NOT_RESPONDING", reason="Not responding")
    for element in range(3):
        entry = world.slurm.queue["1", element]
        entry.update(state="RUNNING", node=f"n{element + 6}", submitted=1.0)
        agent = FakeAgent(world, "1", element, f"n{element + 6}", nodes=5)
        agent.register()
        agent.ready()
    world.run(30.0)
    assert plans(world) == 1
    unheard(world, larger, "IDLE")  # they answer: Slurm has ended there what is not to run
    world.run(10.0)
    assert plans(world) == 2 and len(world.job().members) >= 2
    world.check_replay()


def test_a_majority_that_says_itself_that_it_died_is_not_waited_for():
    world = on_slurm(8, 5)
    for agent in world.agents[:3]:
        agent.silent = agent.killed = True
    world.run(5.0)
    assert sorted(failure.record.kind_of_failure for failure in world.job().failures) == ["agent"] * 3
    assert {3, 4} <= set(world.job().members) and plans(world) == 2


@pytest.mark.parametrize("restarted", [False, True])
def test_an_agent_that_died_may_have_voted_for_those_who_are_silent(restarted: bool):
    """Two of four are cut off, the third has accepted their plan and died: they have a majority."""
    world = on_slurm(8, 4)
    larger, voter = world.agents[:2], world.agents[2]
    cut_off(world, larger)
    voter.silent = voter.killed = True
    if restarted:
        world.restart()
    world.run(20.0)
    assert [(failure.record.node, failure.record.kind_of_failure) for failure in world.job().failures] == [
        ("n3", "agent")
    ]
    assert plans(world) == 1 and not [call for call in taken(world) if call[0] == "down"]
    unheard(world, larger, "DOWN", "NOT_RESPONDING", reason="rack 3 has burnt")
    world.run(10.0)
    assert plans(world) == 2 and 3 in world.job().members and not {0, 1} & world.job().members.keys()
    world.check_replay()


def test_an_agent_without_a_rank_gives_its_vote_up_before_the_others_go_on():
    """Two of four are cut off, and the rank of the third has died: once its agent is cut off, too, it could make them
    a majority, for it is no member of what follows."""
    world = on_slurm(8, 4)
    cut_off(world, world.agents[:2])
    world.agents[2].gives_up = False  # it has not heard of it
    world.agents[2].die(2)
    world.run(20.0)
    assert (
        not [failure for failure in world.job().failures if failure.record.kind_of_failure == "node"]
        and plans(world) == 1
    )
    world.agents[2].gives_up = True
    world.run(3.0)
    assert world.agents[2].over == 1 and world.job().plan.generation == 2 and plans(world) == 2
    assert 3 in world.job().members and not {0, 1} & world.job().members.keys()
    world.check_replay()


def test_a_node_that_answers_slurm_and_no_longer_runs_the_element_says_that_it_is_over():
    """Whoever has its port now: it was started again, and the number of a port is given to somebody else."""
    world = on_slurm(8, 3)
    for agent in world.agents[:2]:
        agent.silent = agent.cut = True  # something answers at the door
    world.run(20.0)
    assert not world.job().failures
    for element in range(2):
        world.slurm.queue["1", element].update(state="PENDING", node=None, reason="BeginTime")
    world.run(3.0)
    assert [failure.record.source for failure in world.job().failures] == ["slurm"] * 2
    assert not [call for call in taken(world) if call[0] == "down"]


def test_half_of_a_job_is_left_out():
    world = on_slurm(8, 4)
    for agent in world.agents[:2]:
        agent.silent = True
        world.dead_nodes.add(agent.node)
    world.run(4.0)
    assert sorted(world.job().members) == [2, 3]


def test_ranks_that_step_together_are_alive_whatever_the_lease_says():
    world = on_slurm(5, 4)
    silent = world.agents[1]
    silent.silent = True
    world.dead_nodes.add(silent.node)  # whatever witnesses say
    for iteration in range(40):
        for agent in world.agents:
            if agent is not silent:
                agent.step(agent.slots[0], iteration, [])
        world.run(0.5)
    assert not world.job().failures
    world.run(3.0)
    assert world.job().failures[-1].record.node == silent.node


def test_a_node_that_nobody_can_say_anything_of_is_given_up_after_a_bound():
    world = World(state_wait_seconds=30.0)
    agents = world.start_job(nodes=4)
    agents[0].silent = agents[1].silent = True
    world.answer = lambda witness, target: Reach.UNKNOWN
    world.run(25.0)
    assert not world.job().failures
    world.run(10.0)
    assert sorted(failure.record.slots for failure in world.job().failures) == [[0], [1]]


def test_no_time_gives_up_a_majority_that_may_be_going_on_by_itself():
    world = World(state_wait_seconds=30.0)
    agents = world.start_job(nodes=3)
    cut_off(world, agents[:2])
    agents[2].set(2, state="stopped", broken=1)
    world.run(60.0)
    assert not world.job().failures and plans(world) == 1
    world.cuts.clear()
    for agent in agents[:2]:
        agent.silent = agent.cut = False
        agent.set(agent.slots[0], state="stopped", broken=1)
    world.run(3.0)
    assert sorted(world.job().members) == [0, 1, 2] and plans(world) == 2


def test_a_node_that_is_given_up_is_not_taken_out_of_service():
    world = on_slurm(5, 4, state_wait_seconds=30.0)
    silent = world.agents[1]
    silent.silent = True
    world.cuts |= {frozenset((silent.node, other.node)) for other in world.agents[2:]}
    answer = world.answer
    world.answer = lambda witness, target: Reach.UNKNOWN if target.startswith(silent.node) else answer(witness, target)
    world.run(25.0)
    assert not world.job().failures
    world.run(10.0)
    assert [failure.record.slots for failure in world.job().failures] == [[1]] and not taken(world)


def test_a_strangers_word_ends_no_element():
    """Agents of other users say that the port of a silent agent is closed."""
    world = World(FakeSlurm(6))
    world.slurm.submit("1", 1)
    world.slurm.submit("2", 3)
    (victim,) = world.start_job(nodes=1)
    for element in range(3):
        stranger = FakeAgent(world, "2", element, f"n{element + 2}", nodes=3)
        stranger.settings.user = "bob"
        stranger.register()
        stranger.ready()
    world.run(2.0)
    victim.silent = victim.cut = True
    answer = world.answer
    world.answer = lambda witness, target: (
        Reach.REFUSED if witness and target.startswith("n1:") else answer(witness, target)
    )
    world.cuts.add(frozenset(("", "n1")))
    world.run(20.0)
    assert not world.job("1").failures and not [call for call in taken(world) if call[1] == "1"]


def strangers(world: World, count: int) -> list[FakeAgent]:
    """Agents of another user's job."""
    world.slurm.submit("2", count)
    found = []
    for element in range(count):
        stranger = FakeAgent(world, "2", element, world.slurm.queue["2", element]["node"], nodes=count)
        stranger.settings.user = "bob"
        stranger.register()
        stranger.ready()
        found.append(stranger)
    world.run(2.0)
    return found


def test_one_strangers_word_keeps_nobody_alive():
    """An agent of another user says of every dead node that it is reached."""
    world = on_slurm(8, 2)
    liar = strangers(world, 4)[-1]  # heard last, so asked first
    answer = world.answer
    world.answer = lambda witness, target: Reach.REACHED if witness == liar.node else answer(witness, target)
    world.agents[1].silent = world.agents[0].silent = True
    for agent in world.agents[:2]:
        world.dead_nodes.add(agent.node)
    unheard(world, world.agents[:1], "DOWN", reason="its power supply is out")
    world.run(6.0)
    assert {failure.record.node for failure in world.job("1").failures} == {"n1", "n2"}


def test_a_door_that_somebody_else_has_by_now_keeps_nobody_alive_for_ever():
    world = on_slurm(8, 4, state_wait_seconds=30.0)
    lost = world.agents[1]
    lost.silent = lost.cut = True
    world.run(25.0)
    assert not world.job().failures
    world.run(10.0)
    assert [(failure.record.slots, failure.record.source) for failure in world.job().failures] == [([1], "clock")]
    assert "state_wait_seconds" in world.job().failures[0].record.reason and not taken(world)


def test_one_closed_port_is_no_evidence_where_nothing_else_of_the_node_answers():
    """Something on the controller's way to one node refuses; the others of the job get no answer."""
    world = on_slurm(8, 5)
    silent = world.agents[1]
    silent.silent = silent.cut = True
    answer = world.answer

    def refuses(witness: str, target: str) -> Reach:
        there = target.startswith(f"{silent.node}:")
        return (Reach.UNKNOWN if witness else Reach.REFUSED) if there else answer(witness, target)

    world.answer = refuses
    world.run(20.0)
    assert not world.job().failures
    world.answer = lambda witness, target: (
        Reach.REFUSED if target.startswith(f"{silent.node}:") else answer(witness, target)
    )
    world.run(3.0)
    assert [failure.record.kind_of_failure for failure in world.job().failures] == ["agent"], "two say the same"


def test_what_all_have_in_common_is_worked_out_once_a_tick(monkeypatch):
    """A rack's loss is not one look through all members for each of its nodes, at each tick."""
    world = on_slurm(40, 32)
    looks = []
    whole = quorum.missing_elements
    monkeypatch.setattr(quorum, "missing_elements", lambda view, job: looks.append(view.now) or whole(view, job))
    cut_off(world, world.agents[:20])
    unheard(world, world.agents[:20], "IDLE", "NOT_RESPONDING")
    world.run(4.0)
    assert len(world.core.view.suspicions.open) == 20 and looks and len(looks) == len(set(looks))


def test_a_firewall_that_refuses_ends_nobody():
    """The head's own rules are loaded anew and reject what it sends: every port looks closed."""
    world = on_slurm(5, 4)
    before = dict(world.job().members)
    head_cut(world)
    world.answer = lambda witness, target: Reach.REFUSED
    world.run(30.0)
    assert not world.job().failures and not taken(world)
    del world.answer
    heal(world)
    world.run(3.0)
    assert world.job().members == before and not world.job().failures


def test_a_closed_port_alone_shortens_no_lease():
    world = on_slurm(5, 4)
    world.agents[1].silent = world.agents[1].killed = True
    world.run(1.2)
    assert not world.job().failures
    world.run(1.0)
    assert [failure.record.kind_of_failure for failure in world.job().failures] == ["agent"]


def test_nothing_is_asked_while_nobody_is_heard():
    world = on_slurm(5, 4)
    head_cut(world)
    world.run(4.0)
    asked = world.core.view.suspicions.last_number
    world.run(60.0)
    assert world.core.view.alone and world.core.view.suspicions.last_number == asked
    assert world.core.view.slurm.seen.asked_at > world.now - 3.0, "Slurm is asked for its lists"


def test_a_whole_racks_loss_asks_different_witnesses():
    world = on_slurm(20, 16)
    for agent in world.agents[:6]:
        agent.silent = True
        world.dead_nodes.add(agent.node)
    world.run(4.0)
    asked = {name for name, message in world.sent if isinstance(message, wire.Reach)}
    assert len(asked) >= 2 and len(world.job().failures) == 6


BLACK_HOLE = "10.255.255.1:9"


def lies(agent: FakeAgent, **said: str) -> None:
    """From now on the agent says this of itself when it registers."""
    agent.registration = lambda **more: msgspec.structs.replace(FakeAgent.registration(agent, **more), **said)


def swallowed(world: World, *more: tuple[str, str]) -> None:
    """Nothing answers at the black hole, nor, of what else a witness says, for these pairs of witness and target."""
    answer = world.answer
    world.answer = lambda witness, target: (
        Reach.SILENT if target == BLACK_HOLE or (witness, target) in more else answer(witness, target)
    )


def test_a_user_who_lies_about_his_own_agent_takes_no_node():
    """Defect: his agent named a black hole as its door and fell silent, two others of his job said that its slurmd was
    silent, and a healthy node was set down, though this controller reached it."""
    world = World(FakeSlurm(5))
    world.slurm.submit("1", 3)
    agents = [FakeAgent(world, "1", e, f"n{e + 1}", nodes=3) for e in range(3)]
    lies(agents[0], door=BLACK_HOLE)
    swallowed(world, ("n2", "n1:slurmd"), ("n3", "n1:slurmd"))
    for agent in agents:
        agent.register()
        agent.ready()
    world.run(2.0)
    agents[0].silent = True
    world.run(6.0)
    assert [failure.record.kind_of_failure for failure in world.job().failures] == ["agent"], "his own job's matter"
    assert not [call for call in taken(world) if call[0] in ("down", "drain")]
    assert not world.core.state.isolated


def test_a_node_of_which_this_controller_cannot_say_anything_is_left_alone():
    world = on_slurm(5, 4)
    lost = world.agents[1]
    lost.silent = True
    world.dead_nodes.add(lost.node)
    answer = world.answer
    world.answer = lambda witness, target: answer(witness, target) if witness else Reach.UNKNOWN
    world.run(4.0)
    assert [failure.record.slots for failure in world.job().failures] == [[1]] and 1 not in world.job().members
    assert not [call for call in taken(world) if call[0] == "down"]


def test_a_dead_node_is_set_down_as_soon_as_its_lease_is_over():
    world = on_slurm(5, 4)
    world.agents[1].silent = True
    world.dead_nodes.add("n2")
    world.run(2.0)
    assert [call for call in taken(world) if call[0] == "down"] == [("down", "1", 1, "n2")]
    assert "the controller: agent silent, slurmd silent" in world.job().failures[0].record.reason


@pytest.mark.parametrize(
    ("address", "tried"), [("10.0.0.2", "10.0.0.2:7"), ("fd00::2", "fd00::2:7"), ("n2", "192.0.2.9:7")]
)
def test_a_door_is_where_slurm_says_that_the_node_is(monkeypatch, address, tried):
    """Where Slurm gives a name, it is where the agent's connection came from: no user chooses what others try."""
    world = World(FakeSlurm(4))
    nodes = world.slurm.nodes
    monkeypatch.setattr(world.slurm, "nodes", lambda: [replace(node, address=address) for node in nodes()])
    world.slurm.submit("1", 3)
    agents = [FakeAgent(world, "1", e, f"n{e + 1}", nodes=3) for e in range(3)]
    lies(agents[1], door="192.0.2.9:7")
    for agent in agents:
        agent.register()
        agent.ready()
    world.run(2.0)
    agents[1].silent = True
    asked = []
    monkeypatch.setattr(world, "answer", lambda witness, target: asked.append(target) or Reach.UNKNOWN)
    world.run(2.0)
    assert set(asked) == {tried, f"{address}:slurmd"}


def test_a_silent_agent_has_one_try_of_this_controller_under_way(monkeypatch):
    """Defect: each round began new ones, though those of the round before still waited for a thread."""
    world = on_slurm(5, 4)
    world.agents[1].silent = world.agents[1].cut = True
    probes = []
    perform = world._perform
    monkeypatch.setattr(world, "_perform", lambda one: probes.append(one) if isinstance(one, Probe) else perform(one))
    world.run(20.0)
    assert len(probes) == 1
    for place in (0, 1):
        world.core.on_probe(probes[0], place, Reach.SILENT)
    world.run(5.0)
    assert len(probes) == 2, "the answers came late, and count all the same"


def test_an_agent_that_registers_again_is_where_it_was():
    """Defect: after a restart of the controller an agent could name a dead node, which was then taken for its own."""
    world = on_slurm(8, 3)
    world.dead_nodes.add("n8")
    world.slurm.node_states["n8"] = {"IDLE", "NOT_RESPONDING"}
    swallowed(world)
    lies(world.agents[0], node="n8", door=BLACK_HOLE)
    world.restart()
    world.run(4.0)
    assert world.core.view.live.agent("1", 0) is None
    refused = [m.reason for to, m in world.sent if to == world.agents[0].agent and isinstance(m, wire.Refused)]
    assert any("has another node than before" in reason for reason in refused)
    del world.agents[0].registration
    lies(world.agents[0], door=BLACK_HOLE)
    world.run(3.0)
    seen = world.core.view.live.agent("1", 0)
    assert seen is not None and (seen.node, seen.door) == ("n1", world.job().agents[0].door) != ("n1", BLACK_HOLE)
    assert not [call for call in taken(world) if call[0] in ("down", "drain")]


def test_an_agent_whose_messages_wait_to_be_read_is_not_silent() -> None:
    """Defect: a controller that was behind took those for silent whom it had not read yet, and asked everybody about
    them, which put it further behind."""
    world = on_slurm(5, 4)
    agent = world.agents[1]
    agent.silent = True
    world.core.view.unread = lambda route: route == agent.route
    world.run(20.0)
    assert not world.core.view.suspicions.open and not world.job().failures and world.job().phase == "running"
    world.core.view.unread = lambda route: False
    world.dead_nodes.add(agent.node)
    world.run(20.0)
    assert world.job().failures, "once all is read, silence counts"


# ---------------------------------------------------------------- before its word is late
def hinted(world: World, agent: FakeAgent) -> float:
    """The agent is silent from now on, and its plugin is said to tell that its task ended. Returns the time."""
    agent.silent = agent.cut = True
    hint = datagrams.Hint(v=1, kind="task_exit", job="1", element=agent.element, node=agent.node, status=9)
    world.core.hint(hint, world.now)
    world.deliver()
    return world.now


def run_until(world: World, until: float) -> list[str]:
    """The nodes of agents that are on record as dead, or lost with them, by then."""
    world.run(until - world.now)
    return sorted(
        failure.record.node for failure in world.job().failures if failure.record.kind_of_failure in ("agent", "node")
    )


def without_reach(agent: FakeAgent) -> None:
    """From now on it answers no question about others."""
    on_message = agent.get
    agent.get = lambda message: None if isinstance(message, wire.Reach) else on_message(message)


SLOW = {"heartbeat_period": 5.0, "report_timeout": 20.0, "restart_grace": 10.0}  # the lease is 9 s


def test_what_was_silent_before_its_word_was_late_is_asked_again():
    """A node is lost on what witnesses say at its lease, and not on a moment's silence before."""
    world = on_slurm(6, 5)
    lost = world.agents[1]
    world.dead_nodes.add(lost.node)
    began = hinted(world, lost)
    world.run(0.8)
    answers = [answer.door for answer in world.core.view.suspicions.open["1", 1].answers.values()]
    assert answers == [Reach.SILENT] * 3
    world.dead_nodes.clear()  # its network is back, and its messages are still on their way
    assert not run_until(world, began + 3.0)


def test_a_probe_that_runs_when_it_is_asked_again_says_nothing():
    """Defect: slurmd's silence, found by the probe before, was taken for the whole answer, and the door not tried
    again."""
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
    began = hinted(world, lost)
    world.run(1.5)
    early, late = tried
    assert early[0] - began < 0.5 and late[0] - early[0] < 1.5
    world.core.on_probe(early[1], 1, Reach.SILENT)
    assert OWN not in world.core.view.suspicions.open["1", 1].answers
    for place in range(2):
        world.core.on_probe(late[1], place, Reach.SILENT)
    assert run_until(world, began + 3.0) == [lost.node]


def test_an_agent_that_was_reached_early_lives_until_the_next_answers_are_there():
    """Defect: a round that began early was forgotten whole, and Slurm's word alone took the node before others had
    answered again."""
    world = on_slurm(6, 5)
    living = world.agents[1]
    began = hinted(world, living)
    world.run(0.7)
    assert world.core.view.suspicions.open["1", 1].answers
    for agent in world.agents:
        without_reach(agent)
    perform = world._perform
    world._perform = lambda request: None if isinstance(request, Probe) else perform(request)
    world.slurm.node_states[living.node].add("NOT_RESPONDING")
    assert not run_until(world, began + 2.7)


def test_a_refusal_ends_no_lease_early_where_nobody_says_that_the_task_ended():
    """Defect of earlier tries: a firewall that refuses had living agents requeued that took 0.4 to 0.9 s to answer."""
    world = World(FakeSlurm(6), **SLOW)
    world.slurm.submit("1", 5)
    world.start_job(nodes=5)
    world.run(2.0)
    lost = world.agents[1]
    lost.silent = lost.killed = True
    began = world.now
    assert not run_until(world, began + 6.0)
    assert run_until(world, began + 12.0) == [lost.node]


@pytest.mark.parametrize("row", VERDICTS, ids=lambda row: row.case)
def test_the_document_has_each_row_of_the_table(row: Row):
    document = Path(__file__).parents[5] / "docs" / "design" / "silence.md"
    assert f"| {row.case} |" in document.read_text()
