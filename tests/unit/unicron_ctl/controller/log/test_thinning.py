"""What goes of jobs that ended long ago: nothing that the state after a restart is made of."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from detector.escalation import Recent
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.log import records, store
from unicron_ctl.controller.log.records import Event
from unicron_ctl.controller.log.store import Store
from unicron_ctl.controller.log.thinning import OF_THE_ENDED
from unicron_ctl.controller.model import cluster_rules, fold
from unicron_ctl.controller.model.cluster import ClusterState
from unicron_ctl.controller.model.node import MARKS_KEPT, NODE_EVENTS_KEPT
from unicron_ctl.protocol import wire

LINE = "NVRM: Xid (PCI:0000:3b:00): 31, pid=4242, name=python, Ch 00000010, intr 00000000. MMU Fault"
STEADY = records.Steady(reason="it trains")


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
    state.history.recent = Recent()
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
    state = world.core.state
    assert not sum(log.forget(state.jobs, state.remembers, world.log[0].time)), "they have not ended before that time"
    pieces = len(list(log.forget(state.jobs, state.remembers, world.now + 1.0)))
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


def work_of(log: Store, *what: Any) -> int:
    """Steps of SQLite's machine, in hundreds, in which all goes that may."""
    work = list[int]()
    log._db.set_progress_handler(lambda: work.append(1), 100)
    for _ in log.forget(*what):
        pass
    return len(work)


def test_a_job_that_was_emptied_is_not_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: each piece asked for every job that ever ended: 2.7 s with 100,000 of them."""
    monkeypatch.setattr(store, "FORGET_RECORDS", 50)
    log = Store(tmp_path / "events.sqlite")
    ends = [Event(n, float(n), str(n), 1, records.JobEnded(code=0)) for n in range(1, 1001)]
    log.append(ends)
    known = {"990"}
    pieces = log.forget(known, lambda event: False, 995.0)
    assert [next(pieces) for _ in range(3)] == [0, 0, 0] and log._forgotten == 0, "so many are looked at in one piece"
    whole = work_of(log, known, lambda event: False, 995.0)
    assert whole > 100 and work_of(log, known, lambda event: False, 995.0) < whole / 20
    log.append([Event(1001, 980.0, "990", 1, STEADY), Event(1002, 980.0, "997", 1, STEADY)])
    assert sum(log.forget(set(), lambda event: False, 2000.0)) == 2, "those that had to wait were not passed over"
    log.close()


def test_what_agents_said_of_nodes_goes_but_what_the_state_holds(tmp_path: Path) -> None:
    """Defect: it is of no job, so nothing of it ever went: 0.43 GB a day of one user."""
    said = [
        records.NodeEvent(
            **{"node": f"n{n % 2}", "source": "kernel", "text": str(n), "code": "", "count": 1, "at": 0.0, "pid": None},
            **{"mark": f"a:{n}", "cause": "xid", "severity": 1, "scope": "node", "rule": "", "action": "wait"},
        )
        for n in range(1000)
    ]
    told = list[records.Record]()
    for number, one in enumerate(said):
        told += [one, records.NodeVerdict(node=one.node, event=3 * number + 1, action="report")]
        told.append(records.NodeEventsDropped(node=one.node, of_job="1"))
    told.append(records.NodeHealth(node="n0", source="checks", verdict="bad", checked_at=1.0))
    told.append(records.SlurmAction(action="drain", element=-1, node="n0", slurm_reason="bad"))
    events = [Event(n, float(n), "", 0, record) for n, record in enumerate(told, 1)]
    log, state = Store(tmp_path / "events.sqlite"), fold.replay(events)
    log.append(events)
    assert not sum(log.forget(state.jobs, state.remembers, 1.0)), "nothing is that old"
    pieces = list(log.forget(state.jobs, state.remembers, 1e6))
    assert len(pieces) >= 3 and max(pieces) <= store.FORGET_RECORDS
    kept = list(log.replay())
    assert Counter(event.kind for event in kept) == {
        **{"node_event": 2 * MARKS_KEPT, "node_verdict": 2 * NODE_EVENTS_KEPT, "node_health": 1, "slurm_action": 1}
    }
    assert repr(fold.replay(kept)) == repr(state)
    log.close()
