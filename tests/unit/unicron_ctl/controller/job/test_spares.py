"""Hot spares: who is one too many waits, and takes the place of whoever is lost at the next boundary."""

from __future__ import annotations

import pytest

from tests.support.questions import told
from tests.support.scenarios import boundary, follow, on_slurm, power_off, ready, trained
from tests.support.world import FakeAgent, World
from unicron_ctl.controller.api import answers
from unicron_ctl.controller.job import spares
from unicron_ctl.controller.model.asker import EVERYBODY
from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.protocol.answer_schema import Spare
from unicron_ctl.shared.settings.partitions import PartitionConfig


def started(nodes: int = 4, wanted: int = 1, **settings) -> tuple[World, list[FakeAgent]]:
    world, agents = trained(nodes, spares=wanted, **settings, seconds=0.3)
    world.run(2.0)
    assert world.job().phase == "running"
    return world, agents


def standing(world: World) -> dict[int, str]:
    return spares.standing(world.core.view.job(world.job()))


def until_offered(world: World, limit: float = 30.0) -> wire.Plan:
    for _ in range(round(limit / 0.05)):
        if world.job().offer is not None:
            return world.job().offer
        world.run(0.05)
    raise AssertionError(f"no offer within {limit} s: {world.kinds()}")


def swap(world: World) -> None:
    """The next offer comes, and all take it."""
    until_offered(world)
    boundary(world)


def comes_back(world: World, element: int, node: str = "n9", nodes: int = 4, mode: str = "session") -> None:
    """Another agent starts for the element, ready at once."""
    agent = FakeAgent(world, "1", element, node, nodes=nodes, spares=1, name="back")
    agent.settings.mode = mode
    agent.register()
    agent.ready()


def test_a_job_begins_with_its_members_and_the_spare_waits_ready():
    world, agents = started()
    assert sorted(world.job().members) == [0, 1, 2] and agents[3].ranks[3].state == "waiting"
    assert standing(world) == {3: "ready"}
    assert [e.record.ready for e in world.log if e.kind == "spares"][-1] == [3]
    world.run(700.0)
    assert sorted(world.job().members) == [0, 1, 2] and not world.job().failures


def test_it_does_not_wait_for_the_spare_to_begin():
    world = World()
    agents = [FakeAgent(world, "1", e, f"n{e + 1}", nodes=4, spares=1) for e in range(4)]
    for agent in agents:
        agent.register()
    for agent in agents[:3]:
        agent.ready()
    assert world.job().phase == "running" and sorted(world.job().members) == [0, 1, 2]
    assert standing(world) == {3: "starting"}
    agents[3].ready()
    world.run(5.0)
    assert standing(world) == {3: "ready"} and world.job().generation == 1


def test_a_lost_node_is_replaced_by_the_offer_that_follows_its_loss_at_once(snapshot):
    world, _agents = started()
    power_off(world, "n2")
    offer = until_offered(world)
    assert (offer.members, offer.joiners, offer.boundary) == ([0, 2, 3], [3], True)
    entered = [e.time for e in world.log if e.kind == "entered"][-1]
    assert [e.time for e in world.log if e.kind == "offer"] == [entered], "nothing is waited for"
    boundary(world)
    failure = world.job().failures[0]
    assert sorted(world.job().members) == [0, 2, 3] and failure.whole_at is not None and failure.restored_at is None
    assert [offer.reason, failure.actions] == snapshot
    assert standing(world) == {}


def test_the_lost_element_comes_back_as_the_spare():
    world, _agents = started()
    power_off(world, "n2")
    swap(world)
    comes_back(world, 1)
    world.run(5.0)
    assert sorted(world.job().members) == [0, 2, 3] and standing(world) == {1: "ready"} and world.job().offer is None
    power_off(world, "n4")
    assert until_offered(world).members == [0, 1, 2]


def test_a_spare_that_dies_costs_the_members_nothing():
    world, agents = started()
    agents[3].die(3)
    world.run(2.0)
    assert world.job().generation == 1 and standing(world) == {3: "starting"}
    agents[3].set(3, state="waiting")
    world.run(2.0)
    power_off(world, "n4")
    world.run(10.0)
    assert world.job().generation == 1 and "break" not in world.kinds() and standing(world) == {}


