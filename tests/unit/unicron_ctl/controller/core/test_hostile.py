"""Well-formed messages with hostile values, made from the schema, against the controller's engine: no job of others
notices, nothing is set aside, the log can be stored and read again, and what is sent is what agents accept."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import hostile
from tests.support.depth import cases
from tests.support.scenarios import arrays
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.model import quotas
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.model.fold import replay
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.store import Store
from unicron_ctl.shared.protocol import wire

OWN, VICTIM = "1", "2"
KNOWN = {
    "job": st.sampled_from([OWN, OWN, OWN, "3"]),
    "element": st.sampled_from([0, 1, 1, 2, 2**22 - 1]),
    "slot": st.sampled_from([0, 1, 1, 2, 2**32 - 1]),
    "agent": st.sampled_from(["1-0-n1-0", "1-1-n2-1", "somebody"]),
    "state": st.sampled_from("starting waiting entering running stopped left finished exited".split()),
}
PEERS = st.sampled_from([b"1-0-n1-0", b"1-1-n2-1", b"somebody"])


@settings(max_examples=cases(80), deadline=None, suppress_health_check=list(HealthCheck))
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
            world.core.advance_jobs()
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

    @settings(max_examples=cases(100), deadline=None, suppress_health_check=list(HealthCheck))
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
    world, _ = arrays(5, (OWN, 2, 1.0), (VICTIM, 2, 1.0))
    assert all(world.job(job).phase == "running" for job in (OWN, VICTIM))
    return world, [agent for agent in world.agents if agent.job == OWN]


def test_what_nobody_asked_for_leaves_no_record():
    world, (agent, _) = two_jobs()
    before = len(world.log)
    for number in range(50):
        trace = wire.StackTrace(job=OWN, slot=0, incarnation=0, how="py-spy", state="R", text="x" * 16000)
        world.to_core(agent, trace)
        world.to_core(agent, wire.InjectRefused(job=OWN, slot=0, fault="rank-kill", reason="none"))
        world.to_core(agent, wire.Timing(job=OWN, slot=0, generation=number + 5, at=1.0, seconds={"stop": 1.0}))
    assert len(world.log) == before and not world.core.runtimes[OWN].timings


def test_violations_without_number_leave_some_records():
    world, agents = two_jobs()
    for iteration in range(400):
        for agent in agents:
            agent.step(agent.element, iteration, [0, 0, 1, 2, 3, 4, 5, 6, 7])
    kept = [event for event in world.log if isinstance(event.record, records.LedgerViolation)]
    assert world.job(OWN).iteration > 300 and 0 < len(kept) <= 100 and not world.job(OWN).set_aside


def test_a_job_whose_agents_make_records_without_end_is_set_aside_and_no_other(monkeypatch):
    """New agents of one's own element: each is a record, and so is what follows from it."""
    monkeypatch.setattr(quotas, "OF_A_JOB", (100.0, 20e3))
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


def say(world: World, agent: FakeAgent, number: int, text: str) -> None:
    about = {"job": agent.job, "element": agent.element, "agent": agent.agent, "number": number, "at": world.now}
    world.to_core(agent, wire.NodeEvent(**about, source="kernel", text=text, code="c" * 255))


def test_what_agents_tell_of_nodes_counts_for_their_job_and_costs_it_no_protection(monkeypatch, snapshot):
    """Defect: such records belong to no job, so they were free, and their reasons as long as the line."""
    monkeypatch.setattr(quotas, "OF_A_JOB", (100.0, 50e3))
    world, (agent, _) = two_jobs()
    for number in range(1, 401):
        say(world, agent, number, f"NVRM: Xid 79 {number} " + "x" * 19_000)
        world.run(1.0)
    told = [event for event in world.log if event.kind.startswith("node_")]
    written = sum(len(event.payload) for event in told)
    assert 25e3 < written < 2 * (50e3 + 100.0 * 400) and all(len(event.record.reason) <= 500 for event in told)
    said = [event.record.reason for event in told if isinstance(event.record, records.NodeEventsDropped)]
    assert said[0] == snapshot
    assert not world.job(OWN).set_aside and not world.job(VICTIM).failures


