"""What came of a job's time: trained, lost, and the share that counts."""

from __future__ import annotations

import pytest

from unicron_ctl.controller.job.transitions import _account
from unicron_ctl.controller.model import job_rules
from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.protocol.structs import Settings


def job(mode: str = "restart") -> JobState:
    return JobState("1", Settings(name="a", user="u", mode=mode), 0.0)


def step(
    state: JobState,
    at: float,
    iteration: int,
    generation: int,
    seconds: float = 1.0,
    ago: float = 0.0,
    unsound: float = 0.0,
) -> None:
    counts = {"ranks": 2, "nodes": 0, "train_iterations": 0, "micro_batches": 0, "computed": 0, "unreported": []}
    counts["unsound_seconds"] = unsound
    record = records.Step(iteration=iteration, loss=None, nan_since=-1, seconds=seconds, flops=0.0, ago=ago, **counts)
    job_rules.on_step(state, Event(iteration, at, "1", generation, record), record)


def broken(state: JobState, at: float, repeated: int) -> None:
    record = records.Break(1, [], repeated=repeated)
    job_rules.on_break(state, Event(99, at, "1", 1, record), record)


def test_all_time_between_steps_is_trained_and_between_generations_one_iteration_is(snapshot):
    state = job()
    assert state.goodput is None and _account(state) == ""
    for iteration in range(10):
        step(state, 100.0 + iteration, iteration, 1)
    assert (state.trained_seconds, state.lost_seconds, state.goodput) == (10.0, 0.0, 1.0)
    step(state, 140.0, 10, 1)  # an evaluation is no loss
    assert (state.trained_seconds, state.lost_seconds) == (41.0, 0.0)
    step(state, 150.0, 11, 2, seconds=9.5)  # the first of new processes, which counts their start
    assert (state.trained_seconds, state.lost_seconds) == (42.0, 9.0)
    assert _account(state) == snapshot


def test_iterations_that_are_made_again_are_lost():
    state = job()
    for iteration in range(10):
        step(state, 100.0 + iteration, iteration, 1)
    broken(state, 110.0, repeated=4)
    assert (state.trained_seconds, state.lost_seconds) == (6.0, 4.0)
    broken(state, 110.5, repeated=50)
    assert state.trained_seconds == pytest.approx(0.0), "never more than there was"


def test_iterations_that_were_made_while_the_controller_was_away_count():
    """Defect: a world that began, trained and broke without a controller counted for nothing, nor did the time lost."""
    state = job()
    step(state, 300.0, 169, 1, ago=46.0)
    assert (state.iteration, state.trained_seconds, state.lost_seconds) == (169, 170.0, 0.0)
    step(state, 301.0, 170, 2)
    assert (state.trained_seconds, state.lost_seconds) == (171.0, 46.0)
    state = job("session")
    step(state, 300.0, 169, 1)
    assert state.trained_seconds == 1.0, "it goes on from a checkpoint"


def test_what_failures_cost_before_the_first_step_is_lost():
    """Defect: a job that stood two minutes for lost nodes before it made a step had a goodput of 100 %."""
    state = job()
    words = {"cause": "lost_connection", "action": "isolate", "detected_by": "lease", "source": "controller"}
    record = records.FailureDetected(kind_of_failure="node", slots=[1], severity=1, **words)
    job_rules.on_failure_detected(state, Event(1, 100.0, "1", 1, record), record)
    step(state, 223.0, 0, 2)
    assert (state.trained_seconds, state.lost_seconds) == (1.0, 122.0)


def test_iterations_without_a_finite_loss_are_lost_and_no_time_counts_twice():
    state = job("session")
    for iteration in range(10):
        step(state, 100.0 + iteration, iteration, 1, unsound=max(0.0, iteration - 5.0))
    assert (state.trained_seconds, state.all_lost_seconds, state.goodput) == (6.0, 4.0, 0.6)
    step(state, 120.0, 10, 2, unsound=4.0)
    assert (state.trained_seconds, state.all_lost_seconds) == (7.0, 14.0)


def test_the_log_may_lose_the_steps_in_between():
    whole, thin = job(), job()
    for iteration in range(30):
        step(whole, 100.0 + iteration * 1.5, iteration, 1, 1.5)
        if iteration < 2 or iteration > 18:
            step(thin, 100.0 + iteration * 1.5, iteration, 1, 1.5)
    assert whole.trained_seconds == thin.trained_seconds == 45.0 and whole.lost_seconds == thin.lost_seconds == 0.0
