"""The controller's decisions from message to order, without sockets or processes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from tests.support.world import MICRO_BATCHES, FakeAgent, FakeSlurm, World
from unicron_ctl.controller.core.intake import HINTS
from unicron_ctl.controller.job import transitions
from unicron_ctl.controller.model.fold import replay
from unicron_ctl.controller.model.job_state import Phase
from unicron_ctl.controller.model.state_machine import ACTIONS, PHASES, Action, Event
from unicron_ctl.controller.plan.slurm_actions import EARLY, HURRY_SECONDS
from unicron_ctl.shared.protocol import datagrams, structs, wire


def started(nodes: int, **settings) -> tuple[World, list[FakeAgent]]:
    """A job trains on so many nodes, without Slurm."""
    world = World(**settings)
    return world, world.start_job(nodes=nodes)


def messages(world: World, kind: type) -> list:
    return [message for _, message in world.sent if isinstance(message, kind)]


def fails(agent: FakeAgent) -> None:
    """Its rank has stopped by an exception in its generation, and is not dead."""
    (slot,) = agent.slots
    fault = structs.Fault(type="RuntimeError", text="Connection reset by peer", at=agent.world.now)
    agent.set(slot, state="stopped", broken=agent.ranks[slot].generation, fault=fault)


def hint(world: World, element: int, node: str = "") -> None:
    """A datagram of the plugin says that the element's task has ended."""
    about = {"job": "1", "element": element, "node": node, "status": 9}
    world.core.hint(datagrams.Hint(v=1, kind="task_exit", **about), world.now)
    world.deliver()


def test_every_phase_and_every_action_stand_in_the_tables():
    assert set(ACTIONS) == set(Phase) == set(PHASES.values())
    assert set(transitions.PERFORM) == set(Action) == {action for row in ACTIONS.values() for action in row.values()}
    assert set(Event) == {event for row in ACTIONS.values() for event in row} and not ACTIONS[Phase.ENDED]
    assert all(ACTIONS[phase][Event.FAILED] is Action.END for phase in Phase if phase is not Phase.ENDED)


def test_a_job_forms_when_all_its_nodes_are_ready():
    world = World()
    agents = world.start_job(nodes=3, ranks=2)
    plan = world.job().plan
    assert world.job().phase == "running"
    assert plan.members == [0, 1, 2, 3, 4, 5] and plan.joiners == [1, 2, 3, 4, 5] and plan.source == 0
    assert sorted(i for share in plan.assignment.values() for i in share) == list(range(MICRO_BATCHES))
    assert all(rank.generation == 1 for agent in agents for rank in agent.ranks.values())


@pytest.mark.parametrize(("least", "phase"), [(1, "running"), (2, "forming")])
def test_fewer_nodes_than_the_most_start_after_a_while_and_too_few_never(least: int, phase: str):
    world = World()
    agent = FakeAgent(world, "1", 0, "n1", nodes=4, min_nodes=least)
    agent.register()
    agent.ready()
    world.run(1.5)
    assert world.job().phase == "forming"
    world.run(1.0 if phase == "running" else 10.0)
    assert world.job().phase == phase and (phase == "forming" or world.job().plan.members == [0])


def test_the_rank_with_the_latest_checkpoint_is_the_source():
    world = World()
    agents = [FakeAgent(world, "1", e, f"n{e}", nodes=2) for e in range(2)]
    for agent, iteration in zip(agents, (0, 40), strict=True):
        agent.register()
        agent.set(agent.slots[0], state="waiting", iteration=iteration)
    assert world.job().plan.source == 1 and world.job().plan.iteration == 40


