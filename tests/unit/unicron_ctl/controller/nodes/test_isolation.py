"""How many nodes may be set down within the window: pure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unicron_ctl.config import ControllerConfig
from unicron_ctl.controller.model.cluster import Mark
from unicron_ctl.controller.nodes.isolation import allowed, withheld

CONFIG = ControllerConfig()


def test_the_limits_by_default():
    assert [allowed(CONFIG, count) for count in (0, 5, 20, 39, 100)] == [2, 2, 2, 3, 10]


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 2000), max_size=8), st.integers(1, 200))
def test_never_more_than_allowed_within_any_window(times, size):
    """Whatever is asked for and when: no window ever holds more nodes than are allowed."""
    isolated: dict[str, Mark] = {}
    for node, at in sorted(times.items(), key=lambda item: item[1]):
        if not withheld(node, isolated, size, "1", [], CONFIG, at):
            isolated[node] = Mark(at, str(len(isolated)))
    for item in isolated.values():
        window = [other for other in isolated.values() if 0 <= item.at - other.at < 600]
        assert len(window) <= allowed(CONFIG, size)


def test_half_of_a_job_at_most():
    isolated = {"a": Mark(0.0, "1"), "x": Mark(0.0, "2")}
    config = ControllerConfig(max_isolated_nodes=9)
    assert not withheld("b", isolated, 9, "1", ["b", "c", "d"], config, 1.0)
    isolated["b"] = Mark(1.0, "1")
    why = withheld("c", isolated, 9, "1", ["c", "d"], config, 2.0)
    assert "of job 1, a, b were set down" in why and "no more than 2 of its 4" in why
    assert not withheld("c", isolated, 9, "1", ["c", "d"], config, 602.0)
    assert not withheld("z", {}, 1, "1", ["z"], config, 0.0), "one is always allowed"