def test_two_lost_at_once_take_both_spares():
    world, _agents = started(nodes=6, wanted=2)
    assert sorted(world.job().members) == [0, 1, 2, 3] and standing(world) == {4: "ready", 5: "ready"}
    power_off(world, "n1")
    power_off(world, "n2")
    while sorted(world.job().members) != [2, 3, 4, 5]:
        swap(world)
    assert all(failure.whole_at is not None for failure in world.job().failures)


def test_more_are_lost_than_there_are_spares():
    world, _agents = started(nodes=5)
    power_off(world, "n1")
    power_off(world, "n2")
    swap(world)
    assert sorted(world.job().members) == [2, 3, 4]
    assert [failure.whole_at for failure in world.job().failures] == [None, None]
    comes_back(world, 0, nodes=5)
    swap(world)
    assert sorted(world.job().members) == [0, 2, 3, 4] and world.job().failures[0].whole_at is not None


def test_a_spare_does_not_begin_the_job_alone_while_all_others_start_again():
    world = World(forming_settle_seconds=2.0)
    agents = [FakeAgent(world, "1", e, f"n{e + 1}", nodes=4, spares=1) for e in range(4)]
    for agent in agents:
        agent.register()
    world.run(5.0)  # a start takes so long
    ready(world, agents, after=20.0)
    for agent in agents[:3]:
        agent.die(agent.slots[0])
    world.run(4.5)
    assert world.job().phase == "forming"
    for agent in agents[:3]:
        agent.set(agent.slots[0], state="waiting")
    world.run(1.0)
    assert world.job().phase == "running" and len(world.job().members) == 3


def test_a_process_that_is_soon_there_again_keeps_its_place():
    world, agents = started()
    agents[1].die(1)
    world.run(0.5)
    assert world.job().offer is None, "a warm restart may come before the spare has joined"
    agents[1].set(1, state="waiting")
    world.run(0.3)
    assert world.job().offer.joiners == [1]
    boundary(world)
    assert sorted(world.job().members) == [0, 1, 2] and standing(world) == {3: "ready"}


def test_a_process_that_is_not_soon_there_again_loses_its_place_and_becomes_the_spare(snapshot):
    world, agents = started()
    agents[1].die(1)
    offer = until_offered(world)
    assert offer.joiners == [3] and offer.reason == snapshot
    boundary(world)
    assert sorted(world.job().members) == [0, 2, 3] and standing(world) == {1: "starting"}
    agents[1].set(1, state="waiting")
    world.run(700.0)
    assert sorted(world.job().members) == [0, 2, 3] and standing(world) == {1: "ready"}
    assert len(world.job().failures) == 1, "no time limit asks that it train"


def test_a_node_whose_processes_start_slowly_is_not_waited_for_again(snapshot):
    world, agents = started()
    agents[1].die(1)
    swap(world)
    world.run(7.0)
    agents[1].set(1, state="waiting")  # after 8 s
    world.run(600.0)
    power_off(world, "n1")
    swap(world)
    comes_back(world, 0)
    died = world.now
    agents[1].die(1)
    offer = until_offered(world)
    assert offer.joiners == [0] and world.now - died < 0.5 and offer.reason == snapshot


@pytest.mark.parametrize(("nodes", "wanted", "min_nodes", "members"), [(3, 5, 1, 1), (3, 1, 3, 3), (3, 2, 2, 2)])
def test_a_number_of_spares_that_does_not_fit_is_said_once_and_ends_nothing(
    nodes, wanted, min_nodes, members, snapshot
):
    world, _ = started(nodes, wanted, min_nodes=min_nodes)
    world.run(10.0)
    assert len(world.job().members) == members and world.job().phase == "running"
    assert [e.record.reason for e in world.log if e.kind == "spares"] == snapshot


