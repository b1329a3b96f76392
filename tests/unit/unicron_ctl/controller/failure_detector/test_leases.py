"""Silence is not death: losing a node takes more than its silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from tests.support.scenarios import calls, cut_off, failures, heal, power_off, trained
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.api import answers
from unicron_ctl.controller.failure_detector import quorum
from unicron_ctl.controller.failure_detector.leases import VERDICTS
from unicron_ctl.controller.model.asker import EVERYBODY
from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.protocol.reach import Reach

TAKES = ("down", "drain", "requeue", "requeue_hold", "hold")
BURNT = "rack 3 has burnt"
UNHEARD = {"IDLE", "NOT_RESPONDING"}


def cut_head(world: World) -> None:
    """Nobody hears the controller, nor it them; the nodes answer."""
    for agent in world.agents:
        agent.silent = agent.cut = True


def show(world: World, nodes: list[str], states: set[str], reason: str = "") -> None:
    """Slurm shows these nodes so."""
    for node in nodes:
        world.slurm.node_states[node], world.slurm.reasons[node] = set(states), reason


def finds(world: World, at: str, reach: Reach, witness: Callable[[str], bool] = lambda _: True) -> None:
    """From now on these witnesses ("" is the controller) find this at targets that begin so."""
    usual = world.answer
    world.answer = lambda who, target: reach if target.startswith(at) and witness(who) else usual(who, target)


def plans(world: World) -> int:
    return sum(event.kind in ("plan", "reform") for event in world.log)


# ---------------------------------------------------------------- nobody is heard
@pytest.mark.parametrize("seconds", [3, 15, 60])
@pytest.mark.parametrize("slurm_too", [False, True])
def test_a_silence_of_the_head_node_harms_nobody(seconds: int, slurm_too: bool):
    world, _ = trained(4, 1)
    before, everybody = dict(world.job().members), [f"n{n}" for n in range(1, 6)]
    cut_head(world)
    if slurm_too:  # slurmctld hears nobody either
        show(world, everybody, UNHEARD)
    world.run(min(seconds, 4.0))
    asked = world.core.view.suspicions.last_number
    for _ in range(4, seconds):
        world.run(1.0)
    shown = status_tables.status(answers.answer(world.core, None, "status", {}, EVERYBODY))
    assert world.core.view.alone and any("hears no agent for" in str(part) for part in shown)
    assert world.core.view.suspicions.last_number == asked, "nothing is asked while nobody is heard ..."
    assert world.core.view.slurm.seen.asked_at > world.now - 3.0, "... but Slurm, for its lists"
    show(world, everybody, {"IDLE"})
    heal(world)
    world.run(5.0)
    assert not world.core.view.alone and not calls(world, *TAKES)
    assert world.job().members == before and world.job().phase == "running" and not world.job().failures
    kinds = [event.kind for event in world.log if event.kind in ("alone", "heard_again")]
    assert kinds == ["alone", "heard_again"]


@pytest.mark.parametrize("says", ["registers", "speaks", "speaks for an agent"])
@pytest.mark.by_hand
def test_a_stranger_who_is_heard_ends_no_silence(says: str):
    """Defect: any message did, so whoever is on the head node itself had the controller judge its agents."""
    world, agents = trained(4, 1)
    for agent, key in zip(agents, "abcd", strict=True):
        world.job().agents[agent.element].key = world.core.view.live.agent("1", agent.element).key = key
    cut_head(world)
    world.run(5.0)
    assert world.core.view.alone
    stranger = FakeAgent(world, "9" if says != "speaks for an agent" else "1", 0, "n5", name=agents[0].agent)
    stranger.obedient = False
    for _ in range(20):
        stranger.register() if says == "registers" else stranger.status()
        world.run(0.5, heartbeats=False)
        assert world.core.view.alone
    word = wire.Status(job="1", element=1, agent=agents[1].agent, sent=0.0, number=agents[1].number + 1, ranks={})
    world.core.receive(agents[1].route, word, world.now, "b")
    assert not world.core.view.alone


def test_a_restart_while_nobody_can_reach_the_controller_harms_nobody():
    world, _ = trained(4, 1)
    before = dict(world.job().members)
    cut_head(world)
    world.run(5.0)
    world.restart()
    world.run(30.0)
    assert world.core.view.alone and not calls(world, *TAKES) and world.job().members == before
    heal(world)
    world.run(5.0)
    assert not calls(world, *TAKES) and world.job().members == before and world.job().phase == "running"


def test_a_node_lost_during_the_heads_silence_is_healed_after_it():
    world, _ = trained(4, 1)
    cut_head(world)
    world.run(10.0)
    heal(world)
    power_off(world, "n3")
    healed = world.now
    while 2 in world.job().members and world.now < healed + 5.0:
        world.run(0.1)
    assert 2 not in world.job().members and failures(world) == [("node", "n3")]


# ---------------------------------------------------------------- one job of four on five nodes
class Scenario(NamedTuple):
    """A fault, and its consequences after so many seconds."""

    case: str
    fault: Callable[[World], Any]
    seconds: float
    failures: list[tuple[str, str]]
    """(kind, node) on record."""
    asked: list[tuple[str, str]] = []
    """(action, node) that Slurm was asked for."""
    config: dict[str, float] = {}


def silent(world: World, *elements: int, cut: bool = True) -> None:
    """The agents say nothing any more; where they are only cut, something still answers at their doors."""
    for element in elements:
        world.agents[element].silent, world.agents[element].cut = True, cut


def reached_by_others(world: World) -> None:
    silent(world, 1)
    world.cuts.add(frozenset(("", "n2")))
    show(world, ["n2"], UNHEARD)


def unknown_to_the_controller(world: World) -> None:
    power_off(world, "n2")
    finds(world, "", Reach.UNKNOWN, lambda who: not who)


def unknown_to_all(world: World) -> None:
    silent(world, 1)
    finds(world, "n2", Reach.UNKNOWN)


def ended_for_slurm(world: World) -> None:
    """Whoever has its port now: it was started again, and the number of a port is given to somebody else."""
    silent(world, 1)
    world.slurm.queue["1", 1].update(state="PENDING", node=None, reason="BeginTime")


def refusing_firewall(world: World) -> None:
    """The head's own rules are loaded anew and reject what it sends: every port looks closed."""
    cut_head(world)
    finds(world, "", Reach.REFUSED)


