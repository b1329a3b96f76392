"""Two jobs that each hold half of what both need to begin: one gets its nodes, the other waits for them."""

from __future__ import annotations

import pytest

from tests.support.scenarios import start
from tests.support.world import FakeSlurm, World

NODES, LEAST = 6, 4


def halves(owners: tuple[str, str]) -> World:
    """Jobs 1 and 2 are arrays of six elements, need four, and have three nodes each."""
    world = World(FakeSlurm(NODES))
    for job, owner in zip("12", owners, strict=True):
        facts = {"user": owner, "uid": 1000 + owners.index(owner)}
        world.slurm.submit(job, NODES, state="PENDING", reason="BeginTime", **facts)
        for element in range(NODES):
            mine = {"state": "RUNNING", "node": f"n{3 * (job == '2') + element + 1}"} if element < NODES // 2 else {}
            world.slurm.queue[job, element] |= {"reason": "Resources", **mine}
    return world


def go_on(world: World, seconds: float) -> None:
    for _ in range(round(seconds)):
        for job in "12":
            state = world.core.state.jobs.get(job)
            start(world, job, NODES, min_nodes=LEAST) if state is None or not state.ended else ()
        world.run(1.0)
        world.slurm.schedule()


def trains(world: World) -> dict[str, int]:
    return {name: len(job.members) for name, job in world.core.state.jobs.items() if job.members and not job.ended}


@pytest.mark.parametrize("owners", [("ann", "ann"), ("ann", "bob")], ids=["one owner", "two owners"])
def test_one_of_two_half_started_jobs_begins_and_the_other_follows_it(owners):
    world = halves(owners)
    go_on(world, 6.0)
    first = trains(world)
    assert len(first) == 1 and min(first.values()) >= LEAST, first
    (job,) = first
    assert not world.slurm.free(), "no node waits for the other job"
    for agent in world.agents:
        for slot in agent.slots if agent.job == job and not agent.silent else ():
            agent.set(slot, state="finished")
    world.run(1.0)
    for (owner, _), entry in world.slurm.queue.items():
        if owner == job and entry["state"] == "RUNNING":
            entry.update(state="COMPLETED", node=None)
    for agent in world.agents:
        agent.silent = agent.silent or agent.job == job
    world.slurm.schedule()
    go_on(world, 8.0)
    assert trains(world) == {"2" if job == "1" else "1": NODES}


def test_a_job_that_has_trained_keeps_its_nodes_however_few_they_are():
    world = halves(("ann", "ann"))
    go_on(world, 6.0)
    (job,) = trains(world)
    other = "2" if job == "1" else "1"
    for number in range(3, NODES + 1):  # three nodes are left, and the job goes on with them
        world.slurm.node_states[f"n{number}"] = {"DOWN"}
    for agent in world.agents:
        if world.slurm.node_states.get(agent.node) == {"DOWN"}:
            agent.silent = True
            world.dead_nodes.add(agent.node)
            world.slurm.queue[agent.job, agent.element] |= {"state": "PENDING", "node": None, "reason": "BeginTime"}
    go_on(world, 10.0)
    assert list(trains(world)) == [job] and world.core.state.assignment[other] == 0
