"""Changes that all ranks of a large job make at once call for no close look at each rank; odd ones still do."""

import copy
import dataclasses
import tracemalloc
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest

from benchmarks.scale.alone import Alone
from benchmarks.scale.simulation import Simulation
from tests.support.world import FakeAgent, World
from unicron_ctl.controller.job import candidates
from unicron_ctl.controller.model.agent_view import LastWord
from unicron_ctl.controller.model.job_state import Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.sense import members
from unicron_ctl.controller.sense.iterations import Standing
from unicron_ctl.controller.sense.timing import AT_ONCE, COLUMNS, PhaseTimes, Times
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import wire

Looks = list[tuple[Phase, str, int]]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """The close looks: the phase, and the rank's state and slot."""
    found: Looks = []
    whole = JobView.notice_all

    def notice_all(job: JobView, slots: Collection[int], now: float) -> list[int]:
        found.extend((job.state.phase, status.state, slot) for slot in slots if (status := job.status(slot)))
        return whole(job, slots, now)

    monkeypatch.setattr(JobView, "notice_all", notice_all)
    return found


def of(looks: Looks, phase: Phase, state: str) -> list[int]:
    return [slot for when, what, slot in looks if (when, what) == (phase, state)]


def test_ranks_that_get_ready_and_enter_are_taken_in_in_one_loop(looks: Looks) -> None:
    world = World()
    world.start_job(nodes=3, ranks=2)
    assert world.job().phase is Phase.RUNNING and not world.core.view.job(world.job()).awaited
    for state in ("starting", "waiting"):
        assert not of(looks, Phase.FORMING, state)
    assert not of(looks, Phase.ENTERING, "entering")


def test_nodes_whose_ranks_stand_alike_are_taken_in_as_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Slot by slot, the job would know the same."""
    taken: list[tuple[Phase, int]] = []
    seen = members.take_in_nodes

    def take_in_nodes(job: JobView, standing: Standing) -> None:
        together = set(job.together)
        seen(job, standing)
        taken.extend((job.state.phase, e) for e in together if job.changed.isdisjoint(job.agents[e].slots))

    monkeypatch.setattr(members, "take_in_nodes", take_in_nodes)
    lines = Alone(tmp_path)
    simulation = Simulation(lines, 3, 2)
    try:
        simulation.start()
        simulation.until(simulation.settled, 60.0, "all train")
        simulation.fail({0: [1]})
        simulation.until(simulation.complete, 60.0, "all train again")
        simulation.until(simulation.settled, 60.0, "the controller knows it")
    finally:
        simulation.close()
    for phase in (Phase.FORMING, Phase.ENTERING, Phase.BREAKING):
        assert {1, 2} <= {element for when, element in taken if when is phase}, phase
    (job,) = lines.core.view.live.jobs.values()
    assert job.state.phase is Phase.RUNNING and sorted(job.state.members) == list(range(6)) and not job.awaited
    assert job.crews == {element: job.state.members[2 * element] for element in (1, 2)}


@pytest.mark.parametrize("odd", ["lost", "replaced", "leaves", "another generation"])
def test_a_node_with_anything_odd_is_looked_at_slot_by_slot(odd: str) -> None:
    world = World()
    agents = world.start_job(nodes=3, ranks=2)
    job, agent = world.core.view.job(world.job()), world.core.view.live.agent("1", 1)
    assert agent is not None and agent.common is not None
    job.together.add(1)
    match odd:
        case "lost":
            job.state = dataclasses.replace(job.state, lost={3: job.state.members[3]})
        case "replaced":
            agent.agent = "another"
        case "leaves":
            agent.status.leaving = "finished"
        case _:
            agent.common = agent.common._replace(generation=agent.common.generation + 1)
    members.take_in_nodes(job, world.core.runtime(job.state).sensors.iterations.standing)
    assert job.changed == {2, 3} and not job.together and len(agents) == 3


def test_an_end_on_record_is_looked_at_once(looks: Looks) -> None:
    world = World()
    agents = world.start_job(nodes=3, ranks=2)
    looks.clear()
    agents[1].die(3)
    assert of(looks, Phase.RUNNING, "exited") == [3]
    world.run(2.0)
    assert not of(looks, Phase.BREAKING, "exited"), "the Break is no news of it"
    assert world.job().phase is Phase.RUNNING and sorted(world.job().members) == [0, 1, 2, 4, 5]
    assert agents[1].ranks[3].incarnation == 1, "it is started again"


def test_a_process_that_has_to_start_again_is_no_usual_newcomer(looks: Looks) -> None:
    world = World()
    agents = [FakeAgent(world, "1", e, f"n{e}", nodes=2) for e in range(2)]
    for agent in agents:
        agent.register()
    world.core.append("1", 0, records.RankStart(slot=0, incarnation=1, not_before=0.0, reason="an old process"))
    agents[0].set(0, state="waiting")
    assert of(looks, Phase.FORMING, "waiting") == [0]
    assert [order.incarnation for order in agents[0].orders(wire.StopRank)] == [0]


def test_a_node_that_waits_is_asked_once_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: each newcomer of a forming job led to a look at each rank that waited."""
    asked: list[int] = []
    able = candidates.able

    def counted(job: JobView, agent: FakeAgent, slots: Collection[int], forming: bool = False) -> list[int]:
        asked.append(agent.element)
        return able(job, agent, slots, forming)  # type: ignore[arg-type]

    monkeypatch.setattr(candidates, "able", counted)
    world = World(forming_settle_seconds=30.0)
    agents = [FakeAgent(world, "1", e, f"n{e}", nodes=9) for e in range(8)]
    for agent in agents:
        agent.register()
        agent.ready()
    assert world.job().phase is Phase.FORMING and asked.count(0) < 4 and len(asked) < 4 * len(agents)
    asked.clear()
    world.run(5.0, heartbeats=False)
    assert not asked
    agents[0].set(0, state="starting")
    agents[0].set(0, state="waiting")
    assert set(asked) == {0}