def test_several_ranks_a_node_come_in_together():
    world, _agents = started(nodes=3, ranks=8, replica=8)
    assert world.job().elements(world.job().members) == [0, 1] and standing(world) == {2: "ready"}
    power_off(world, "n2")
    offer = until_offered(world)
    assert offer.joiners == list(range(16, 24))
    boundary(world)
    assert world.job().elements(world.job().members) == [0, 2] and world.job().failures[0].whole_at is not None


def test_one_rank_of_several_that_train_by_themselves_comes_back_in_its_own_place():
    world, agents = started(nodes=3, ranks=4)
    agents[0].die(2)
    world.run(5.0)
    assert world.job().offer is None and len(world.job().members) == 7, "a spare is a whole element"
    agents[0].set(2, state="waiting")
    assert until_offered(world).joiners == [2]
    boundary(world)
    assert world.job().elements(world.job().members) == [0, 1] and len(world.job().members) == 8


def test_a_replica_that_one_death_breaks_is_replaced_by_the_spare_as_a_whole():
    world, agents = started(nodes=3, ranks=2, replica=2)
    agents[0].die(1)
    offer = until_offered(world)
    assert offer.joiners == [4, 5] and sorted(offer.members) == [2, 3, 4, 5]
    boundary(world)
    assert standing(world) == {0: "starting"} and agents[0].ranks[0].state == "standby"
    agents[0].set(1, state="waiting")
    world.run(5.0)
    assert standing(world) == {0: "ready"} and sorted(world.job().members) == [2, 3, 4, 5]
    power_off(world, "n2")
    assert until_offered(world).joiners == [0, 1], "with the state of those who train"


def test_where_a_replica_spans_nodes_the_spares_make_a_whole_one():
    world, _agents = started(nodes=6, wanted=2, replica=2)
    assert sorted(world.job().members) == [0, 1, 2, 3] and standing(world) == {4: "ready", 5: "ready"}
    power_off(world, "n4")
    swap(world)
    assert len(world.job().members) == 4 and world.job().failures[0].whole_at is not None
    assert len(standing(world)) == 1


def test_the_spare_that_takes_the_lost_ones_place_in_the_replica_is_named(snapshot):
    """The other one comes in beside it: two shard groups over two nodes each."""
    world, _agents = started(nodes=6, wanted=2, replica=2, lanes=2)
    power_off(world, "n2")
    swap(world)
    assert sorted(world.job().members) == [2, 3, 4, 5] and standing(world) == {0: "ready"}
    assert world.job().failures[0].actions == snapshot


def test_spares_are_rounded_to_whole_replicas(snapshot):
    world, _ = started(nodes=6, wanted=1, replica=2)
    assert sorted(world.job().members) == [0, 1, 2, 3]
    assert [e.record.reason for e in world.log if e.kind == "spares"] == snapshot


def test_in_restart_mode_the_new_world_takes_the_spare_in_at_once():
    world = World()
    agents = [FakeAgent(world, "1", e, f"n{e + 1}", nodes=4, spares=1) for e in range(4)]
    for agent in agents:
        agent.settings.mode = "restart"
        agent.register()
        agent.ready()
    world.run(1.0)
    assert sorted(world.job().members) == [0, 1, 2] and "newcomers_wait" not in world.kinds()
    power_off(world, "n2")
    while world.job().generation == 1 or world.job().phase != "running":
        world.run(0.5)
        for agent, slot in ((agents[0], 0), (agents[2], 2)):
            if agent.ranks[slot].state == "stopped":  # its process has ended for the Break
                agent.set(slot, state="waiting")
    assert {e.record.plan.generation: e.record.plan.members for e in world.log if e.kind == "plan"} == {
        1: [0, 1, 2],
        world.job().generation: [0, 2, 3],
    }
    assert sorted(world.job().members) == [0, 2, 3] and world.job().phase == "running"
    comes_back(world, 1, "n2", mode="restart")
    generation = world.job().generation
    world.run(100.0)
    assert world.job().generation == generation and standing(world) == {1: "ready"}
    assert "newcomers_wait" not in world.kinds()


