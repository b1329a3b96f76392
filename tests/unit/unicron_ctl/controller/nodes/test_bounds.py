"""Limits on what is taken: pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.clock import START
from tests.support.world import World
from unicron_ctl.controller.model.cluster_state import REQUEUES, Mark, Take
from unicron_ctl.controller.model.requests import Action
from unicron_ctl.controller.model.view import Outcome
from unicron_ctl.controller.nodes.bounds import Bounds, left_too_many, most_isolated, too_many, within_limits
from unicron_ctl.shared.settings.config import ControllerConfig

CONFIG = ControllerConfig()
HOUR = CONFIG.isolation_window_seconds


def test_the_limits_by_default():
    assert [most_isolated(CONFIG, count) for count in (0, 5, 40, 59, 100)] == [4, 4, 4, 5, 10] and HOUR == 3600.0


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 12000), max_size=8), st.integers(1, 200))
def test_never_more_than_allowed_within_any_window(times, size):
    """Whatever is asked for and when: no window ever holds more nodes than are allowed."""
    isolated: dict[str, Mark] = {}
    for node, at in sorted(times.items(), key=lambda item: item[1]):
        if not too_many(node, isolated, size, CONFIG, at, "DOWN"):
            isolated[node] = Mark(at, str(len(isolated)))
    for item in isolated.values():
        window = [other for other in isolated.values() if 0 <= item.at - other.at < HOUR]
        assert len(window) <= most_isolated(CONFIG, size)


def test_both_sides_of_the_window_count(snapshot):
    """The clock is at a real date, so that a window that reaches to 1970 shows."""
    isolated = {f"n{i}": Mark(START - HOUR + 1.0, str(i)) for i in range(4)}
    why = too_many("n9", isolated, 10, CONFIG, START, "DOWN")
    assert why == snapshot
    assert too_many("n9", isolated, 10, CONFIG, START + 1.0, "DOWN") == "", "they are out of the window"
    assert too_many("n1", isolated, 10, CONFIG, START, "DOWN") == "", "it is taken out already"
    many = {f"n{i}": Mark(START, str(i)) for i in range(9)}
    assert "n7, ... were" in too_many("x", many, 10, CONFIG, START, "DOWN")
    eight = {f"n{i}": Mark(START, str(i)) for i in range(8)}
    assert "n7 were" in too_many("x", eight, 10, CONFIG, START, "DOWN")
    one = ControllerConfig(max_isolated_nodes=1, max_isolated_share=0.0)
    assert too_many("x", {"n0": Mark(START, "0")}, 10, one, START, "DOWN").startswith("n0 was taken out")


@pytest.mark.by_hand
def test_requeues_count_within_their_windows():
    """A job's requeues for an hour, those of all jobs for a minute."""

    def refused(ages: list[float], job: str, **limits: int) -> bool:
        world = World()
        config = ControllerConfig(**{"max_requeues_per_job": 2, "max_requeues_per_minute": 2, **limits})
        world.core.configure(config, world.core.classifier)
        world.core.state.taken.extend(Take(world.now - age, "requeue", "1", 0) for age in ages)
        return bool(Bounds(world.core.view).refuse(Action("requeue", job, 1, "", "")))

    assert refused([3599.0, 3598.0], "1") and not refused([3600.0, 3598.0], "1") and not refused([3599.0], "1")
    assert not refused([3599.0, 3598.0], "2"), "that job has had none"
    assert refused([], "2", max_requeues_per_job=0)
    assert refused([59.0, 58.0], "2") and not refused([60.0, 58.0], "2")
    assert refused([59.0, 58.0, 57.0], "2", max_requeues_per_minute=3)
    short = ControllerConfig(isolation_window_seconds=30.0, max_requeues_per_job=1, max_requeues_per_minute=1)
    world = World()
    world.core.configure(short, world.core.classifier)
    world.core.state.taken.append(Take(world.now - 40.0, "requeue", "1", 0))
    bounds = Bounds(world.core.view)
    assert bounds._of_job("1") == "", "its window is shorter than a minute"
    assert "1 element was requeued within 60 s" in bounds._of_all(REQUEUES, "max_requeues_per_minute")
    world.core.state.taken[0] = Take(world.now - 30.0, "requeue", "1", 0)
    assert Bounds(world.core.view)._of_job("1") == ""
    world.core.state.taken[0] = Take(world.now - 29.0, "requeue", "1", 0)
    assert Bounds(world.core.view)._of_job("1")


