"""What goes of jobs that ended long ago: nothing that the state after a restart is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cases.log_growth import Year
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.core.state_snapshot import read_state
from unicron_ctl.shared.log import records, savings, store
from unicron_ctl.shared.log.forgetting import used_bytes
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.log.store import Store
from unicron_ctl.shared.log.thinning import DAY, POLICIES
from unicron_ctl.shared.protocol import wire

LINE = "NVRM: Xid (PCI:0000:3b:00): 31, pid=4242, name=python, Ch 00000010, intr 00000000. MMU Fault"
STEADY = records.WorldProved(reason="it trains")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "events.sqlite")
    yield made
    made.close()


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


def test_every_kind_says_how_long_it_stays() -> None:
    """Defect: a kind that nobody had thought of stayed for ever: node_health alone made 4.6 GB a year."""
    assert set(POLICIES) == set(records.KINDS.values())
    assert {kind for kind, kept in POLICIES.items() if kept.summed} == set(savings.KINDS)
    assert max(kept.seconds for kept in POLICIES.values()) == 14 * DAY


def test_whatever_happened_goes_with_time_and_nothing_after_the_older_state(log: Store) -> None:
    """Defect: what was asked of Slurm, observed, or decided about nodes, never went."""
    world = World(FakeSlurm(6))
    for job in ("1", "2"):
        live(world, job)
    state = world.core.state
    log.append(world.log)
    late = world.now + 15 * DAY
    assert not sum(log.forget(late, state.last_event)), "without saved states the log is all that there is"
    log.save_state(state.last_event, b"one")
    assert not sum(log.forget(late, state.last_event)), "if that one is damaged the log is all that there is"
    log.save_state(state.last_event - 1, b"older")
    log.save_state(state.last_event, b"newer")
    assert not sum(log.forget(world.log[0].time, state.last_event)), "nothing is old"
    kinds = {event.kind for event in log.replay()}
    assert sum(log.forget(world.now + 2 * DAY, 0)) > 0
    left = {event.kind for event in log.replay()}
    assert {"plan", "entered", "step"} <= kinds and not {"plan", "step"} & left
    assert {"failure_detected", "entered"} <= left, "of what is observed no sum has been made since"
    newest = max(event.id for event in world.log)
    assert sum(log.forget(late, 0))
    assert {e.kind for e in log.replay() if e.id < newest} == {"entered", "job_ended"}, "likewise"
    assert sum(log.forget(late, newest))
    assert [event.id for event in log.replay()] == [newest], "it came after the older state"


def test_the_last_health_of_each_node_stays(log: Store) -> None:
    health = [records.NodeHealth(node=f"n{n % 3}", source="i", verdict="good", checked_at=n) for n in range(3000)]
    log.append([Event(n + 1, float(n), "", 0, record) for n, record in enumerate(health)])
    log.append([Event(3001, 3000.0, "", 0, STEADY), Event(3002, 3000.0, "", 0, STEADY)])
    for number in (3001, 3002):
        log.save_state(number, b"state")
    pieces = list(log.forget(30 * DAY, 0))
    assert len(pieces) >= 3 and max(pieces) <= store.FORGET_RECORDS
    assert [event.record.node for event in log.replay() if event.id < 3001] == ["n0", "n1", "n2"]


def test_beyond_its_largest_size_the_oldest_go_and_the_disk_gets_the_room(
    log: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LARGEST_BYTES", 4 << 20)
    monkeypatch.setattr(store, "FREE_BYTES", 1 << 20)
    large = records.WorldProved(reason="x" * 10_000)
    for first in range(1, 2001, 100):
        log.append([Event(n, 1e9, "1", 1, large) for n in range(first, first + 100)])
    for number in (1900, 2000):
        log.save_state(number, b"state")
    log._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = log.path.stat().st_size
    for _ in log.forget(1e9 + 60.0, 2000):
        pass
    log._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert before > 16 << 20 and log.path.stat().st_size < 6 << 20
    assert [event.id for event in log.replay()][-1] == 2000 and used_bytes(log._db) <= 4 << 20


def test_months_of_a_small_cluster_stay_small_and_start_from_a_saved_state(tmp_path: Path) -> None:
    """16 nodes that report every hour, a job that is broken off every third day, and others that come and go."""
    year = Year(tmp_path, nodes=16, ranks=2)
    for _ in range(16):
        year.day()
    early = year.bytes()
    for _ in range(8):
        year.day()
    assert year.bytes() < 1.3 * early and year.bytes() < 8 << 20
    year.store._db.execute("DELETE FROM state WHERE event = (SELECT max(event) FROM state)")
    assert read_state(year.store) == year.state
    kept = Counter(event.kind for event in year.store.replay())
    assert 16 <= kept["node_health"] <= 16 * 24 * 2
    year.store.close()