def test_a_restarted_controller_goes_on_with_the_spare():
    world, _agents = started()
    world.restart()
    world.run(8.0)
    assert sorted(world.job().members) == [0, 1, 2] and standing(world) == {3: "ready"}
    power_off(world, "n2")
    assert until_offered(world).joiners == [3]


# ---------------------------------------------------------------- with a Slurm
def test_slurm_refills_the_spare_after_the_swap():
    world, slurm = on_slurm(5, 4, spares=1)
    (spare,) = standing(world)
    assert world.core.state.assignment == {"1": 4} and len(world.job().members) == 3
    lost = sorted(world.job().members)[1]
    node = world.job().agents[lost].node
    power_off(world, node)
    offer = until_offered(world)
    assert offer.joiners == [spare]
    asked = [e.time for e in world.log if e.kind == "slurm_action" and e.record.action in ("pin", "requeue")]
    assert not asked or world.job().since <= asked[0], "the swap waits for no call of Slurm"
    boundary(world)
    assert world.job().failures[0].whole_at is not None
    world.run(3.0)
    assert slurm.queue["1", lost]["state"] == "RUNNING" and slurm.queue["1", lost]["node"] != node
    ready(world, follow(world, "1", 4, spares=1), 0.6, 0.0)
    world.run(5.0)
    assert standing(world) == {lost: "ready"} and lost not in world.job().members
    assert any(text.startswith("start element") for text in world.job().failures[0].actions)


def test_the_spare_goes_to_a_job_that_gains_more_from_its_node_and_nobody_stops_for_it(snapshot):
    world, slurm = on_slurm(6, 4, spares=1)
    (spare,) = standing(world)
    members, generation = sorted(world.job().members), world.job().generation
    slurm.submit("2", 2)
    others = follow(world, "2", 2)
    ready(world, others, 0.6, 3.0)
    assert world.core.state.assignment == {"1": 4, "2": 2}
    power_off(world, others[1].node)
    world.run(6.0)
    assert world.core.state.assignment == {"1": 3, "2": 2}
    assert world.core.state.plan_report.reasons["1"] == snapshot
    assert slurm.queue["1", spare]["reason"] == "job requeued in held state"
    assert slurm.queue["2", 1]["state"] == "RUNNING"
    assert sorted(world.job().members) == members and world.job().generation == generation
    explained = answers.answer(world.core, None, "explain", {"job": "1"}, EVERYBODY)
    assert explained.plan_reason == world.core.state.plan_report.reasons["1"]


def test_a_hot_spare_is_among_the_nodes_that_the_partition_keeps_free(snapshot):
    keeps = {"default": PartitionConfig(max_weight=100.0, spare_nodes=1)}
    world, _ = on_slurm(4, 4, spares=1, partitions=keeps)
    world.run(3.0)
    assert world.core.state.assignment == {"1": 4} and len(standing(world)) == 1
    assert world.core.state.plan_report.reasons["1"] == snapshot


def test_status_jobs_nodes_and_explain_tell_the_spare(snapshot):
    world, _ = on_slurm(4, 4, spares=1)
    (spare,) = standing(world)
    node = world.job().agents[spare].node
    (job,) = answers.answer(world.core, None, "jobs", {}, EVERYBODY)
    assert job.spares == [Spare(element=spare, node=node, state="ready")]
    assert (job.spares_wanted, job.spares_ready) == (1, 1)
    shown = [status_tables.spares(job)]
    listed = {item.node: item.spare_of for item in answers.answer(world.core, None, "nodes", {}, EVERYBODY)}
    assert {name: waits for name, waits in listed.items() if waits} == {node: {f"1_{spare}": "ready"}}
    explained = answers.answer(world.core, None, "explain", {"job": "1"}, EVERYBODY)
    assert explained.spares_ready == 1
    planned = told(world.core, "scenario")["job"][0]
    assert sorted(planned["flops"]) == ["1", "2", "3"] and list(planned["spares"]) == ["4"]
    world.agents[spare].die(spare)
    world.run(0.3)
    (job,) = answers.answer(world.core, None, "jobs", {}, EVERYBODY)
    assert [*shown, status_tables.spares(job)] == snapshot and job.spares_ready == 0