def test_a_dead_rank_breaks_the_generation_and_survivors_go_on_with_the_iteration():
    world, agents = started(3)
    world.iterate("1", 0)
    for agent, done in zip(agents, ([0, 3], [1], [2]), strict=True):
        agent.set(agent.slots[0], done=done, iteration=1)
    before = world.now
    agents[1].die(1, -9)
    assert world.now == before, "the Break and the plan took no time of the clock"
    assert messages(world, wire.Break)[0].lost == [1] and messages(world, wire.Break)[0].generation == 1
    plan = world.job().plan
    assert plan.generation == 2 and plan.members == [0, 2] and plan.iteration == 1 and plan.step is None
    assert {0, 3} <= set(plan.assignment[0]) and 2 in plan.assignment[2]
    failure = world.job().failures[-1]
    assert (failure.record.kind_of_failure, failure.record.severity) == ("rank", 2)
    counts = failure.reused_micro_batches, failure.recomputed_micro_batches, failure.redistributed_micro_batches
    assert counts == (3, 1, 3)
    assert failure.detected_at <= failure.broken_at <= failure.planned_at <= failure.resumed_at == world.now
    assert world.job().phase == "running"


def test_the_dead_rank_is_started_again_and_rejoins_at_a_boundary():
    world, agents = started(2)
    agents[1].die(1)
    start = messages(world, wire.StartRank)[0]
    assert (start.slot, start.incarnation) == (1, 1)
    agents[1].ready()
    world.run(0.5)
    assert world.job().phase == "offering"
    offer = world.job().offer
    assert (offer.boundary, offer.generation, offer.members, offer.joiners) == (True, 3, [0, 1], [1])
    assert offer.source == 0
    agents[0].take_offer()
    assert world.job().phase == "running" and world.job().plan.generation == 3
    assert world.job().failures[-1].restored_at == world.now
    story = ["failure_detected", "rank_start", "break", "plan", "entered", "offer", "entered"]
    assert world.kinds() == ["plan", "entered", *story]


def test_all_synced_survivors_step_and_recompute_nothing():
    world, agents = started(3)
    for agent in agents:
        agent.set(agent.slots[0], phase="synced", iteration=4, done=[agent.element])
    agents[2].die(2)
    plan = world.job().plan
    assert plan.step == 4 and plan.iteration == 5 and world.job().failures[-1].recomputed_micro_batches == 0


def test_a_second_loss_while_survivors_stop_only_extends_the_break():
    world, agents = started(4)
    for agent in agents:
        agent.obedient = False
    agents[3].die(3)
    since = world.job().since
    assert world.job().phase == "breaking"
    world.now += 0.01
    agents[0].set(0, state="stopped", broken=1)
    agents[2].die(2)
    assert sorted(world.job().lost) == [2, 3]
    assert world.job().phase == "breaking" and world.job().since == since, "the phase goes on, with its time limit"
    world.run(world.config.repeat_seconds + 0.05)  # who has not stopped hears of it with the next Break
    assert messages(world, wire.Break)[-1].lost == [2, 3] and messages(world, wire.Break)[-1].generation == 1
    agents[1].set(1, state="stopped", broken=1)
    assert world.job().plan.members == [0, 1] and world.job().plan.generation == 2


def test_a_loss_while_entering_takes_the_next_generation():
    world, agents = started(4)
    for agent in agents:
        agent.obedient = False
    agents[3].die(3)
    for agent in agents[:3]:
        agent.set(agent.slots[0], state="stopped", broken=1)
    assert world.job().phase == "entering" and world.job().plan.generation == 2
    agents[0].set(0, state="entering", entering=2)
    agents[2].die(2)
    assert world.job().phase == "breaking" and world.job().broken == 2
    agents[0].set(0, state="stopped", broken=2)
    agents[1].set(1, state="stopped", broken=2)
    assert world.job().plan.generation == 3 and world.job().plan.members == [0, 1]


def test_a_stopped_rank_that_heard_no_plan_yet_need_not_report_again():
    world, agents = started(3)
    agents[2].die(2)
    agents[2].ready()
    world.run(0.5)
    assert world.job().phase == "offering" and world.job().generation == 3
    agents[0].obedient = False
    agents[0].set(0, state="stopped", broken=2)  # its peer's socket broke before any Break: generation 2 is over for it
    agents[1].die(1)
    assert world.job().broken == 3 and world.job().plan.generation == 4 and world.job().plan.members == [0]


