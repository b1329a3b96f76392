"""What breaks while one job is handled sets that job aside, and nothing else; a start from the log never fails."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.scenarios import arrays
from tests.support.training import events
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.core import core
from unicron_ctl.controller.core.state_snapshot import freeze, read_state, thaw
from unicron_ctl.controller.job import transitions
from unicron_ctl.controller.judge import judge
from unicron_ctl.controller.model.cluster_state import ClusterState
from unicron_ctl.controller.model.finding import What
from unicron_ctl.controller.model.fold import fold, replay
from unicron_ctl.controller.model.state_machine import Action
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.log.store import PROGRESS_EVERY, Store, StoreError
from unicron_ctl.shared.protocol import wire

BROKEN = "this decider is broken"
Decider = Callable[..., Any]


def breaks_for(job: str, real: Decider) -> Decider:
    """A decider, of a judge or a transition, that raises for one job."""

    def decider(view: Any, asked: Any, about: Any) -> Any:
        if asked.state.job == job:
            raise ValueError(BROKEN)
        return real(view, asked, about)

    return decider


def two_jobs(**settings: Any) -> tuple[World, list[FakeAgent], list[FakeAgent]]:
    world = World(**settings)
    return world, world.start_job("1", nodes=3), world.start_job("2", nodes=3)


def orders(world: World, job: str) -> list[wire.Message]:
    """What the job's agents were told that touches ranks."""
    names = {agent.agent for agent in world.agents if agent.job == job}
    kinds = (wire.Break, wire.Plan, wire.PlanShare, wire.StartRank, wire.StopRank, wire.End)
    return [message for name, message in world.sent if name in names and isinstance(message, kinds)]


def goes_on(world: World, job: str, agents: list[FakeAgent]) -> None:
    """The job iterates, and heals a death."""
    world.iterate(job, world.job(job).iteration + 1)
    before = world.job(job).generation
    agents[1].die(agents[1].slots[0])
    assert world.job(job).generation == before + 1 and world.job(job).phase == "running"
    assert sorted(world.job(job).members) == [0, 2]
    agents[1].ready()
    world.run(0.5)
    for agent in agents:
        agent.take_offer()
    assert sorted(world.job(job).members) == [0, 1, 2] and world.job(job).phase == "running"
    world.iterate(job, world.iteration(job))
    assert world.job(job).iteration > 0 and not world.job(job).set_aside


@pytest.mark.parametrize(
    ("table", "row", "phase"),
    [
        (judge.JUDGES, What.EXIT, "running"),
        (transitions.PERFORM, Action.BREAK, "running"),
        (transitions.PERFORM, Action.RESUME, "breaking"),
        (transitions.PERFORM, Action.ENTER, "entering"),
    ],
    ids=["judge", "break", "resume", "enter"],
)
def test_a_decider_that_raises_sets_its_job_aside_and_the_other_goes_on(
    monkeypatch: pytest.MonkeyPatch, table: dict[Any, Decider], row: Any, phase: str
) -> None:
    world, first, second = two_jobs()
    monkeypatch.setitem(table, row, breaks_for("1", table[row]))
    told = len(orders(world, "1"))
    first[0].die(0)
    (event,) = events(world, "job_set_aside")
    assert event.job == "1" and BROKEN in event.record.reason and "raise ValueError(BROKEN)" in event.record.where
    assert "ranks train on" in event.record.reason and event.record.input
    assert world.job("1").set_aside == event.record.reason
    assert phase != "running" or len(orders(world, "1")) == told, "what raises sends nothing"
    told = len(orders(world, "1"))
    goes_on(world, "2", second)
    for agent in first:
        agent.status()
    first[1].silent = True
    world.run(5.0)
    assert len(orders(world, "1")) == told and world.job("1").phase == phase, "its ranks are told nothing more"
    assert len(events(world, "job_set_aside")) == 1 and not world.job("2").set_aside


