"""Well-formed messages with hostile values, made from the schema, against the controller's engine: no job of others
notices, nothing is set aside, the log can be stored and read again, and what is sent is what agents accept."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import hostile
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller import throttle
from unicron_ctl.controller.log import records
from unicron_ctl.controller.log.store import Store
from unicron_ctl.controller.model.fold import replay
from unicron_ctl.protocol import wire

OWN, VICTIM = "1", "2"
KNOWN = {
    "job": st.sampled_from([OWN, OWN, OWN, "3"]),
    "element": st.sampled_from([0, 1, 1, 2, 2**22 - 1]),
    "slot": st.sampled_from([0, 1, 1, 2, 2**32 - 1]),
    "agent": st.sampled_from(["1-0-n1-0", "1-1-n2-1", "somebody"]),
    "state": st.sampled_from("starting waiting entering running stopped left finished exited".split()),
}
PEERS = st.sampled_from([b"1-0-n1-0", b"1-1-n2-1", b"somebody"])


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(PEERS, hostile.messages(wire.ToController, KNOWN)), min_size=1, max_size=8))
def test_hostile_values_reach_no_other_job(said):
    world = World(FakeSlurm(5))
    world.slurm.submit(OWN, 2)
    world.slurm.submit(VICTIM, 2)
    world.start_job(OWN, nodes=2)
    victims = [FakeAgent(world, VICTIM, e, f"n{e + 3}", nodes=2) for e in range(2)]
    for agent in victims:
        agent.register()
        agent.ready()
    world.run(0.3)
    world.iterate(VICTIM, 0)
    before, calls = world.job(VICTIM), len(world.slurm.calls)
    generation, failures, nodes = before.generation, len(before.failures), set(before.members)
    for peer, data in said:
        try:
            message = wire.decode(data)
        except wire.BadMessage:
            continue
        if not isinstance(message, wire.Ask):
            world.core.receive((peer,), message, world.now)
            world.core.settle()
            world.deliver()
    world.run(1.0)
    world.iterate(VICTIM, 1)
    after = world.job(VICTIM)
    assert (after.generation, len(after.failures), set(after.members)) == (generation, failures, nodes)
    assert after.iteration == 1 and not after.ended
    assert not [job.set_aside for job in world.core.state.jobs.values() if job.set_aside]
    assert not [call for call in world.slurm.calls[calls:] if call[1] == VICTIM or call[3] in ("n3", "n4")]
    for _, message in world.sent:
        wire.decode(wire.encode(message), wire.ToAgent)
    for event in world.log:
        assert records.decode(event.kind, records.encode(event.record)) == event.record or "nan" in repr(event.record)
    world.check_replay()


def test_the_log_of_what_hostile_values_left_is_read_again(tmp_path: Path):
    """SQLite has 64 bits, JSON no NaN: what is within the ranges fits both."""
    world = World()
    world.start_job(nodes=2)

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(PEERS, hostile.messages(wire.ToController, KNOWN))
    def receive(peer, data):
        try:
            message = wire.decode(data)
        except wire.BadMessage:
            return
        if not isinstance(message, wire.Ask):
            world.core.receive((peer,), message, world.now)
            world.run(0.05)

    receive()
    store = Store(tmp_path / "events.sqlite")
    store.append(world.log)
    read = list(store.replay())
    assert len(read) == len(world.log) and repr(replay(read)) == repr(world.core.state)
    store.close()


def two_jobs() -> tuple[World, list[FakeAgent]]:
    """The agents of the own job, beside one that trains."""
    world = World(FakeSlurm(5))
    found = {}
    for job, first in ((OWN, 1), (VICTIM, 3)):
        world.slurm.submit(job, 2)
        found[job] = [FakeAgent(world, job, e, f"n{e + first}", nodes=2) for e in range(2)]
        for agent in found[job]:
            agent.register()
        world.run(0.3)
        for agent in found[job]:
            agent.ready()
    world.run(3.0)
    assert all(world.job(job).phase == "running" for job in (OWN, VICTIM))
    return world, found[OWN]


def test_what_nobody_asked_for_leaves_no_record():
    world, (agent, _) = two_jobs()
    before = len(world.log)
    for number in range(50):
        trace = wire.StackTrace(job=OWN, slot=0, incarnation=0, how="py-spy", state="R", text="x" * 16000)
        world.to_core(agent, trace)
        world.to_core(agent, wire.InjectRefused(job=OWN, slot=0, fault="rank-kill", reason="none"))
        world.to_core(agent, wire.Timing(job=OWN, slot=0, generation=number + 5, at=1.0, seconds={"stop": 1.0}))
    assert len(world.log) == before and not world.core.desks[OWN].timings


def test_violations_without_number_leave_some_records():
    world, agents = two_jobs()
    for iteration in range(400):
        for agent in agents:
            agent.step(agent.element, iteration, [0, 0, 1, 2, 3, 4, 5, 6, 7])
    kept = [event for event in world.log if isinstance(event.record, records.LedgerViolation)]
    assert world.job(OWN).iteration > 300 and 0 < len(kept) <= 100 and not world.job(OWN).set_aside


def test_a_job_whose_agents_make_records_without_end_is_set_aside_and_no_other(monkeypatch):
    """New agents of one's own element: each is a record, and so is what follows from it."""
    monkeypatch.setattr(throttle, "OF_A_JOB", (0.1, 100.0))
    world, _ = two_jobs()

    def come(first: int, count: int) -> int:
        before = len([event for event in world.log if event.job == OWN])
        for number in range(first, first + count):
            agent = FakeAgent(world, OWN, 0, "n1", nodes=2, name=f"again{number}")
            agent.obedient = False
            agent.register()
            world.run(0.05, heartbeats=False)
        return len([event for event in world.log if event.job == OWN]) - before

    come(0, 300)
    mine, other = world.job(OWN), world.job(VICTIM)
    assert "made more records" in mine.set_aside and "2 elements" in mine.set_aside
    assert come(300, 100) <= 5
    assert not other.set_aside and other.phase == "running" and not other.failures
    world.check_replay()


def say(world: World, agent: FakeAgent, number: int, text: str) -> None:
    world.to_core(
        agent,
        wire.NodeEvent(
            job=agent.job,
            element=agent.element,
            agent=agent.agent,
            number=number,
            source="kernel",
            text=text,
            code="c" * 255,
            at=world.now,
        ),
    )


def test_what_agents_tell_of_nodes_counts_for_their_job_and_costs_it_no_protection(monkeypatch):
    """Defect: such records belong to no job, so they were free, and their reasons as long as the line."""
    monkeypatch.setattr(throttle, "OF_A_JOB", (0.1, 100.0))
    world, (agent, _) = two_jobs()
    for number in range(1, 401):
        say(world, agent, number, f"NVRM: Xid 79 {number} " + "x" * 19_000)
        world.run(1.0)
    told = [event for event in world.log if event.kind.startswith("node_")]
    room = 2 * (100.0 + 0.1 * 400)
    assert 20 < len(told) < room and all(len(event.record.reason) <= 500 for event in told)
    said = [event.record.reason for event in told if isinstance(event.record, records.NodeEventsDropped)]
    assert said[0] == "n1 reports more than the log has room for of job 1: the others are not recorded"
    assert not world.job(OWN).set_aside and not world.job(VICTIM).failures
    world.check_replay()
