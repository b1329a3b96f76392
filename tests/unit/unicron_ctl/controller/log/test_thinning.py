"""What goes of jobs that ended long ago: nothing that the state after a restart is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.log import records, store
from unicron_ctl.controller.log.store import Store
from unicron_ctl.controller.log.thinning import OF_THE_ENDED
from unicron_ctl.controller.model import cluster_rules, fold
from unicron_ctl.controller.model.cluster import ClusterState
from unicron_ctl.protocol import wire

LINE = "NVRM: Xid (PCI:0000:3b:00): 31, pid=4242, name=python, Ch 00000010, intr 00000000. MMU Fault"


def live(world: World, job: str) -> None:
    """A job of two nodes that trains, loses a rank to its node, says something of the node, and ends."""
    world.slurm.submit(job, 2)
    agents = [FakeAgent(world, job, e, world.slurm.queue[job, e]["node"], nodes=2) for e in range(2)]
    for agent in agents:
        agent.register()
    world.run(0.3)
    for agent in agents:
        agent.ready()
    world.run(3.0)
    for iteration in range(3):
        world.iterate(job, iteration)
    who = {"job": job, "element": 1, "agent": agents[1].agent}
    world.to_core(agents[1], wire.NodeEvent(**who, number=1, source="kernel", text=LINE, at=world.now))
    agents[0].die(0, -7)
    world.run(5.0)
    world.core.append(job, world.job(job).generation, records.JobEnded(code=0, reason="done"))
    for element in range(2):
        world.slurm.queue.pop((job, element))
    world.agents.clear()
    world.run(1.0)


def without_faults(state: ClusterState) -> str:
    """Faults of nodes count for a day: of those that are older none is read."""
    state.history.by_node.clear()
    state.history.recent.clear()
    return repr(state)


def test_the_log_without_what_is_old_of_ended_jobs_folds_to_the_same_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect: nothing but steps ever went."""
    monkeypatch.setattr(cluster_rules, "ENDED_KEPT", 1)
    monkeypatch.setattr(store, "FORGET_RECORDS", 7)
    world = World(FakeSlurm(6))
    for job in ("1", "2", "3"):
        live(world, job)
    assert set(world.core.state.jobs) == {"3"}
    log = Store(tmp_path / "events.sqlite")
    log.append(world.log)
    assert not log.forget(world.core.state.jobs, world.log[0].time), "they have not ended before that time"
    pieces = 0
    while log.forget(world.core.state.jobs, world.now + 1.0):
        pieces += 1
    kept = list(log.replay())
    kinds = {event.kind for event in kept if event.job in ("1", "2")}
    assert pieces > 3 and len(kept) < len(world.log) / 2 and {"job_registered", "job_ended"} <= kinds
    assert not kinds & {"plan", "failure_detected", "step", "agent_registered"}
    assert [e for e in kept if e.job in ("", "3")] == [e for e in world.log if e.job in ("", "3")]
    assert without_faults(fold.replay(kept)) == without_faults(fold.replay(world.log))
    log.close()


def test_nothing_goes_that_nodes_or_the_plan_are_decided_by() -> None:
    forgotten_with_the_job = {records.AgentRegistered, records.Step, records.Steady, records.FailureDetected}
    assert not set(OF_THE_ENDED) & set(fold._NODE)
    assert set(OF_THE_ENDED) & set(fold._CLUSTER) == forgotten_with_the_job