WAIT = {"state_wait_seconds": 30.0}
SCENARIOS = (
    Scenario("others reach it", lambda world: silent(world, 1), 60.0, []),
    Scenario("others reach it, and Slurm hears nothing", reached_by_others, 20.0, []),
    Scenario("it is powered off", lambda world: power_off(world, "n2"), 2.0, [("node", "n2")], [("down", "n2")]),
    Scenario(
        "half of the job",
        lambda world: power_off(world, "n1", "n2"),
        4.0,
        [("node", "n1"), ("node", "n2")],
        [("down", "n1"), ("down", "n2")],
    ),
    Scenario("only witnesses can say it", unknown_to_the_controller, 4.0, [("node", "n2")]),
    Scenario("nothing is known", unknown_to_all, 25.0, [], [], WAIT),
    Scenario("nothing is known for long", unknown_to_all, 35.0, [("node", "n2")], [], WAIT),
    Scenario("its door is somebody's", lambda world: silent(world, 1), 25.0, [], [], WAIT),
    Scenario("... and is so for long", lambda world: silent(world, 1), 35.0, [("node", "n2")], [], WAIT),
    Scenario("Slurm shows its element ended", ended_for_slurm, 4.0, [("agent", "n2")]),
    Scenario("a firewall refuses", refusing_firewall, 30.0, []),
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.case)
def test_what_a_silence_comes_to(scenario: Scenario):
    world, _ = trained(4, 1, config=scenario.config)
    scenario.fault(world)
    world.run(scenario.seconds)
    assert sorted(failures(world)) == scenario.failures
    taken = [(action, node) for action, _, _, node in calls(world, "down", "drain")]
    assert sorted(taken) == scenario.asked
    lost = {node for _, node in scenario.failures}
    assert {f"n{element + 1}" for element in world.job().members} == {"n1", "n2", "n3", "n4"} - lost


def test_a_silent_agent_that_is_not_lost_is_shown_with_the_reason(snapshot):
    world, _ = trained(4, 1)
    silent(world, 1)
    world.run(10.0)
    jobs = status_tables.jobs(answers.answer(world.core, None, "jobs", {}, EVERYBODY)).lines()
    assert "silent, not lost: element 1 (n2)" in jobs[-1]
    assert any("others reach it" in event.record.reason for event in world.log if event.kind == "silence")
    power_off(world, "n2")
    world.run(5.0)
    assert world.job().failures[0].record.reason == snapshot


# ---------------------------------------------------------------- a majority may go on by itself
def test_more_than_half_of_a_job_is_not_left_out_on_the_word_of_the_rest():
    """They may be a majority that goes on without this controller; Slurm is cut off from them likewise."""
    world, agents = trained(5, 3)
    cut_off(world, agents[:3])
    world.run(20.0)
    assert not world.job().failures and not calls(world, *TAKES)
    show(world, ["n1", "n2", "n3"], UNHEARD)
    world.run(10.0)
    show(world, ["n1", "n2", "n3"], {"DOWN", "NOT_RESPONDING"}, "Not responding")
    world.run(10.0)
    assert not world.job().failures and not calls(world, *TAKES)
    assert any("State=DOWN" in event.record.reason for event in world.log if event.kind == "silence")
    show(world, ["n1", "n2", "n3"], {"DOWN", "NOT_RESPONDING"}, BURNT)
    world.run(3.0)
    assert sorted(failure.record.node for failure in world.job().failures) == ["n1", "n2", "n3"]
    world.run(10.0)
    assert not set(world.job().members) & {0, 1, 2} and plans(world) == 2