@pytest.mark.parametrize("where", ["tick", "receive", "orders"])
def test_whatever_raises_is_contained(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Not only deciders: a sensor at a tick, a message that is taken in, an order that is made."""
    world, first, second = two_jobs()
    core = world.core
    name = {"tick": "_tick", "receive": "_on_status", "orders": "_send_orders"}[where]
    owner: Any = {"tick": core, "receive": core.intake, "orders": core.turns}[where]
    real = getattr(owner, name)

    def raising(*args: Any) -> Any:
        if any(getattr(arg, "job", "") == "1" for arg in args):
            raise KeyError(BROKEN)
        return real(*args)

    monkeypatch.setattr(owner, name, raising)
    first[0].die(0)
    world.run(0.2)
    assert [event.job for event in events(world, "job_set_aside")] == ["1"]
    goes_on(world, "2", second)


def test_a_job_that_is_set_aside_stays_so_over_a_restart_and_its_owner_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, first, second = two_jobs()
    with monkeypatch.context() as broken:
        broken.setitem(judge.JUDGES, What.EXIT, breaks_for("1", judge.JUDGES[What.EXIT]))
        first[0].die(0)
    world.restart()
    told = len(orders(world, "1"))
    for agent in (*first, *second):
        agent.status()
    world.run(world.config.restart_grace + 2.0)
    assert world.job("1").set_aside and len(orders(world, "1")) == told
    assert any(decision.kind == "job_set_aside" for decision in world.job("1").decisions)
    goes_on(world, "2", second)


def test_in_a_cluster_the_nodes_of_a_job_that_is_set_aside_are_not_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    world, slurm = arrays(4, ("1", 2, 1.0), ("2", 2, 1.0))
    assert world.job("1").phase == world.job("2").phase == "running"
    monkeypatch.setitem(judge.JUDGES, What.EXIT, breaks_for("1", judge.JUDGES[What.EXIT]))
    slurm.calls.clear()
    next(agent for agent in world.agents if (agent.job, agent.element) == ("1", 0)).die(0)
    world.run(20.0)
    assert world.job("1").set_aside and world.job("2").phase == "running"
    assert not [call for call in slurm.calls if call[1] == "1"]
    assert {slurm.queue["1", element]["state"] for element in (0, 1)} == {"RUNNING"}


# ---------------------------------------------------------------- starts
def stored(tmp_path: Path, world: World) -> Store:
    store = Store(tmp_path / "events.sqlite")
    store.append(world.log)
    return store


def disturbed() -> World:
    world, first, _ = two_jobs()
    for iteration in range(30):
        world.iterate("1", iteration)
    first[1].die(1)
    world.run(2.0)
    return world


def test_a_saved_state_and_a_whole_replay_give_the_same_state(tmp_path: Path) -> None:
    world = disturbed()
    store = stored(tmp_path, world)
    assert read_state(store) == world.core.state
    for number in (1, len(world.log) // 2, len(world.log)):
        half = replay(world.log[:number])
        store.save_state(half.last_event, freeze(half))
        assert read_state(store) == world.core.state
    store.thin()
    assert read_state(store) == world.core.state
    store._db.execute("DELETE FROM state")
    assert read_state(store) == world.core.state


@pytest.mark.by_hand
def test_while_the_log_is_read_somebody_is_told(tmp_path: Path) -> None:
    """systemd ends a start that says nothing for long."""
    world = disturbed()
    world.log += [Event(len(world.log) + n, world.now, "", 0, records.Alone()) for n in range(1, 2 * PROGRESS_EVERY)]
    calls = list[int]()
    store = stored(tmp_path, world)
    store.thin(0, lambda: calls.append(1))
    assert len(calls) >= 3
    read_state(store, lambda: calls.append(2))
    assert calls.count(2) >= 3


@pytest.mark.by_hand
def test_a_state_of_all_kinds_of_things_is_read_as_it_was_saved() -> None:
    world = disturbed()
    state = world.core.state
    said = records.NodeEvent(
        node="n1", source="kernel", text="x", code="", count=1, at=0.0, pid=None, mark="a:1", cause="x", severity=3,
        scope="none", rule="r", action="report",
    )  # fmt: skip
    fold(state, Event(state.last_event + 1, world.now, "", 0, said))
    again = thaw(freeze(state), state.last_event)
    assert again == state and repr(again) == repr(state)


def of_another_release(state: ClusterState) -> bytes:
    """The bytes of a release in which a node had a field more, and lacked one that has a default."""
    plain = msgspec.msgpack.decode(freeze(state))
    for node in plain["nodes"].values():
        node["colour"] = "red"
        del node["suspicion"]
    return msgspec.msgpack.encode(plain)


@pytest.mark.parametrize("damage", ["cut", "noise", "another event", "no state"])
def test_a_damaged_state_is_passed_over(tmp_path: Path, damage: str) -> None:
    world = disturbed()
    store, state = stored(tmp_path, world), world.core.state
    good = freeze(state)
    bad = {
        "cut": good[: len(good) // 2],
        "noise": b"\x80\x05 this is none",
        "another event": freeze(replay(world.log[:-3])),
        "no state": msgspec.msgpack.encode("what?"),
    }[damage]
    store.save_state(state.last_event, bad)
    assert read_state(store) == state


@pytest.mark.parametrize("damage", ["none", "other fields", "newest cut"])
def test_a_log_that_lost_its_beginning_folds_to_the_same_state(tmp_path: Path, damage: str, snapshot) -> None:
    world = disturbed()
    store, state = stored(tmp_path, world), world.core.state
    half, most = (replay(world.log[:n]) for n in (len(world.log) // 2, len(world.log) - 3))
    change = of_another_release if damage == "other fields" else freeze
    for saved in (replay(world.log[:1]), half, most):
        store.save_state(saved.last_event, change(saved))
    assert [event for event, _ in store.states()] == [most.last_event, half.last_event]
    assert sum(store.forget(world.now + 30 * 86400.0, state.last_event)) == half.last_event
    assert [event.id for event in store.replay()] == list(range(half.last_event + 1, state.last_event + 1))
    if damage == "newest cut":
        store._db.execute("UPDATE state SET state = substr(state, 1, 99) WHERE event = ?", (most.last_event,))
    assert read_state(store) == state
    store._db.execute("UPDATE state SET state = x'00'")
    with pytest.raises(StoreError) as refused:
        read_state(store)
    assert re.sub(r"\(.*\)", "(WHY)", str(refused.value).replace(str(tmp_path), "FOLDER")) == snapshot


def test_a_damaged_record_in_the_log_costs_its_own_job_only(tmp_path: Path) -> None:
    world = disturbed()
    store = stored(tmp_path, world)
    with sqlite3.connect(store.path) as other:
        number = next(event.id for event in world.log if event.job == "1" and event.kind == "break")
        other.execute("UPDATE event SET payload = ? WHERE id = ?", (b'{"kind":"break"', number))
    state = read_state(store)
    assert f"event {number}" in state.jobs["1"].set_aside and not state.jobs["2"].set_aside
    assert state.jobs["2"] == world.job("2") and state.last_event == world.core.state.last_event


def test_a_job_that_cannot_be_planned_for_does_not_keep_the_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm(4)
    world = World(slurm)
    slurm.submit("1", 1)
    slurm.submit("2", 2)
    first = world.start_job("1", nodes=1)
    second = [FakeAgent(world, "2", element, f"n{element + 2}", nodes=2) for element in range(2)]
    for agent in second:
        agent.register()
        agent.ready()
    real = core.inputs

    def fails(view: Any, jobs: list[Any], *among: Any) -> Any:
        if any(job.job == "1" for job in jobs):
            raise ZeroDivisionError(BROKEN)
        return real(view, jobs, *among)

    monkeypatch.setattr(core, "inputs", fails)
    world.run(3.0)
    assert [event.job for event in events(world, "job_set_aside")] == ["1"] and first and second
    assert any(event.kind == "replanned" and "2 w1" in event.record.inputs for event in world.log)
    assert not world.job("2").set_aside
