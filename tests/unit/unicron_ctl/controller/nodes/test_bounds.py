"""How much may be taken: pure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unicron_ctl.config import ControllerConfig
from unicron_ctl.controller.model.cluster import Mark
from unicron_ctl.controller.nodes.bounds import allowed, left_too_many, too_many

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
