"""Iterations of plain programs: what their ranks' own code may take, and who is named."""

from __future__ import annotations

import pytest

from tests.support.depth import cases
from tests.support.habits import STEP, gaps
from tests.support.plain_agent import PlainAgent
from tests.support.world import World
from unicron_ctl.controller.model.job_ledger import PlainSteps
from unicron_ctl.controller.sense.patience import IDLE_SECONDS, Patience
from unicron_ctl.shared.protocol.structs import RankStatus, RankStep, step_table
from unicron_ctl.shared.settings.config import ControllerConfig
from unicron_detector.iterations.culprit import all_wait, lagging
from unicron_detector.iterations.iteration_monitor import IterationMonitor, Limits

CONFIG = ControllerConfig()


def status(idle: float, waits: bool = False, phase: str = "computing", process: str = "S") -> RankStatus:
    return RankStatus(state="running", phase=phase, process=process, idle=idle, waits=waits)


def limit(patience: Patience, waited: float, told: RankStatus, learned: bool = True, starts: bool = False) -> float:
    return patience.own_code(told, waited, 1.0, learned, starts, CONFIG)[0]


def test_a_process_that_does_nothing_is_waited_for_by_the_job_s_own_habits():
    patience = Patience()
    assert limit(patience, 4.0, status(4.0)) == IDLE_SECONDS
    patience.on_outside([0], 100.0)
    assert limit(patience, 4.0, status(4.0)) == IDLE_SECONDS, "an evaluation, in which it was busy"
    assert limit(patience, 4.0, status(4.0, waits=True)) == 300.0
    patience.longest_idle = 2.0
    assert limit(patience, 4.0, status(4.0)) == 6.0, "3x the longest of any rank"
    assert limit(patience, 900.0, status(900.0), learned=False) == CONFIG.hang_outside_seconds
    patience.longest_idle = 1000.0
    assert limit(patience, 900.0, status(900.0)) == 600.0, "never less, nor more, than the script's full time"


@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        (status(0.0), 600.0),  # it computes
        (status(4.0, phase="stepped"), 600.0),  # it saves
        (status(4.0, waits=True), 60.0),  # somebody may answer
        (status(4.0, process="T"), 1.0),  # stopped by a signal
    ],
)
def test_whoever_may_be_at_something_has_more_time(told, seconds):
    assert limit(Patience(), 4.0, told) == seconds


def test_who_starts_may_wait_for_its_data():
    assert limit(Patience(), 30.0, status(30.0), starts=True) == CONFIG.hang_idle_seconds


def alarms(steps: int, seed: int) -> int:
    """The number of times that a healthy program would have been taken for stuck."""
    monitor, patience, found = IterationMonitor(Limits(floor=CONFIG.hang_floor_seconds)), Patience(), 0
    for gap in gaps(steps, seed):
        inside = monitor.limit() or CONFIG.first_iteration_seconds
        told = status(gap.seconds if gap.idle else 0.0, gap.waits, "stepped" if gap.saves else "computing")
        most, _ = patience.own_code(told, gap.seconds, inside, monitor.learned, False, CONFIG)
        found += gap.seconds >= most
        monitor.observe(gap.seconds)
        if not monitor.warming:
            patience.on_outside([0], gap.seconds)
            counts = gap.idle and not gap.waits and not gap.saves and gap.seconds > 1.5
            patience.longest_idle = max(patience.longest_idle, gap.seconds if counts else 0.0)
    return found


def test_healthy_steps_raise_no_alarm():
    assert sum(alarms(10_000, seed) for seed in range(cases(20))) == 0, "200,000 steps in the long run"


def test_the_same_program_s_hang_is_found():
    """After 100 steps without any event, which is as little as it may know."""
    monitor, patience = IterationMonitor(Limits(floor=CONFIG.hang_floor_seconds)), Patience()
    for _ in range(100):
        monitor.observe(STEP)
        patience.on_outside([0], STEP)
    assert patience.own_code(status(3.5), 3.5, monitor.limit(), True, False, CONFIG)[0] == IDLE_SECONDS


# ---------------------------------------------------------------- who is named
def test_who_has_not_begun_the_collective_in_which_the_others_wait(snapshot):
    waits, behind = {"0": (66, 65, "gloo:all_reduce [[9]]")}, {"0": (65, 65, "gloo:all_reduce [[1]]")}
    found = lagging({0: waits, 1: behind, 2: waits})
    assert [each.slot for each in found] == [1]
    assert found[0].reason == snapshot
    assert (
        lagging({0: waits, 1: waits}) == [] and all_wait({0: waits, 1: waits}) and not all_wait({0: waits, 1: behind})
    )
    assert lagging({0: {"0": (66, 66, "")}, 1: behind}) == [], "nobody waits"


def test_who_waits_in_another_group_is_not_to_blame():
    """Slots 0 and 1 make a stage, 2 and 3 the other one; slot 3 hangs, so 2 waits for it, and 0 for 2."""
    ranks = {
        0: {"stage": (5, 5, ""), "pipe": (9, 8, "send")},
        1: {"stage": (5, 5, "")},
        2: {"stage": (5, 5, ""), "pipe": (8, 8, ""), "other": (4, 3, "all_reduce")},
        3: {"other": (3, 3, "")},
    }
    assert [each.slot for each in lagging(ranks)] == [3]


