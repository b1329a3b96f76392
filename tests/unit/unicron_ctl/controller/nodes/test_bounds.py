"""How much may be taken: pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from tests.support.world import World
from unicron.ctl.controller.model.cluster_state import Mark, Take
from unicron.ctl.controller.model.requests import Action
from unicron.ctl.controller.model.view import Outcome
from unicron.ctl.controller.nodes.bounds import allowed, left_too_many, too_many, within
from unicron.ctl.settings.config import ControllerConfig

CONFIG = ControllerConfig()
HOUR = CONFIG.isolation_window_seconds


def test_the_limits_by_default():
    assert [allowed(CONFIG, count) for count in (0, 5, 40, 59, 100)] == [4, 4, 4, 5, 10] and HOUR == 3600.0


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 12000), max_size=8), st.integers(1, 200))
def test_never_more_than_allowed_within_any_window(times, size):
    """Whatever is asked for and when: no window ever holds more nodes than are allowed."""
    isolated: dict[str, Mark] = {}
    for node, at in sorted(times.items(), key=lambda item: item[1]):
        if not too_many(node, isolated, size, CONFIG, at, "DOWN"):
            isolated[node] = Mark(at, str(len(isolated)))
    for item in isolated.values():
        window = [other for other in isolated.values() if 0 <= item.at - other.at < HOUR]
        assert len(window) <= allowed(CONFIG, size)


def test_half_of_a_job_at_most():
    assert not left_too_many("1", ["a"], ["b", "c", "d"], "b", CONFIG)
    why = left_too_many("1", ["a", "b"], ["c", "d"], "c", CONFIG)
    assert "job 1 has left a, b within" in why and "no more than 2 of its 4" in why
    assert not left_too_many("1", [], ["z"], "z", CONFIG), "one is always allowed"
    assert not left_too_many("1", ["z"], ["y"], "z", CONFIG), "the same node again"


class Counted(deque[Take]):
    """It counts how many of it are looked at."""

    looked = 0

    def __reversed__(self) -> Iterator[Take]:  # type: ignore[override]
        for take in super().__reversed__():
            self.looked += 1
            yield take


def test_what_was_taken_before_is_counted_once_however_much_is_asked():
    world = World()
    at = world.now
    world.core.state.taken = taken = Counted([Take(at, "hold", "1", e) for e in range(55)])
    taken.extend(Take(at, "requeue", "1", e) for e in range(5))
    world.core.configure(ControllerConfig(max_holds_per_minute=60, max_requeues_per_job=8), world.core.classifier)
    asked = [Action(name, "1", e, "", "") for e in range(100, 2100) for name in ("hold", "requeue", "pin")]
    out = Outcome()
    kept = [action.action for action in within(world.core.view, asked, out)]
    assert {name: kept.count(name) for name in ("hold", "requeue", "pin")} == {"hold": 5, "requeue": 3, "pin": 2000}
    assert taken.looked == len(taken) and len(out.records) == 2
