"""What the controller's core costs with 256 agents, in units of a calibration loop of the same run: it may not rot."""

from __future__ import annotations

import pytest

from benchmarks.scale import small

# 1.4 times what was seen, which lay within 10 % of it whatever else the machine did (a load of 10 to 45 on two cores).
MOST = {
    "form": 185.0,
    "steady": 27.5,
    "break": 19.0,
    "plan": 14.5,
    "mass_break": 28.0,
    "mass_plan": 14.5,
    "all_at_once": 230.0,
}


@pytest.fixture(scope="module")
def costs() -> dict[str, float]:
    return small.measure()


@pytest.mark.parametrize("what", MOST)
def test_the_controller_costs_no_more_than_it_did(costs: dict[str, float], what: str) -> None:
    """Defect: a set of all members was made for each agent, and nobody ran the scale benchmark again."""
    assert 0 < costs[what] <= MOST[what], f"rounds of the calibration loop: {costs}"
