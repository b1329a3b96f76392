"""Neither a controller nor an agent dies of what it is sent; `python -m benchmarks.cases hostile` sends a thousand."""

from __future__ import annotations

import pytest

from benchmarks.cases.hostile import attack

pytestmark = pytest.mark.process


def test_hostile_messages_change_nothing():
    outcome = attack(200)
    assert outcome.controller_alive and outcome.same_generation and outcome.failures == 0
    assert outcome.agent_alive and outcome.statuses >= 3