def test_an_offer_broken_by_its_joiners_death_puts_the_other_joiner_back():
    world, agents = started(4)
    agents[2].die(2)
    agents[3].die(3)
    agents[2].ready()
    agents[3].ready()
    world.run(0.5)
    assert world.job().phase == "offering"
    agents[3].die(3)
    world.run(1.0)
    assert world.job().phase == "offering" and world.job().offer.members == [0, 1, 2]
    for agent in agents[:2]:
        agent.take_offer()
    assert world.job().phase == "running" and sorted(world.job().members) == [0, 1, 2]


def test_a_survivor_that_does_not_stop_is_left_out_and_started_anew():
    world = World(report_timeout=3.0)
    agents = world.start_job(nodes=3)
    agents[1].obedient = False
    agents[2].die(2)
    world.run(2.5)
    assert world.job().phase == "breaking"
    world.run(1.0)
    assert world.job().plan.members == [0]
    assert any(m.slot == 1 for m in messages(world, wire.StopRank))
    assert [f.record.kind_of_failure for f in world.job().failures] == ["rank", "hang"]


def test_a_fault_that_nobody_died_of_is_tried_again_in_place():
    world, agents = started(2)
    fails(agents[1])
    assert world.job().phase == "running"
    world.run(0.3)
    assert messages(world, wire.Break)[0].lost == []
    plan, failure = world.job().plan, world.job().failures[-1].record
    assert (world.job().phase, sorted(plan.members), plan.generation) == ("running", [0, 1], 2)
    assert (failure.severity, failure.kind_of_failure) == (3, "exception")


def test_the_cause_that_shows_within_the_grace_is_the_one_that_counts():
    world, agents = started(3)
    fails(agents[0])
    world.run(0.05, heartbeats=False)
    agents[1].die(1)
    assert messages(world, wire.Break)[0].lost == [1]
    assert [f.record.kind_of_failure for f in world.job().failures] == ["rank"]
    assert world.job().plan.members == [0, 2]


def test_a_silent_node_is_lost_within_two_heartbeat_periods():
    world, agents = started(3)
    world.run(2.0)
    agents[2].silent = True
    silent_since = world.now
    while not any(m.lost for m in messages(world, wire.Break)):
        world.run(0.05)
    assert world.now - silent_since <= 2.0 * world.config.heartbeat_period
    assert world.job().plan.members == [0, 1]
    assert world.job().failures[-1].record.kind_of_failure == "node"
    agents[2].silent = False
    agents[2].status()  # it was only a network problem: its ranks start anew
    assert any(m.slot == 2 for m in messages(world, wire.StopRank))


def test_a_stall_of_the_controller_expires_nobody():
    world = World()
    world.start_job(nodes=2)
    world.run(1.0)
    world.now += 30.0
    world.core.tick(world.now)
    world.deliver()
    world.run(1.0)
    assert not messages(world, wire.Break) and world.job().phase == "running"


def test_a_hint_proves_nothing_and_leads_to_a_question_that_does():
    world, agents = started(2)
    hint(world, 1, "n2")
    world.run(0.5)
    assert not messages(world, wire.Break)
    agents[1].silent = agents[1].cut = True
    hint(world, 1, "n2")
    world.run(1.0)
    assert not messages(world, wire.Break), "a datagram shortens no lease"
    agents[1].silent = False
    agents[1].status()
    world.run(0.1)
    agents[1].silent, agents[1].cut, agents[1].killed = True, False, True
    hint(world, 1, "n2")
    world.run(0.2)
    assert messages(world, wire.Break)[0].lost == [1], "its node says that nobody listens there"


