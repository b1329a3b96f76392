"""Neither a controller nor an agent dies of what it is sent; the whole thousand is `python -m benchmarks.detection`."""

from __future__ import annotations

import pytest

from benchmarks.detection.__main__ import attack

pytestmark = pytest.mark.process


def test_hostile_messages_change_nothing():
    done = attack(200)
    assert done["controller"] == {"alive": True, "same_generation": True, "failures": 0}
    assert done["agent"]["alive"] and done["agent"]["statuses_afterwards"] >= 3