def plan_of(micro_batches: int) -> records.PlanMade:
    plan = wire.Plan(
        generation=1, members=[0], store="n1:1", prefix="p", assignment={0: list(range(micro_batches))}, reason="none"
    )
    return records.PlanMade(plan=plan, crews=[], reason="none")


def test_a_record_costs_what_is_written_of_it():
    """Defect: only its texts counted, so plans with a long list of micro-batches were nearly free."""
    world, _ = two_jobs()
    size = len(records.encode(plan_of(1 << 18)))
    for _ in range(int(2 * quotas.OF_A_JOB[1] / size) + 1):
        assert world.core.written.allows(OWN, "uid 0", world.now)
        world.core.append(OWN, 1, plan_of(1 << 18))
    assert not world.core.written.allows(OWN, "uid 0", world.now)
    assert world.core.written.allows(VICTIM, "uid 0", world.now)


def test_a_large_job_that_fails_every_few_minutes_is_not_set_aside():
    """16,384 ranks on 2,048 nodes write 0.8 MB at every failure; a small one that trains some kB."""
    written = quotas.LogQuota()
    for failure in range(10_000):
        now = 180.0 * failure
        for job, elements, size in (("1", 2048, 800_000), ("2", 1, 15_000)):
            written.charge(job, f"uid {job}", size, elements)
            assert written.allows(job, f"uid {job}", now)


def test_of_steps_count_those_that_stay():
    """Defect: thinning leaves the first and the last steps of a run, however short one makes the runs."""
    world, _ = two_jobs()
    step = records.Step(
        iteration=1, loss=1.0, seconds=0.5, ranks=2, nodes=2, flops=1e9, train_iterations=9, micro_batches=8, computed=8
    )

    def cost(*told: records.Record) -> float:
        before = world.core.written._jobs.rest(OWN, world.now)
        for record in told:
            world.core.append(OWN, 1, record)
        return before - world.core.written._jobs.rest(OWN, world.now)

    alone, first = cost(records.WorldProved()), cost(step)
    assert cost(records.WorldProved(), *[step] * 1000) == alone + 12 * first and cost(*[step] * 1000) == 0.0
    assert cost(*[records.WorldProved(), *[step] * 12] * 50) == 50 * (alone + 12 * first)


def test_what_is_written_of_all_jobs_of_a_user_is_bounded(monkeypatch, snapshot):
    """Defect: a thousand jobs could write a thousand times as much."""
    monkeypatch.setattr(quotas, "OF_AN_OWNER", (5.0, 200e3))
    world = World(FakeSlurm(8))
    world.slurm.submit(VICTIM, 1, uid=1001, user="bob")
    victim = FakeAgent(world, VICTIM, 0, "n1", nodes=1)
    victim.register()
    victim.ready()
    world.run(1.0)

    def begin(job: str) -> FakeAgent:
        world.slurm.submit(job, 1, uid=1000)
        agent = FakeAgent(world, job, 0, world.slurm.queue[job, 0]["node"], nodes=1)
        agent.asker = Asker(1000, "ann")
        agent.register()
        agent.ready()
        world.run(1.0)
        return agent

    for number in range(3, 6):
        begin(str(number))
        for _ in range(20):
            world.core.append(str(number), 1, records.WorldProved(reason="x" * 3_000))
    assert not [job.set_aside for job in world.core.state.jobs.values() if job.set_aside]
    begin("6")
    for _ in range(10):
        world.core.append("6", 1, records.WorldProved(reason="x" * 3_000))
    world.run(0.1)
    assert world.job("6").set_aside == snapshot
    refused = begin("7")
    assert "others of its user" in next(m.reason for m in refused.heard if isinstance(m, wire.Refusal) and not m.final)
    assert "7" not in world.core.state.jobs
    victim.status()
    assert not world.job(VICTIM).set_aside and world.job(VICTIM).phase == "running"