@pytest.mark.by_hand
def test_a_refusal_is_recorded_once_a_minute():
    world = World()
    world.core.configure(ControllerConfig(max_holds_per_minute=1), world.core.classifier)
    asked = [Action("hold", "1", e, "", "") for e in range(3)]

    def refusals_recorded() -> int:
        out = Outcome()
        kept = within_limits(world.core.view, asked, out)
        assert len(kept) == 1
        assert all(generation == 0 and "1 element was held" in record.reason for _, generation, record in out.records)
        return len(out.records)

    assert refusals_recorded() == 1
    world.core.state.withheld_takes["hold 1"] = Mark(world.now - 59.0, "why")
    assert refusals_recorded() == 0
    world.core.state.withheld_takes["hold 1"] = Mark(world.now - 60.0, "why")
    assert refusals_recorded() == 1


def test_what_was_to_start_on_a_node_falls_with_the_element_that_stays():
    world = World()
    world.core.configure(ControllerConfig(max_holds_per_minute=1), world.core.classifier)
    asked = [
        Action("hold", "1", 0, "n1", ""),
        Action("hold", "1", 1, "n2", ""),
        Action("pin", "2", 0, "n1", ""),
        Action("pin", "2", 1, "n2", ""),
        Action("pin", "2", 2, "", ""),
    ]
    kept = [(action.action, action.element) for action in within_limits(world.core.view, asked, Outcome())]
    assert kept == [("hold", 0), ("pin", 0), ("pin", 2)]


def test_half_of_a_job_at_most(snapshot):
    assert not left_too_many("1", ["a"], ["b", "c", "d"], "b", CONFIG)
    why = left_too_many("1", ["a", "b"], ["c", "d"], "c", CONFIG)
    assert why == snapshot
    assert not left_too_many("1", [], ["z"], "z", CONFIG), "one is always allowed"
    assert left_too_many("1", ["a"], ["b"], "c", CONFIG), "and two of three are more than half"
    assert not left_too_many("1", ["z"], ["y"], "z", CONFIG), "the same node again"
    assert "left a, b, c, d, e, f, g, h within" in left_too_many("1", list("abcdefghi"), ["x"], "y", CONFIG)


class CountingTakes(deque[Take]):
    """Counts how many of its items are looked at."""

    looked = 0

    def __reversed__(self) -> Iterator[Take]:  # type: ignore[override]
        for take in super().__reversed__():
            self.looked += 1
            yield take


@pytest.mark.by_hand
def test_what_was_taken_before_is_counted_once_however_much_is_asked():
    world = World()
    at = world.now
    world.core.state.taken = taken = CountingTakes([Take(at, "hold", "1", e) for e in range(55)])
    taken.extend(Take(at, "requeue", "1", e) for e in range(5))
    world.core.configure(ControllerConfig(max_holds_per_minute=60, max_requeues_per_job=8), world.core.classifier)
    asked = [Action(name, "1", e, "", "") for e in range(100, 2100) for name in ("hold", "requeue", "pin")]
    out = Outcome()
    kept = [action.action for action in within_limits(world.core.view, asked, out)]
    assert {name: kept.count(name) for name in ("hold", "requeue", "pin")} == {"hold": 5, "requeue": 3, "pin": 2000}
    assert taken.looked == len(taken) and len(out.records) == 2
