"""Waiting for others, and for how long: survivors in the script's own code, the last copy of the training state,
transfers, and newcomers that fail before they are in."""

from __future__ import annotations

import pytest

from tests.support.scenarios import restart_controller
from tests.support.training import events, sent, train, trained_world
from tests.support.world import FakeAgent, World
from unicron_ctl.controller.api.job_answers import job_answer
from unicron_ctl.controller.job.job_events import Trigger, next_event
from unicron_ctl.controller.model.asker import EVERYBODY
from unicron_ctl.controller.model.state_machine import Event
from unicron_ctl.controller.sense.overdue import lacking
from unicron_ctl.shared.protocol import structs, wire
from unicron_detector.failures.escalation_table import State

PEER_RESET = structs.Fault(type="RuntimeError", text="Connection reset by peer", at=0.0)


def goes_outside(world: World, *slots: int) -> None:
    """The ranks evaluate, or write a checkpoint: they answer nothing until they are back."""
    for slot in slots:
        agent = world.agents[slot]
        agent.obedient = False
        agent.set(slot, iteration=world.job().iteration, phase="stepped")


def comes_back(world: World, slot: int) -> None:
    """The rank begins its next iteration, finds the Break and reports."""
    agent = world.agents[slot]
    agent.obedient = True
    agent.set(slot, state="stopped", broken=world.job().broken)


# ---------------------------------------------------------------- survivors that are late to stop
def test_the_scripts_own_code_has_its_time_also_when_a_peer_dies():
    world = trained_world()
    goes_outside(world, 1)
    world.run(5)
    world.agents[2].die(2)
    world.run(580)
    assert world.job().phase == "breaking" and not world.job().condemned and len(world.job().failures) == 1
    comes_back(world, 1)
    assert world.job().phase == "running" and world.job().plan.members == [0, 1]


def test_that_time_runs_from_when_it_went_outside_and_then_the_others_go_on(snapshot):
    world = trained_world()
    goes_outside(world, 1)
    world.run(300)
    world.agents[2].die(2)
    world.run(299)
    assert world.job().phase == "breaking"
    world.run(3)
    assert world.job().plan.members == [0] and world.job().phase == "running"
    (failure,) = [f for f in world.job().failures if f.record.slots == [1]]
    assert failure.record.reason == snapshot


def test_a_process_stopped_by_a_signal_there_is_not_waited_for(snapshot):
    world = trained_world(report_timeout=5.0)
    goes_outside(world, 1)
    world.agents[1].set(1, process="T")
    world.agents[2].die(2)
    world.run(6)
    assert world.job().plan.members == [0]
    assert world.job().failures[-1].record.reason == snapshot


def test_an_idle_process_there_has_the_time_that_it_has_in_any_iteration():
    """Judged as without a Break: it never took long, and it does nothing."""
    world = World(hang_floor_seconds=0.5, hang_idle_seconds=30.0)
    world.start_job()
    train(world, 20, outside={1: 2.0})
    goes_outside(world, 1)
    world.agents[2].die(2)
    for second in range(28):
        world.agents[1].ranks[1].idle = second
        world.run(1)
    assert world.job().phase == "breaking"
    for second in range(28, 34):
        world.agents[1].ranks[1].idle = second
        world.run(1)
    assert world.job().plan.members == [0]


def test_a_survivor_that_compiles_in_its_first_iteration_has_that_time():
    world = World()
    agents = [FakeAgent(world, "1", e, f"n{e + 1}", nodes=3) for e in range(3)]
    for agent in agents:
        agent.ranks[agent.element].iteration_seconds = 0.0
        agent.register()
        agent.ready()
    world.run(0.3)
    agents[1].obedient = False
    agents[2].die(2)
    world.run(400)
    assert world.job().phase == "breaking" and len(world.job().failures) == 1
    comes_back(world, 1)
    assert world.job().plan.members == [0, 1]


# ---------------------------------------------------------------- the last copy
def test_who_holds_the_last_copy_is_never_banished_by_time(snapshot):
    world = trained_world(report_timeout=5.0)
    for slot in (0, 1):
        world.agents[slot].obedient = False  # in no code of their own: they simply do not stop
    world.agents[2].die(2)
    world.run(900)
    assert world.job().phase == "breaking" and not events(world, "reform") and not world.job().condemned
    (waits,) = events(world, "last_copy")
    assert waits.record.slots == [0, 1] and waits.record.reason == snapshot
    assert world.job().waits == waits.record.reason in [decided.reason for decided in world.job().decisions]
    assert job_answer(world.core, world.job(), EVERYBODY).waits == waits.record.reason, "status says so"
    comes_back(world, 1)
    assert world.job().plan.members == [1], "now the other one is not the last any more"
    assert not world.job().waits