def test_limits_are_asked_at_every_tick_without_taking_phases_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: each tick took in the few reports that had come since the last one, at almost the cost of all at once."""
    taken: list[int] = []
    take_in = PhaseTimes.take_in
    monkeypatch.setattr(PhaseTimes, "take_in", lambda own, steps: taken.append(len(steps)) or take_in(own, steps))
    world = World()
    agents = world.start_job(nodes=3)
    world.iterate("1", 0)
    taken.clear()
    (slot,) = agents[0].slots
    agents[0].step(slot, 1, [0])
    world.run(0.5)
    assert not taken


def test_the_ranks_to_compare_are_chosen_without_a_copy_of_all_times() -> None:
    """Defect: for 16,384 ranks 15 MiB were taken for a moment, and the process kept them."""
    times, ranks = PhaseTimes(), 8 * AT_ONCE + 5
    for iteration in range(3):
        seconds = np.full((ranks, len(COLUMNS)), 0.1)
        seconds[AT_ONCE + 7, 1] = 0.5
        slots = list(range(ranks))
        times.take_in([Times(iteration, slots, seconds.tobytes(), [1] * ranks, True, True)])
    tracemalloc.start()
    try:
        compared = times.comparable()
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    phase = list(COLUMNS)[1]
    assert max(compared, key=lambda slot: compared[slot][phase]) == AT_ONCE + 7
    assert taken < times.seconds[:ranks].nbytes + times.stamps[:ranks].nbytes


def test_a_break_asks_for_no_ranks_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: the Break looked for the checkpoints of all ranks, which only plain programs have, before it was sent."""
    world, asked = World(), list[int]()
    agents = world.start_job(nodes=20, ranks=8)
    world.iterate("1", 0)
    status = JobView.status
    monkeypatch.setattr(JobView, "status", lambda job, slot: asked.append(slot) or status(job, slot))
    for agent in agents:
        agent.obedient = False  # their stops come later
    agents[3].die(25)
    assert world.job().broken and len(set(asked)) < 8


def test_of_a_process_that_has_a_successor_only_its_last_word_is_kept() -> None:
    """Defect: its whole status was, after a failure of all ranks for each of them."""
    world = World()
    agents = world.start_job(nodes=2, ranks=2)
    world.iterate("1", 0)
    agents[1].set(3, done=[3])
    agents[1].die(3)
    agents[1].set(3, state="starting", incarnation=1, exit=None, done=[], iteration=-1)
    view = world.core.view.live.agent("1", 1)
    assert view is not None and view.before == {3: LastWord(0, 1, "computing", [3])}


def test_a_rank_that_finishes_micro_batches_after_a_break_is_not_taken_for_one_that_hangs() -> None:
    """Defect: a Break that was repeated led to a whole status no longer, and the brief form says no micro-batches of
    ranks that run on: a slow rank was ended after 10 s."""
    world = World()
    agents = world.start_job(nodes=3, ranks=2)
    world.iterate("1", 0)
    slow = agents[2]
    slow.obedient = False
    agents[0].die(0)
    for turn in range(12):
        world.run(2.0)
        for slot in slow.slots:
            rank = slow.ranks[slot] = copy.copy(slow.ranks[slot])
            rank.done, rank.changed = [*rank.done, turn], world.now
    assert not [e for e in world.log if e.kind == "failure_detected" and e.record.cause == "task_hang"]


def test_a_micro_batch_that_ends_in_an_undisturbed_iteration_is_said_at_once_and_counts_once() -> None:
    """Defect: the next whole status said it up to ten heartbeats late, so a plan that not all entered was given up so
    much later. Such a status also counted as progress of ranks that had stood still since a brief form."""
    world = World()
    agents = world.start_job(nodes=2, ranks=2)
    world.run(1.0)
    world.iterate("1", 0)
    world.run(1.0)
    view = world.core.view.live.agent("1", 0)
    assert view is not None
    rank = agents[0].ranks[1] = copy.copy(agents[0].ranks[1])
    rank.done, rank.changed, still, began = [0], world.now, view.progress[0], world.now
    world.run(20.0)
    assert view.progress[0] == still and began < view.progress[1] < began + 1.0 and view.ranks[1].done == [0]


def test_a_lost_agent_that_registers_again_can_join() -> None:
    """Defect: its ranks had not changed, so that the element never counted as ready again, and the job never formed."""
    world = World()
    agents = [FakeAgent(world, "1", e, f"n{e + 1}", 2, nodes=3, min_nodes=3) for e in range(3)]
    for agent in agents[:2]:
        agent.register()
        agent.ready()
    world.run(1.0)
    agents[1].silent = True
    world.run(30.0)
    agents[1].silent = False
    agents[1].register()
    world.run(3.0)
    agents[2].register()
    agents[2].ready()
    world.run(30.0)
    assert world.job().phase is Phase.RUNNING


@pytest.mark.by_hand
def test_nodes_that_stopped_before_a_phase_began_are_still_taken_in_as_nodes() -> None:
    """The stops of a large job come while the Break goes out, so its phase begins with most ranks stopped."""
    world = World()
    agents = world.start_job(nodes=4, ranks=2)
    world.iterate("1", 0)
    agents[3].obedient = False  # so that no plan is made yet
    agents[1].die(2)
    job = world.core.view.job(world.job())
    common = job.agents[2].common
    assert world.job().phase is Phase.BREAKING and common is not None and common.state == "stopped"
    job.begin_phase()
    assert {0, 2} <= job.together and job.changed.isdisjoint({0, 1, 4, 5})
