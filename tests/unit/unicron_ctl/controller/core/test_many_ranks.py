"""What happens to many ranks at once, or for long: no loop over all of them, no list that grows for ever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.training import events
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.job import job_events, orders, spares
from unicron_ctl.controller.judge import judge
from unicron_ctl.controller.model.cluster_rules import ENDED_KEPT
from unicron_ctl.controller.model.finding import What
from unicron_ctl.controller.model.job_state import Identity
from unicron_ctl.controller.sense.progress import MOST_NAMED
from unicron_ctl.shared.protocol import structs, wire

LOST = structs.Fault(type="RuntimeError", text="Connection closed by peer", at=0.0)


def stop_all(world: World, agents: list[FakeAgent]) -> None:
    """Every rank stops by itself, one after the other, and nobody is dead."""
    for agent in agents:
        for slot in agent.slots:
            world.now += 1e-4
            generation = agent.ranks[slot].generation
            values = {name: getattr(agent.ranks[slot], name) for name in structs.RankStatus.__struct_fields__}
            values |= {"state": "stopped", "broken": generation, "fault": LOST, "changed": world.now}
            agent.ranks[slot] = structs.RankStatus(**values)
    for agent in agents:
        agent.status()


def test_a_thousand_ranks_that_stop_at_once_regroup_and_few_are_named() -> None:
    world = World()
    agents = world.start_job(nodes=128, ranks=8)
    stop_all(world, agents)
    world.run(2.0)
    job = world.job()
    assert not job.set_aside and job.phase == "running" and job.generation == 2 and len(job.members) == 1024
    assert 1 <= len(events(world, "failure_detected")) <= MOST_NAMED


class Counted:
    """A function that is called so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> None:
        self.calls, self._real = 0, getattr(module, name)
        monkeypatch.setattr(module, name, self)

    def __call__(self, *args: object) -> object:
        self.calls += 1
        return self._real(*args)


def test_a_plan_is_encoded_once_however_often_agents_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = Counted(monkeypatch, orders.shared_plans, "common")
    world = World()
    agents = world.start_job(nodes=8, ranks=2)
    world.run(0.5)
    agents[3].die(6)
    agents[3].ready()
    world.run(3.0)
    assert world.job().phase == "offering", "its members are at no boundary, and say so with each heartbeat"
    assert encoded.calls == len(events(world, "plan")) + len(events(world, "offer"))


class Unread(dict[int, Identity]):
    """Members that may be asked for one by one."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("all members are looked through")


def test_what_an_agent_is_told_takes_no_look_at_all_members() -> None:
    world = World()
    agents = world.start_job(nodes=4, ranks=2)
    world.run(0.5)
    job = world.core.view.job(world.job())
    standing = orders.StandingOrders(job.state)
    job.state.members = Unread(job.state.members)
    for agent in agents:
        assert list(orders.due_orders(job, job.agents[agent.element], standing, world.now)) == []


@pytest.mark.by_hand
def test_an_agent_that_comes_while_a_plan_is_out_may_change_who_leads() -> None:
    world = World()
    world.start_job(nodes=2)
    job = world.job()
    standing = orders.StandingOrders(job, 1.0)
    assert standing.holds(job, 1.0) and not standing.holds(job, 2.0)
    job.lost[1] = job.members[1]
    assert not standing.holds(job, 1.0), "the Break would name another one"


def test_spares_that_wait_are_not_looked_through_at_each_message(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, said = Counted(monkeypatch, job_events, "newcomers"), Counted(monkeypatch, spares, "standing")
    world = World()
    agents = world.start_job(nodes=64, ranks=8, spares=16)
    assert len(world.job().members) == 48 * 8
    looks.calls = said.calls = 0
    world.run(2.0)
    for _ in range(50):
        agents[0].status()
    assert looks.calls == 0 and said.calls <= 3


def test_a_large_job_that_forms_is_not_looked_through_at_each_message(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Counted(monkeypatch, job_events, "waiting_elements")
    world = World()
    world.start_job(nodes=200)
    world.run(1.0)
    assert world.job().phase == "running" and len(world.job().members) == 200
    assert looks.calls < 2 * job_events.FEW + 20


def test_one_jobs_broken_judge_does_not_keep_another_on_an_unfit_node(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm(4)
    world = World(slurm, max_isolated_job_share=1.0)
    for job in ("1", "2"):  # they share their nodes
        slurm.submit(job, 2)
        for element in range(2):
            slurm.queue[job, element].update(state="RUNNING", node=f"n{element + 1}", reason="")
    first, second = world.start_job("1", nodes=2), world.start_job("2", nodes=2)
    world.run(1.0)
    real = judge.JUDGES[What.NODE]

    def broken(view: object, job: object, finding: object) -> object:
        if job.state.job == "1":  # type: ignore[attr-defined]
            raise ValueError("this judge is broken")
        return real(view, job, finding)  # type: ignore[arg-type]

    monkeypatch.setitem(judge.JUDGES, What.NODE, broken)
    line = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."
    for agent in (first[1], second[1]):
        about = {"job": agent.job, "element": 1, "agent": agent.agent, "number": 1, "at": world.now}
        world.to_core(agent, wire.NodeEvent(**about, source="kernel", text=line, code="xid 79"))
    world.run(2.0)
    assert world.job("1").set_aside and not world.job("2").set_aside
    assert ("requeue_hold", "2", 1, "n2") in slurm.calls and slurm.node_states["n2"] == {"IDLE"}


def test_a_stall_of_the_controller_ends_no_patience() -> None:
    world = World(enter_timeout=5.0)
    agents = world.start_job(nodes=2)
    agents[1].obedient = False
    agents[0].set(0, state="stopped", broken=1, fault=LOST)
    world.run(1.0)
    breaks = len(events(world, "break"))
    world.now += 20.0  # the machine slept
    for agent in agents:
        agent.status()
    world.core.tick(world.now)
    world.deliver()
    assert len(events(world, "break")) == breaks


def test_jobs_that_ended_long_ago_are_forgotten() -> None:
    world = World()
    for number in range(ENDED_KEPT + 20):
        (agent,) = world.start_job(str(number), nodes=1)
        agent.set(0, state="finished")
        world.run(0.1)
        world.agents.remove(agent)
    assert len([job for job in world.core.state.jobs.values() if job.ended]) == ENDED_KEPT
    assert len(world.core.view.live.jobs) <= ENDED_KEPT


def test_a_lost_log_does_not_begin_a_second_world_beside_the_living() -> None:
    world = World()
    agents = world.start_job(nodes=3)
    world.iterate("1", 0)
    world.log.clear()
    world.restart()
    for agent in agents:
        agent.status()
    agents[2].die(2)
    agents[2].ranks[2] = structs.RankStatus(state="waiting", incarnation=1, micro_batches=8, changed=world.now + 1)
    world.run(20.0)
    kinds = world.kinds()
    assert "adopted" in kinds and "reform" not in kinds and agents[0].ranks[0].iteration == 1
    assert sorted(world.job().members) == [0, 1] and world.job().offer.joiners == [2]