def test_a_holder_of_the_last_copy_that_dies_is_dead():
    world = trained_world(nodes=2, report_timeout=5.0)
    world.agents[0].obedient = False
    world.agents[1].die(1)
    world.run(60)
    assert world.job().phase == "breaking" and events(world, "last_copy")
    world.agents[0].obedient = True
    world.agents[0].die(0)
    assert world.job().phase == "forming" and events(world, "reform")


def test_a_late_one_is_kept_as_long_as_another_may_still_die_before_it_reports():
    """Slot 1 is late, slot 0 evaluates: were slot 1 given up now and slot 0 to die, nobody would know the state."""
    world = trained_world(report_timeout=5.0)
    world.agents[1].obedient = False
    goes_outside(world, 0)
    world.agents[2].die(2)
    world.run(60)
    assert not world.job().condemned and not events(world, "last_copy")
    world.agents[0].obedient = True
    world.agents[0].die(0)
    world.run(1)
    assert [e.record.slots for e in events(world, "last_copy")] == [[1]]
    comes_back(world, 1)
    assert world.job().plan.members == [1]


def test_a_restarted_controller_waits_for_the_last_copy_too():
    world = trained_world(nodes=2, report_timeout=5.0)
    world.agents[0].obedient = False
    world.agents[1].die(1)
    world.run(10)
    restart_controller(world)
    world.run(60)
    assert world.job().phase == "breaking" and len(events(world, "last_copy")) == 1, "it is on record"
    comes_back(world, 0)
    assert world.job().plan.members == [0]


@pytest.mark.by_hand  # the mode is set after the job was registered
def test_in_restart_mode_nobody_holds_anything():
    world = trained_world(nodes=2, report_timeout=5.0)
    world.job().settings.mode = structs.RESTART
    for agent in world.agents:
        agent.settings.mode = structs.RESTART
    world.agents[0].obedient = False
    world.agents[1].die(1)
    world.run(8)
    assert not events(world, "last_copy") and events(world, "reform")


def test_a_job_on_one_node_keeps_a_rank_when_its_collective_hangs_again():
    world = World(hang_floor_seconds=0.5)
    (agent,) = world.start_job(nodes=1, ranks=2)
    train(world, 20)
    for _ in range(2):
        for slot in agent.slots:
            agent.set(slot, phase="reducing")
        world.run(6)
        train(world, 4) if world.job().phase == "running" and len(world.job().members) == 2 else None
    started_again = {m.slot for m in sent(world, wire.StartRank)}
    assert len(started_again) == 1 and not events(world, "reform") and world.job().phase == "running"


# ---------------------------------------------------------------- entering
def regroups(world: World, slot: int) -> None:
    """All but this rank enter a new generation; it is in it, too, and gets no further."""
    agent = world.agents[slot]
    world.agents[0].set(0, state="stopped", broken=world.job().generation, fault=PEER_RESET)
    agent.obedient = False
    world.run(0.5)
    agent.set(slot, state="stopped", broken=world.job().broken)
    agent.set(slot, state="entering", entering=world.job().generation)
    assert world.job().phase == "entering"


def test_a_transfer_that_moves_may_take_as_long_as_it_needs():
    world = trained_world(enter_timeout=10.0)
    regroups(world, 1)
    for size in range(1, 120):
        world.agents[1].set(1, moved=size << 20)
        world.run(1)
    assert world.job().phase == "entering" and len(events(world, "break")) == 1
    world.agents[1].set(1, state="running", generation=world.job().generation, entering=0, moved=0)
    assert world.job().phase == "running"


def test_one_that_stands_still_is_tried_again_and_in_the_end_who_never_got_in_is_left_out():
    world = trained_world(enter_timeout=10.0)
    regroups(world, 1)
    for size in range(1, 30):
        world.agents[1].set(1, moved=size << 20)
        world.run(1)
    moved = world.now
    world.run(11)
    assert len(events(world, "break")) == 2 and 8.5 < events(world, "break")[1].time - moved < 11
    assert "nothing has moved for 10 s" in events(world, "break")[1].record.reason


def test_members_that_alone_hold_the_state_try_for_ever_to_enter(snapshot):
    world = trained_world(nodes=2, enter_timeout=5.0, report_timeout=5.0)
    for agent in world.agents:
        agent.obedient = False
        agent.set(agent.element, state="stopped", broken=1, fault=PEER_RESET)
    for _ in range(120):
        world.run(1)
        for agent in world.agents:
            rank, job = agent.ranks[agent.element], world.job()
            if rank.state == "stopped" and job.phase == "entering":
                agent.set(agent.element, state="entering", entering=job.generation)
            elif rank.state == "entering" and job.broken > rank.broken:
                agent.set(agent.element, state="stopped", entering=0, broken=job.broken)
    assert not events(world, "reform") and sorted(world.job().members) == [0, 1]
    assert events(world, "last_copy")[0].record.reason == snapshot
    assert len(events(world, "break")) > 5