@pytest.mark.parametrize("dies", [False, True])
def test_ranks_of_the_smaller_half_that_stop_do_not_go_on_without_the_larger(dies: bool):
    """The collectives of the smaller half break, or one of its ranks dies. Nobody of the larger one stops in time, for
    nobody of it hears."""
    world, agents = trained(5, 3)
    cut_off(world, agents[:3])
    show(world, ["n1", "n2", "n3"], UNHEARD)
    if dies:
        agents[4].die(4)
    else:
        for agent in agents[3:]:
            agent.set(agent.slots[0], state="stopped", broken=1)
    world.run(40.0)
    assert world.job().phase == ("breaking" if dies else "running") and plans(world) == 1
    assert not {0, 1, 2} & {slot for failure in world.job().failures for slot in failure.record.slots}
    for agent in agents[:3]:
        agent.silent = agent.cut = False
    world.cuts.clear()
    show(world, ["n1", "n2", "n3"], {"IDLE"})
    for agent in agents[:3]:
        agent.set(agent.slots[0], state="stopped", broken=1)
    world.run(5.0)
    assert plans(world) == 2 and len(world.job().members) == 5 - dies


def test_an_agent_without_a_rank_gives_its_vote_up_before_the_others_go_on():
    """Two of four are cut off, and the rank of the third has died: once its agent is cut off, too, it could make them
    a majority, for it is no member of what follows."""
    world, agents = trained(4, 4)
    cut_off(world, agents[:2])
    agents[2].gives_up = False  # it has not heard of it
    agents[2].die(2)
    world.run(20.0)
    assert (
        not [failure for failure in world.job().failures if failure.record.kind_of_failure == "node"]
        and plans(world) == 1
    )
    agents[2].gives_up = True
    world.run(3.0)
    assert agents[2].over == 1 and world.job().plan.generation == 2 and plans(world) == 2
    assert 3 in world.job().members and not {0, 1} & world.job().members.keys()


def test_elements_that_slurm_starts_elsewhere_do_not_prove_their_old_nodes_dead():
    world, agents = trained(5, 3)
    larger = agents[:3]
    cut_off(world, larger)
    show(world, ["n1", "n2", "n3"], {"DOWN", "NOT_RESPONDING"}, "Not responding")
    for element in range(3):
        entry = world.slurm.queue["1", element]
        entry.update(state="RUNNING", node=f"n{element + 6}", submitted=1.0)
        agent = FakeAgent(world, "1", element, f"n{element + 6}", nodes=5)
        agent.register()
        agent.ready()
    world.run(30.0)
    assert plans(world) == 1
    show(world, ["n1", "n2", "n3"], {"IDLE"})  # they answer: Slurm has ended there what is not to run
    world.run(10.0)
    assert plans(world) == 2 and len(world.job().members) >= 2


# ---------------------------------------------------------------- questions
def test_what_all_have_in_common_is_worked_out_once_a_tick(monkeypatch):
    """A rack's loss is not one look through all members for each of its nodes, at each tick."""
    world, agents = trained(32, 8)
    looks = []
    whole = quorum.missing_elements
    monkeypatch.setattr(quorum, "missing_elements", lambda view, job: looks.append(view.now) or whole(view, job))
    cut_off(world, agents[:20])
    show(world, [agent.node for agent in agents[:20]], UNHEARD)
    world.run(4.0)
    assert len(world.core.view.suspicions.open) == 20 and looks and len(looks) == len(set(looks))


# ---------------------------------------------------------------- agents that lie, and a controller that is behind
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
    assert not calls(world, "down", "drain")
    assert not world.core.state.isolated


def test_an_agent_that_registers_again_is_where_it_was(snapshot):
    """Defect: after a restart of the controller an agent could name a dead node, which was then taken for its own."""
    world, agents = trained(3, 5)
    world.dead_nodes.add("n8")
    world.slurm.node_states["n8"] = UNHEARD
    swallowed(world)
    lies(agents[0], node="n8", door=BLACK_HOLE)
    world.restart()
    world.run(4.0)
    assert world.core.view.live.agent("1", 0) is None
    refused = [m.reason for to, m in world.sent if to == agents[0].agent and isinstance(m, wire.Refusal)]
    assert sorted(set(refused)) == snapshot
    del agents[0].registration
    lies(agents[0], door=BLACK_HOLE)
    world.run(3.0)
    seen = world.core.view.live.agent("1", 0)
    assert seen is not None and (seen.node, seen.door) == ("n1", world.job().agents[0].door) != ("n1", BLACK_HOLE)
    assert not calls(world, "down", "drain")


def test_an_agent_whose_messages_wait_to_be_read_is_not_silent() -> None:
    """Defect: a controller that was behind took those for silent whom it had not read yet, and asked everybody about
    them, which put it further behind."""
    world, agents = trained(4, 1)
    agent = agents[1]
    agent.silent = True
    world.core.view.unread = lambda route: route == agent.route
    world.run(20.0)
    assert not world.core.view.suspicions.open and not world.job().failures and world.job().phase == "running"
    world.core.view.unread = lambda route: False
    world.dead_nodes.add(agent.node)
    world.run(20.0)
    assert world.job().failures, "once all is read, silence counts"


def test_the_document_has_each_row_of_the_table():
    document = (Path(__file__).parents[5] / "docs" / "design" / "silence.md").read_text()
    assert [row.case for row in VERDICTS if f"| {row.case} |" not in document] == [] != list(VERDICTS)
