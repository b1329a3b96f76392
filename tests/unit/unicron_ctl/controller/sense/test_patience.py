"""Time limits of an iteration, and of the script's own code between two, before anybody acts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unicron_ctl.controller.sense.patience import OUTSIDE_LEARNED, Patience
from unicron_ctl.shared.protocol.structs import RankStatus
from unicron_ctl.shared.settings.config import ControllerConfig

CONFIG = ControllerConfig(hang_floor_seconds=1.0)


def habits(*early: float, warm_up: float = 0.0, regrouped: float = 0.0, outside: float | None = None) -> Patience:
    patience = Patience()
    for seconds in early:
        patience.on_iteration(seconds, learned=False, warm_up=False)
    if warm_up:
        patience.on_iteration(warm_up, learned=True, warm_up=True)
    if regrouped:
        patience.on_iteration(regrouped, learned=True, warm_up=True, newcomers=False)
    for _ in range(OUTSIDE_LEARNED if outside is not None else 0):
        patience.on_outside([1], outside)
    return patience


def test_before_the_usual_time_is_known():
    assert habits().warm_up(0.0, CONFIG) == 600.0, "first_iteration_seconds"
    assert habits(0.2).warm_up(0.0, CONFIG) == 10.0, "10x the floor"
    assert habits(4.0, 4.0, 4.0).warm_up(0.0, CONFIG) == 40.0, "10x what was seen"
    assert habits(90.0, 2.0, 2.0).warm_up(0.0, CONFIG) == 270.0, "3x the longest"
    assert habits(100.0).warm_up(0.0, CONFIG) == 600.0, "never 10x a long one alone"
    assert habits(1000.0).warm_up(0.0, CONFIG) == 3000.0


def test_after_a_recovery_or_at_a_new_size():
    assert habits(2.0).warm_up(2.0, CONFIG) == 6.0, "three iterations, as always"
    assert habits(0.2).warm_up(0.2, CONFIG) == 3.0, "of the floor, at least"
    assert habits(2.0, warm_up=80.0).warm_up(2.0, CONFIG) == 6.0, "who did not start anew does not compile"
    assert habits(2.0, regrouped=5.0).warm_up(2.0, CONFIG) == 15.0, "as long as it took before"


def test_a_newcomer_compiles_as_the_first_ones_did():
    assert habits(2.0, warm_up=80.0, regrouped=5.0).newcomer(6.0, CONFIG) == 240.0
    assert habits(2.0, warm_up=1.0).newcomer(6.0, CONFIG) == 6.0
    assert habits(2.0).newcomer(6.0, CONFIG) == 600.0, "after a restart of the controller nothing is known of it"


def between(patience: Patience, waited: float, **process) -> float:
    status = RankStatus(state="running", phase="stepped", **process)
    return patience.between(1, status, waited, 3.0, CONFIG)[0]


def test_between_two_iterations():
    idle = {"process": "S", "idle": 50.0}
    assert between(habits(outside=0.1), 50.0, **idle) == 60.0, "hang_idle_seconds"
    assert between(habits(outside=50.0), 50.0, **idle) == 150.0
    assert between(habits(outside=400.0), 50.0, **idle) == 600.0
    assert between(habits(), 50.0, **idle) == 600.0, "nothing is known yet"
    assert between(habits(outside=0.1), 50.0, process="S", idle=20.0) == 600.0, "it did something meanwhile"
    assert between(habits(outside=0.1), 50.0) == 600.0, "an agent that does not say"
    assert between(habits(), 0.0, process="T") == 3.0


@given(st.lists(st.floats(0.0, 1e6), max_size=20), st.floats(0.0, 1e5), st.sampled_from("RSDTZ"), st.floats(0.0, 1e6))
def test_no_history_makes_anybody_impatient(early, usual, state, idle):
    patience = habits(*early)
    least = max(3.0 * usual, (3.0 if usual else 10.0) * CONFIG.hang_floor_seconds)
    assert patience.warm_up(usual, CONFIG) >= least and patience.newcomer(least, CONFIG) >= least
    status = RankStatus(state="running", process=state, idle=idle)
    limit, why = patience.between(0, status, 10.0, 5.0, CONFIG)
    assert limit >= 5.0 and bool(why) == (state == "T")


@given(st.floats())
def test_strange_times_are_not_learned(seconds):
    patience = Patience()
    patience.on_outside([0], seconds)
    assert 0.0 <= patience.longest_outside < float("inf")