def test_no_action_is_overdue_while_it_waits_for_others():
    world = trained_world(enter_timeout=10.0)
    regroups(world, 1)
    view = world.core.view.job(world.job())
    assert lacking(view, 1, State.REATTEMPTING, "n2", set()) == "", "a transfer"
    world.agents[2].die(2)
    assert world.job().phase == "breaking"
    assert lacking(view, 0, State.REATTEMPTING, "n1", set()) == "", "it has stopped, another has not"


def test_no_overdue_action_ends_the_last_copy_either():
    world = trained_world(nodes=2, regroup_seconds=40.0, enter_timeout=1000.0)
    for agent in world.agents:
        agent.obedient = False
        agent.set(agent.element, state="stopped", broken=1, fault=PEER_RESET)
    world.agents[0].die(0)
    world.run(0.5)
    assert world.job().phase == "entering" and world.job().plan.members == [1]
    view = world.core.view.job(world.job())
    assert lacking(view, 1, State.REATTEMPTING, "n2", set()) == ""
    world.run(120)
    assert world.agents[1].ranks[1].state == "stopped" and not events(world, "action_failed"), "it may still enter"


# ---------------------------------------------------------------- offers
@pytest.fixture
def offering() -> World:
    """Slots 0 and 1 train, 2 and 3 are newcomers that wait at their boundary."""
    world = trained_world(nodes=4)
    for slot in (2, 3):
        world.agents[slot].die(slot)
        world.agents[slot].ready()
    world.run(0.5)
    assert world.job().phase == "offering" and sorted(world.job().joining) == [2, 3]
    train(world, 1)
    return world


def test_a_newcomer_waits_for_the_others_that_are_starting_and_for_nobody_else() -> None:
    world = trained_world(nodes=4)
    world.agents[2].die(2)
    world.agents[3].die(3)
    world.agents[3].ready()
    world.run(world.config.offer_delay / 2)
    assert world.job().phase == "running", "the process of slot 2 may be there at any moment"
    world.agents[2].ready()
    assert world.job().phase == "offering" and world.job().offer.joiners == [2, 3], "now all are there"


def test_a_newcomer_does_not_wait_for_long_for_the_others_that_are_starting() -> None:
    world = trained_world(nodes=4)
    world.agents[2].die(2)
    world.agents[3].die(3)
    world.agents[3].ready()
    world.run(1.5 * world.config.offer_delay)
    assert world.job().phase == "offering" and world.job().offer.joiners == [3]


def test_a_newcomer_does_not_wait_for_the_processes_of_an_agent_that_is_gone() -> None:
    world = trained_world(nodes=4)
    world.agents[2].silent = True
    world.run(3)
    assert world.job().phase == "running" and sorted(world.job().members) == [0, 1, 3]
    world.agents[3].die(3)
    world.agents[3].ready()
    assert world.job().phase == "offering" and world.job().offer.joiners == [3]


def breaks(world: World) -> int:
    return len(events(world, "break"))


def test_a_newcomer_that_dies_before_its_boundary_costs_those_who_train_nothing(offering):
    world, before = offering, breaks(offering)
    world.agents[3].die(3)
    assert breaks(world) == before and world.job().phase == "running" and sorted(world.job().members) == [0, 1]
    assert [lost.slot for lost in events(world, "offer_withdrawn")[0].record.lost] == [3]
    world.run(0.5)
    assert world.job().phase == "offering" and world.job().offer.members == [0, 1, 2], "the other one is offered again"
    world.agents[3].ready()
    train(world, 1)
    for agent in world.agents:
        agent.take_offer()
    assert sorted(world.job().members) == [0, 1, 2]
    world.run(0.5)
    for agent in world.agents:
        agent.take_offer()
    assert sorted(world.job().members) == [0, 1, 2, 3] and breaks(world) == before
    assert [f.record.member for f in world.job().failures if f.record.slots == [3]][-1] is False, (
        "nobody stopped for it"
    )


def test_a_newcomers_node_that_falls_silent_costs_them_nothing_either(offering):
    before = breaks(offering)
    offering.agents[3].silent = True
    offering.run(3)
    assert breaks(offering) == before and 3 not in offering.job().joining
    train(offering, 2)


def test_an_offer_that_was_taken_breaks_with_its_newcomer(offering):
    """The members are in it, and wait there."""
    world, before = offering, breaks(offering)
    for slot in (0, 1):
        world.agents[slot].set(slot, state="entering", entering=world.job().offer.generation)
    world.agents[3].die(3)
    world.run(1)
    assert breaks(world) == before + 1 and not events(world, "offer_withdrawn")


