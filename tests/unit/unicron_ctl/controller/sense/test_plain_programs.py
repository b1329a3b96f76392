"""Iterations of plain programs: what their ranks' own code may take, and who is named."""

from __future__ import annotations

import pytest

from tests.support.habits import STEP, gaps
from unicron.ctl.controller.job.job_ledger import PlainSteps
from unicron.ctl.controller.sense.patience import IDLE_SECONDS, Patience
from unicron.ctl.protocol.structs import RankStatus, RankStep, StepReport
from unicron.ctl.settings.config import ControllerConfig
from unicron.detector.iterations.culprit import all_wait, lagging
from unicron.detector.iterations.iteration_monitor import IterationMonitor, Limits

CONFIG = ControllerConfig()


def status(idle: float, waits: bool = False, phase: str = "computing", process: str = "S") -> RankStatus:
    return RankStatus(state="running", phase=phase, process=process, idle=idle, waits=waits)


def limit(patience: Patience, waited: float, told: RankStatus, learned: bool = True, starts: bool = False) -> float:
    return patience.own_code(told, waited, 1.0, learned, starts, CONFIG)[0]


def test_a_process_that_does_nothing_is_waited_for_by_the_job_s_own_habits():
    patience = Patience()
    assert limit(patience, 4.0, status(4.0)) == IDLE_SECONDS
    patience.on_outside({0: 2.0, 1: 0.1})
    assert limit(patience, 4.0, status(4.0)) == 6.0, "3x the longest of any rank"
    assert limit(patience, 900.0, status(900.0), learned=False) == CONFIG.hang_outside_seconds
    patience.on_outside({0: 1000.0})
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
    """How often a healthy program would have been taken for stuck."""
    monitor, patience, found = IterationMonitor(Limits(floor=CONFIG.hang_floor_seconds)), Patience(), 0
    for gap in gaps(steps, seed):
        inside = monitor.limit() or CONFIG.first_iteration_seconds
        told = status(gap.seconds if gap.idle else 0.0, gap.waits, "stepped" if gap.saves else "computing")
        most, _ = patience.own_code(told, gap.seconds, inside, monitor.learned, False, CONFIG)
        found += gap.seconds >= most
        monitor.observe(gap.seconds)
        if not monitor.warming:
            patience.on_outside({0: gap.seconds})
    return found


def test_healthy_steps_raise_no_alarm():
    assert sum(alarms(10_000, seed) for seed in range(20)) == 0, "200,000 steps"


def test_the_same_program_s_hang_is_found():
    """After 100 steps without any event, which is as little as it may know."""
    monitor, patience = IterationMonitor(Limits(floor=CONFIG.hang_floor_seconds)), Patience()
    for _ in range(100):
        monitor.observe(STEP)
        patience.on_outside({0: STEP})
    assert patience.own_code(status(3.5), 3.5, monitor.limit(), True, False, CONFIG)[0] == IDLE_SECONDS


# ---------------------------------------------------------------- who is named
def test_who_has_not_begun_the_collective_in_which_the_others_wait():
    waits, behind = {"0": (66, 65, "gloo:all_reduce [[9]]")}, {"0": (65, 65, "gloo:all_reduce [[1]]")}
    found = lagging({0: waits, 1: behind, 2: waits})
    assert [each.slot for each in found] == [1]
    assert found[0].reason == (
        "slot 1 has not begun collective 66 of group 0 (gloo:all_reduce [[9]]), in which 2 others wait"
    )
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
        step = StepReport(
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