@pytest.mark.parametrize("of", ["hints", "registrations of no job"])
def test_nobody_can_make_the_controller_ask_slurm_all_the_time(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm(8)
    slurm.submit("1", 8)
    world = World(slurm)
    world.start_job(nodes=8)
    world.run(5.0)
    polls = []
    monkeypatch.setattr(slurm, "nodes", lambda: polls.append(world.now) or FakeSlurm.nodes(slurm))
    for turn in range(600):
        if of == "hints":
            hint(world, turn % 8, "n1")
        else:
            stranger = FakeAgent(world, str(1000 + turn), 0, "n1")
            stranger.register()
            world.agents.remove(stranger)  # it says no more
            world.deliver()
        world.run(0.1, heartbeats=turn % 5 == 0)
    usual, early, at_once = 60 / world.config.slurm_poll_seconds, *EARLY
    assert usual - 2 <= len(polls) <= usual + 60 * early + at_once + 2
    if of == "hints":
        world.core.slurm.hurry(world.now)
        assert world.core.slurm.next_poll <= world.now + HURRY_SECONDS, "what is proven still leads to an early look"


def test_forged_hints_for_many_agents_lead_to_few_questions() -> None:
    """Defect: 16 datagrams led to 16 questions and to 32 connections of witnesses."""
    world = World()
    world.start_job(nodes=16)
    world.run(1.0)
    world.sent.clear()
    for element in range(16):
        hint(world, element)
    assert 0 < len(messages(world, wire.Ping)) <= HINTS[1]
    world.run(1.0)
    assert len(messages(world, wire.Reach)) <= 2 * HINTS[1] and not messages(world, wire.Break)


def test_a_script_that_dies_at_once_ends_the_job_with_its_last_line():
    world = World()
    agents = [FakeAgent(world, "1", e, f"n{e}", nodes=2) for e in range(2)]
    for agent in agents:
        agent.register()
    for _ in range(4):
        for agent in agents:
            if agent.ranks[agent.slots[0]].state == "starting":
                agent.die(agent.slots[0], 1, lived=2.0, last_line="ModuleNotFoundError: No module named 'nothing'")
        world.run(9)
    ends = messages(world, wire.End)
    assert ends and ends[0].code == 1 and "No module named" in ends[0].reason
    assert world.job().phase == "ended"
    assert len([f for f in world.job().failures if f.slot == 0]) <= 3


def test_all_finished_ends_the_job_and_one_finished_alone_is_no_loss():
    world, agents = started(2)
    agents[0].set(0, state="finished", iteration=99, phase="stepped")
    agents[0].status(leaving="finished")
    agents[0].silent = True
    world.run(3)
    assert world.job().phase == "running" and not messages(world, wire.Break)
    agents[1].set(1, state="finished", iteration=99, phase="stepped")
    assert world.job().phase == "ended" and world.job().ended.code == 0
    world.run(0.1)
    assert messages(world, wire.End)[-1].code == 0


def test_an_element_that_starts_elsewhere_replaces_its_old_agent_for_good():
    world, agents = started(2)
    fresh = FakeAgent(world, "1", 1, "n9", nodes=2)
    fresh.register()
    fresh.ready()
    assert world.job().phase == "running" or world.job().plan.members == [0]
    agents[1].status()
    assert [m for r, m in world.sent if r == agents[1].agent and isinstance(m, wire.Refusal)][-1].final
    agents[0].take_offer()
    world.run(0.5)
    agents[0].take_offer()
    assert sorted(world.job().members) == [0, 1]


def test_a_restarted_controller_finishes_the_recovery():
    world, agents = started(3)
    for agent in agents:
        agent.obedient = False
    agents[2].die(2)
    assert world.job().phase == "breaking"
    world.restart()
    for agent in agents:
        agent.obedient = True
        agent.status()  # refused: it registers again
    world.run(1.0)
    assert world.job().plan.generation == 2 and world.job().plan.members == [0, 1]


def test_an_agent_that_does_not_come_back_after_a_restart_is_lost():
    world, agents = started(2)
    world.restart()
    agents[1].silent = True
    agents[0].status()
    world.run(world.config.restart_grace - 1)
    assert world.job().phase == "running"
    world.run(2)
    assert world.job().plan.members == [0] and world.job().failures[-1].record.kind_of_failure == "node"


def test_a_job_is_healed_within_its_nodes_also_where_the_admin_only_observes():
    """Release 0.1 ended it at its first lost rank."""
    world = World(observe=True)
    agents = world.start_job(nodes=2)
    agents[1].die(1, 7)
    assert messages(world, wire.Break) and messages(world, wire.StartRank)
    agents[1].ready()
    world.run(1)
    for agent in agents:
        agent.take_offer()
    world.run(1)
    assert world.job().phase == "running" and sorted(world.job().members) == [0, 1] and not world.job().ended


VERBS = "die ready offer time silent speak hang restart iterate fault replace stall hint late"


@settings(max_examples=cases(30), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(VERBS.split()), st.integers(0, 3)),
        max_size=25,
    )
)
def test_whatever_happens_the_job_lives_on_and_the_log_gives_the_state_back(story):  # noqa: C901  (one branch an event)
    """Random failures in random order: no crash, generations only rise, the replayed state is the live one.

    Inputs that no protocol would bring follow in `test_interleavings`.
    """
    world = World(report_timeout=2.0, enter_timeout=3.0, restart_grace=2.0)
    agents = world.start_job(nodes=4)
    generation = 0
    for verb, which in story:
        agent = agents[which]
        slot = agent.slots[0]
        if verb == "die" and agent.ranks[slot].state not in ("exited", "starting"):
            agent.die(slot)
        elif verb == "ready" and agent.ranks[slot].state == "starting":
            agent.ready()
        elif verb == "offer":
            for other in agents:
                other.take_offer()
        elif verb == "time":
            world.run(1.0 + which)
        elif verb in ("silent", "speak"):
            agent.silent = verb == "silent"
        elif verb == "hang":
            agent.obedient = not agent.obedient
        elif verb == "restart":
            world.restart()
        elif verb == "iterate" and world.job().phase == "running" and not any(other.silent for other in agents):
            world.iterate("1", world.iteration("1"))
        elif verb == "fault" and agent.ranks[slot].state == "running":
            fails(agent)
        elif verb == "replace":
            agents[which] = FakeAgent(world, "1", which, f"m{which}", nodes=4)
            agents[which].register()
            agents[which].ready()
        elif verb == "stall":
            world.now += 30.0
            world.core.tick(world.now)
            world.deliver()
        elif verb == "hint":
            hint(world, which)
        elif verb == "late":  # what was sent before the last word comes after it
            agent.number -= 1
            agent.status()
        assert world.job().generation >= generation
        generation = world.job().generation
        world.check_replay()
        half = len(world.log) // 2
        assert replay(world.log[half:], replay(world.log[:half])) == world.core.state, "from a snapshot, too"
    for agent in agents:
        agent.obedient, agent.silent = True, False
        agent.status()
    for _ in range(120):
        world.run(1.0)
        for agent in agents:
            agent.take_offer()
            if agent.ranks[agent.slots[0]].state == "starting":
                agent.ready()
    assert world.job().phase in ("running", "ended") and not world.job().set_aside
    if world.job().phase == "running":
        assert sorted(world.job().members) == [0, 1, 2, 3]
    world.check_replay()


def test_a_process_that_is_to_start_later_starts_under_the_next_controller():
    world, agents = started(3)
    fails(agents[1])
    world.run(1.0)
    agents[1].die(1)  # the second fault in a row is waited after
    wanted = world.job().slots[1]
    assert wanted.not_before > world.now and agents[1].ranks[1].state == "exited"
    world.restart()
    world.run(wanted.not_before - world.now + 1.0)
    assert agents[1].ranks[1].incarnation == wanted.wanted and agents[1].ranks[1].state == "starting"