def test_members_that_take_an_offer_while_it_is_withdrawn_are_brought_back_at_once(offering):
    """They agreed on it before they heard; nobody comes to meet them there."""
    world, before = offering, breaks(offering)
    taken = world.job().offer.generation
    for agent in world.agents[:2]:
        agent.obedient = False
    world.agents[3].die(3)
    assert world.job().phase == "running"
    for slot in (0, 1):
        world.agents[slot].obedient = True
        world.agents[slot].set(slot, state="entering", entering=taken)
    world.run(1)
    assert breaks(world) == before + 1 and "withdrawn" in events(world, "break")[-1].record.reason
    assert {0, 1} <= set(world.job().members) and not world.job().lost


def test_a_member_that_dies_while_a_newcomer_waits_breaks_the_generation(offering):
    before = breaks(offering)
    offering.agents[1].die(1)
    assert breaks(offering) == before + 1 and not events(offering, "offer_withdrawn")


def test_an_offer_waits_for_a_member_in_the_scripts_own_code(offering):
    world, before = offering, breaks(offering)
    goes_outside(world, 0)
    world.run(500)
    assert breaks(world) == before and world.job().phase == "offering"


def test_members_that_wait_at_the_boundary_for_one_outside_do_not_time_out(offering):
    """Slot 0 agreed with them, and writes a checkpoint before it enters."""
    world, before = offering, breaks(offering)
    goes_outside(world, 0)
    world.agents[1].set(1, state="entering", entering=world.job().offer.generation)
    world.run(500)
    assert breaks(world) == before and world.job().phase == "offering"
    world.run(160)
    assert breaks(world) > before, "600 s are over, and the 30 s of the boundary"


def test_an_offer_that_nobody_takes_is_made_anew_without_a_break(offering):
    world, before = offering, breaks(offering)
    train(world, 90)
    assert breaks(world) == before and len(events(world, "offer_withdrawn")) >= 1
    assert "was not taken within 30 s" in events(world, "offer_withdrawn")[0].record.reason
    for agent in world.agents:
        agent.take_offer()
    assert sorted(world.job().members) == [0, 1, 2, 3]


def test_a_restarted_controller_knows_that_the_offer_was_withdrawn(offering):
    world = offering
    world.agents[2].obedient = False  # has not heard it yet
    world.agents[3].die(3)
    assert world.job().phase == "running" and world.agents[2].ranks[2].state == "entering"
    world.agents[2].obedient = True
    world.restart()
    world.run(2)
    assert world.agents[2].ranks[2].state in ("waiting", "entering") and world.job().phase == "offering"
    for agent in world.agents:
        agent.take_offer()
    assert {0, 1, 2} <= set(world.job().members)


@pytest.mark.by_hand
def test_a_withdrawn_offer_is_no_break_in_the_table_either(offering):
    view = offering.core.view
    offering.job().condemned = {3: "is gone"}
    found = next_event(view, view.job(offering.job()))
    assert found == Trigger(Event.WITHDRAW, "slot 3 is gone")


def never_starts(world: World, *slots: int, every: float = 1.0, seconds: int = 90) -> None:
    """Each process of the slots dies of the same mistake, right after its start; the others train on, if they do: an
    iteration in so many seconds."""
    for second in range(seconds):
        world.run(1.0)
        for slot in slots:
            if world.agents[slot].ranks[slot].state != "exited":
                world.agents[slot].die(slot, code=1, lived=3.0, last_line="SyntaxError: invalid syntax")
        if world.job().phase == "running" and second % every == every - 1:
            train(world, 1)


@pytest.mark.parametrize(("slots", "every"), [([2], 1), ([2], 60), ([1, 2], 60)])
def test_newcomers_that_cannot_start_cost_those_who_train_their_slots_and_no_more(slots: list[int], every: int) -> None:
    world = trained_world()
    for slot in slots:
        world.agents[slot].die(slot)
    never_starts(world, *slots, every=every)
    assert world.job().phase == "running" and sorted(world.job().members) == sorted({0, 1, 2} - set(slots))
    assert all(4 < world.job().slot(slot).wanted < 10 for slot in slots), "it is tried again, at growing distances"
    assert {failure.record.action for failure in world.job().failures} == {"restart"}


def test_where_nobody_trains_without_it_the_job_ends_by_its_own_error(snapshot) -> None:
    world = World()
    for element in range(2):
        FakeAgent(world, "1", element, f"n{element + 1}", nodes=2, min_nodes=2).register()
    world.agents[0].ready()
    never_starts(world, 1)
    assert world.job().ended.code == 1 and world.job().ended.reason == snapshot
