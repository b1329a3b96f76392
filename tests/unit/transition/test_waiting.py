"""When a wait for a message is given up: some time after its connection was cut, and not while it is whole."""

from __future__ import annotations

import pytest

from unicron.transition.generations import waiting


@pytest.mark.parametrize(
    ("looks", "over"),
    [
        ([(0.0, False), (9.0, False)], False),
        ([(0.0, True), (0.2, True)], False),
        ([(0.0, True), (0.31, True)], True),
        ([(0.0, True), (0.2, False), (0.4, True)], False),
        ([(5.0, False), (6.0, True), (6.4, True)], True),
    ],
)
def test_it_is_over_when_the_connections_have_been_cut_for_a_while(monkeypatch, looks, over):
    clock = iter([now for now, _ in looks])
    monkeypatch.setattr(waiting.time, "monotonic", lambda: next(clock))
    cuts = iter([cut for _, cut in looks])
    found = waiting._Over(lambda: next(cuts))
    assert [found() for _ in looks][-1] == over
