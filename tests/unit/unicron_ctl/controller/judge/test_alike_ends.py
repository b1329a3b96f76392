"""Processes of one node that end alike are one failure, one order to start, and one record."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest

from tests.support.training import events
from tests.support.world import FakeAgent, World
from unicron_ctl.controller.api.job_answers import failure_answer
from unicron_ctl.controller.judge import rank_failures
from unicron_ctl.controller.model.job_state import Phase
from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.protocol import structs, wire


def end(agent: FakeAgent, codes: Mapping[int, int], lived: float = 600.0) -> None:
    """Let these processes of the agent end; one status reports all of it."""
    now = agent.world.now
    for slot, code in codes.items():
        rank = agent.ranks[slot] = copy.copy(agent.ranks[slot])
        rank.state, rank.changed = "exited", now
        rank.exit = structs.Exit(code=code, at=now, lived=lived + slot / 100, last_line="")
    agent.status()


def trained(nodes: int = 3, ranks: int = 4) -> tuple[World, list[FakeAgent]]:
    world = World()
    agents = world.start_job(nodes=nodes, ranks=ranks)
    world.run(1.0)
    return world, agents


def failures(world: World) -> list[list[int]]:
    return [event.record.slots for event in events(world, "failure_detected")]


def starts(world: World) -> list[list[int]]:
    return [[event.record.slot, *event.record.others] for event in events(world, "rank_start")]


def test_a_node_whose_ranks_are_all_killed_has_one_failure_and_one_order_to_start() -> None:
    world, agents = trained()
    end(agents[1], dict.fromkeys(agents[1].slots, -9))
    assert failures(world) == starts(world) == [[4, 5, 6, 7]]
    failure = world.job().failures[-1]
    assert failure.actions == ["restart slots [4, 5, 6, 7] in place"]
    world.run(5.0)
    started = {order.slot: order.incarnation for order in agents[1].orders(wire.StartRank)}
    assert started == {4: 1, 5: 1, 6: 1, 7: 1}
    agents[1].ready()
    world.run(5.0)
    job = world.job()
    assert job.phase is Phase.OFFERING and len(job.members) == 8 and sorted(job.joining) == [4, 5, 6, 7]
    history = world.core.state.history
    assert all(len(history.by_slot["1", slot].faults) == 1 for slot in range(4, 8))
    assert len(history.by_node["n2"].faults) == 4


def test_only_what_is_alike_is_judged_as_one() -> None:
    world, agents = trained()
    end(agents[1], {4: -9, 5: 1, 6: -9, 7: 1})
    assert sorted(failures(world)) == [[4, 6], [5, 7]] == sorted(starts(world))


def test_a_slot_with_a_past_gets_a_decision_of_its_own() -> None:
    world, agents = trained()
    end(agents[1], dict.fromkeys(agents[1].slots, -9))
    world.run(5.0)
    end(agents[1], {4: -9})
    world.run(20.0)
    assert world.job().phase is Phase.RUNNING and [agents[1].ranks[slot].incarnation for slot in (4, 5)] == [2, 1]
    for slot in (5, 6, 7):  # an end that is alike is of a process with the same number
        end(agents[1], {slot: 1})
        world.run(20.0)
    before = len(failures(world))
    end(agents[1], dict.fromkeys(agents[1].slots, -9))
    assert sorted(failures(world)[before:]) == [[4], [5, 6, 7]], "it was the same fault for the third time in slot 4"


@pytest.mark.parametrize("said", ["", "Memory cgroup out of memory: Killed process 4242 (python) total-vm:9kB"])
def test_what_a_node_has_said_may_name_one_of_them(said: str) -> None:
    world, agents = trained()
    for slot in agents[1].slots:
        agents[1].ranks[slot].pid = 4240 + slot - 4
    agents[1].status()
    if said:
        about = {"job": "1", "element": 1, "agent": agents[1].agent, "number": 1, "source": "kernel", "at": world.now}
        world.to_core(agents[1], wire.NodeEvent(text=said, **about))
    end(agents[1], dict.fromkeys(agents[1].slots, -9))
    causes = {tuple(e.record.slots): e.record.cause for e in events(world, "failure_detected")}
    assert len(causes) == (4 if said else 1) and len(set(causes.values())) == (2 if said else 1)


def test_the_wanted_ends_of_a_node_are_one_record() -> None:
    world, agents = trained()
    for agent in agents:
        end(agent, dict.fromkeys(agent.slots, 0))
    noted = [[e.record.slot, *e.record.others] for e in events(world, "exit_noted")]
    assert noted == [list(agent.slots) for agent in agents] and not failures(world)


@pytest.mark.parametrize("killed", [4, 6])
def test_a_late_line_of_the_kernel_explains_the_process_that_it_names(killed: int) -> None:
    """Defect: a failure of several had the number of its first process alone. A line about another one explained
    nothing, and a line about the first one all of them."""
    world, agents = trained()
    for slot in agents[1].slots:
        agents[1].ranks[slot].pid = 4240 + slot
    agents[1].status()
    end(agents[1], dict.fromkeys(agents[1].slots, -9))
    world.run(0.5)
    text = f"Memory cgroup out of memory: Killed process {4240 + killed} (python) total-vm:9kB"
    about = {"job": "1", "element": 1, "agent": agents[1].agent, "number": 1, "source": "kernel", "at": world.now}
    world.to_core(agents[1], wire.NodeEvent(text=text, **about))
    found = {f.record.cause: (f.record.slots, f.record.pid) for f in world.job().failures}
    others = [slot for slot in agents[1].slots if slot != killed]
    assert found["host_out_of_memory"] == ([killed], 4240 + killed)
    assert found["killed_from_outside"] == (others, 4240 + others[0])
    world.check_replay()


def test_a_late_line_about_a_crash_explains_one_of_several_that_crashed_apart() -> None:
    """Defect: the numbers of the ended processes were known no longer when their slots had new ones, so that the line
    explained the other ends, too."""
    world, agents = trained()
    for slot in agents[1].slots:
        agents[1].ranks[slot].pid = 4240 + slot
    agents[1].status()
    for slot in agents[1].slots:
        end(agents[1], {slot: -11})
    world.run(0.5)
    text = "python[4246]: segfault at 7f ip 00 sp 00 error 4 in libnccl.so.2"
    about = {"job": "1", "element": 1, "agent": agents[1].agent, "number": 1, "source": "kernel", "at": world.now}
    world.to_core(agents[1], wire.NodeEvent(text=text, **about))
    assert [f.record.slots for f in world.job().failures if "segfault" in f.record.reason] == [[6]]


def test_a_record_of_release_02_has_no_number_of_a_process_in_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_failures, "_pid", lambda job, slot: 0)
    world, agents = trained()
    agents[1].ranks[5].pid = 4245
    agents[1].status()
    end(agents[1], {5: -9})
    (failure,) = world.job().failures
    assert not failure.record.exits, "as in a state that 0.2 has saved"
    text = "Memory cgroup out of memory: Killed process 4245 (python) total-vm:9kB"
    about = {"job": "1", "element": 1, "agent": agents[1].agent, "number": 1, "source": "kernel", "at": world.now}
    world.to_core(agents[1], wire.NodeEvent(text=text, **about))
    assert (failure.record.slots, failure.record.cause) == ([5], "host_out_of_memory")


def test_texts_about_a_failure_of_several_name_all_of_them() -> None:
    """Defect: they named the first one alone."""
    world, agents = trained()
    end(agents[1], dict.fromkeys(agents[1].slots, -9))
    failure = failure_answer(world.job().failures[-1])
    assert " rank slots 4-7 SEV2" in status_tables.failure_text(failure)
    assert "slots4-7" in [column.cell(failure) for column in status_tables.FAILURE_COLUMNS]