def test_a_job_has_made_as_many_iterations_as_each_of_its_ranks():
    ledger = PlainSteps(closed=9)

    def report(slot: int, iteration: int, generation: int = 2) -> list:
        step = step_table(
            generation=generation,
            iteration=iteration,
            total=1,
            at=1.0,
            ranks=[RankStep(slot=slot, micro_batches=[0], seconds=0.5 + slot, loss=None)],
        )
        return ledger.add(step, {0: "", 1: ""}, lambda _: False)

    assert report(0, 12) == [] and report(0, 14) == []
    done = report(1, 12)
    assert [(a.iteration, a.seconds, a.ranks, a.loss) for a in done] == [(12, 1.0, 2, None)] and not done[0].problems
    assert report(1, 12) == [] and report(1, 15)[0].iteration == 14
    assert report(0, 16, generation=3) == [], "the other has not stepped in this generation"


# ---------------------------------------------------------------- in the controller
USUAL = 0.4


@pytest.fixture
def world():
    """A world of three plain programs that has trained 20 iterations, as their agents report it."""
    made = World()
    for element in range(3):
        agent = PlainAgent(made, "1", element, f"n{element + 1}", nodes=3, min_nodes=2)
        agent.register()
        agent.status()
    made.run(0.3)
    iterate(made, 20)
    return made


def iterate(world: World, iterations: int, slow: int | None = None) -> None:
    """All make so many iterations; the slow one needs half as long again, for which the others wait."""
    for iteration in range(world.job().iteration + 1, world.job().iteration + 1 + iterations):
        took = USUAL if slow is None else 1.5 * USUAL
        world.run(took)
        for agent in world.agents:
            (slot,) = agent.slots
            own = took if slot == slow or slow is None else USUAL
            times = [0.0, own * 0.9, 0.0, took - own * 0.9, 0.0, 0.0]
            agent.report(iteration, RankStep(slot, [0], took, None, None, times))
            agent.set(slot, iteration=iteration + 1, phase="computing", micro_batches=1, idle=0.0, collectives={})


def stand(world: World, seconds: float, **who: dict) -> None:
    """Time passes in which nobody steps; ranks as `s0`, ... say, the others wait in a collective."""
    for _ in range(round(seconds)):
        for agent in world.agents:
            (slot,) = agent.slots
            if agent.ranks[slot].state == "running" and agent.ranks[slot].iteration == world.job().iteration + 1:
                agent.set(slot, **{"phase": "reducing", **who.get(f"s{slot}", {})})
        world.run(1.0)


def idle(seconds: float = 60.0, **more) -> dict:
    return {"phase": "computing", "idle": seconds, "process": "S", **more}


def test_a_plain_program_s_iterations_are_the_job_s(world):
    job = world.job()
    assert job.iteration == 19 and job.loss is None and job.seconds == pytest.approx(USUAL)
    assert not job.ledger_violations and job.goodput == 1.0 and not job.worked, "that it saves anything is not known"


def test_a_rank_that_does_nothing_is_named_and_all_start_again(world, snapshot):
    began = world.now
    stand(world, 6.0, s1=idle())
    (failure,) = world.job().failures
    assert failure.record.slots == [1] and failure.record.cause == "task_hang"
    assert failure.detected_at - began < IDLE_SECONDS + 2.0
    assert failure.record.reason == snapshot
    world.run(3.0)
    assert world.job().phase == "running" and world.job().plan.iteration == 20, "the count goes on"
    assert world.agents[1].ranks[1].incarnation == 1
    iterate(world, 2)
    assert failure.stepped_at is not None and world.job().goodput < 1.0


@pytest.mark.parametrize(
    "told",
    [
        idle(0.0),  # it computes: an evaluation
        idle(waits=True),  # an upload
        {"phase": "stepped", "iteration": 19, "idle": 60.0},  # torch.save
        {"phase": "reducing", "idle": 60.0},  # all wait: a slow network
    ],
)
def test_what_may_be_healthy_goes_on_for_longer(world, told):
    stand(world, 50.0, s1=told)
    assert not world.job().failures
    iterate(world, 3)
    assert world.job().iteration == 22


def test_all_that_wait_in_a_collective_start_again_after_a_while(world, snapshot):
    known = {"collectives": {"0": (9, 8, "gloo:all_reduce")}, "idle": 60.0}
    stand(world, 65.0, s0=known, s1=known, s2=known)
    (failure,) = world.job().failures
    assert failure.record.cause == "nccl_timeout" and failure.record.reason == snapshot


def test_on_a_gpu_the_flight_recorder_says_who_lags(world):
    """Each script is somewhere else in its own code, ahead of its device."""
    done, waits = {"0": (8, 8, "nccl:all_reduce")}, {"0": (9, 8, "nccl:all_reduce")}
    stand(world, 6.0, s0=idle(collectives=waits), s1=idle(collectives=waits), s2=idle(collectives=done))
    assert [failure.record.slots for failure in world.job().failures] == [[2]]


def test_a_program_that_never_steps_is_not_judged():
    made = World()
    agents = [PlainAgent(made, "1", e, f"n{e + 1}", nodes=2, min_nodes=2) for e in range(2)]
    for agent in agents:
        agent.register()
        agent.status()
    made.run(0.3)
    for agent, told in zip(agents, (idle(), {"phase": "reducing"}), strict=True):
        agent.set(agent.slots[0], **told)
    made.run(900.0)
    assert made.job().phase == "running" and not made.job().failures and made.job().iteration == -1


def test_a_slow_rank_is_shown(world):
    iterate(world, 120, slow=2)
    (event,) = [event for event in world.log if event.kind == "degraded"]
    assert event.record.slot == 2 and event.record.slowdown > 1.2
