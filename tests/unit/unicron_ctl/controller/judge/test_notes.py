"""What ranks have proved about an unsound result: who is at fault, and what is done about it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.world import FakeSlurm, World
from unicron_ctl.controller.model.job_state import Failure
from unicron_ctl.shared.protocol import structs
from unicron_detector.processes.rank_messages import SILENT_CORRUPTION, UNSOUND_MICRO_BATCH, UNSOUND_RANK


def trained(slurm: bool = False, nodes: int = 3, ranks: int = 1, replica: int = 1, **settings: Any) -> World:
    world = World(FakeSlurm(nodes + 1) if slurm else None, **settings)
    if world.slurm is not None:
        world.slurm.submit("1", nodes)
    world.start_job(nodes=nodes, ranks=ranks, replica=replica)
    world.run(3.0)
    for iteration in range(5):
        world.iterate("1", iteration)
    return world


def tell(world: World, kind: str, slot: int | None, *by: int, iteration: int = 5, text: str = "") -> list[Failure]:
    """These slots note it; return the failures that follow."""
    before = len(world.job().failures)
    text = text or f"micro-batch 3 of iteration {iteration} was not finite on slot {slot}, and finite on slot 0"
    for one in by:
        at: dict[str, Any] = {"iteration": iteration, "micro_batch": 3, "culprit": slot}
        note = structs.Fault(type=kind, text=text, at=world.now, **at)
        agent = next(each for each in world.agents if one in each.slots)
        agent.set(one, note=note)
    world.run(1.5)
    world.check_replay()
    return list(world.job().failures)[before:]


@pytest.mark.parametrize("kind", [UNSOUND_RANK, SILENT_CORRUPTION])
def test_the_node_of_a_rank_that_is_proved_wrong_is_left_and_is_a_suspect(kind: str) -> None:
    world = trained(slurm=True)
    (failure,) = tell(world, kind, 1, 0)
    record = failure.record
    assert (record.slots, record.node, record.severity, record.cause) == ([1], "n2", 1, "silent_corruption")
    assert record.action == "isolate" and record.micro_batch == (5, 3) and record.iteration == 5
    assert "micro-batch 3 of iteration 5" in record.reason and "slot 1" in record.reason
    assert world.slurm is not None and ("requeue_hold", "1", 1, "n2") in world.slurm.calls
    mark = world.job().avoid["n2"]
    assert mark.suspect and any("pair-test" in action for action in failure.actions)
    assert sorted(world.job().members) == [0, 2] and world.job().phase == "running"


def test_all_ranks_may_say_so_and_it_is_one_failure_and_a_later_one_is_another() -> None:
    world = trained(slurm=True, nodes=4)
    assert len(tell(world, UNSOUND_RANK, 1, 0, 2, 3)) == 1
    assert len(tell(world, UNSOUND_RANK, 3, 0, 2, iteration=6)) == 1


def test_where_no_more_nodes_may_be_left_a_new_process_takes_the_slot() -> None:
    world = trained(slurm=True, nodes=3)
    tell(world, UNSOUND_RANK, 1, 0)
    (failure,) = tell(world, UNSOUND_RANK, 2, 0, iteration=6)
    assert failure.record.severity == 1 and "n3" not in world.job().avoid
    assert world.job().slot(2).wanted == 1 and any("stays on n3" in action for action in failure.actions)


def test_the_data_is_at_fault_and_no_node() -> None:
    world = trained(slurm=True)
    text = "micro-batch 3 of iteration 5 is not finite on slots 0 and 2: it is left out"
    (failure,) = tell(world, UNSOUND_MICRO_BATCH, None, 0, text=text)
    record = failure.record
    assert (record.slots, record.node, record.element, record.severity) == ([], "", -1, 3)
    assert record.cause == "bad_micro_batch" and record.micro_batch == (5, 3)
    assert not world.job().avoid and sorted(world.job().members) == [0, 1, 2] and world.job().phase == "running"
    assert not tell(world, UNSOUND_MICRO_BATCH, None, 1, text=text)


@pytest.mark.parametrize("slot", [None, 7, 999999])
def test_nobody_is_left_out_who_is_not_known_or_not_of_the_job(slot: int | None) -> None:
    world = trained(slurm=True)
    (failure,) = tell(world, SILENT_CORRUPTION, slot, 0)
    assert failure.record.action == "report" and not world.job().avoid
    assert sorted(world.job().members) == [0, 1, 2] and world.job().phase == "running"


def test_the_only_replica_goes_on() -> None:
    world = trained(nodes=2, replica=2)
    (failure,) = tell(world, UNSOUND_RANK, 1, 0)
    assert failure.record.action == "report" and "no replica without" in failure.record.reason
    assert world.job().phase == "running"
