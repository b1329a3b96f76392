"""One policy on one trace: replayed, or for `clairvoyant` bounded."""

from __future__ import annotations

from planner.model import Scenario
from planner.simulate.clairvoyant import bound
from planner.simulate.engine import Result, Simulation
from planner.simulate.policies import BOUND, POLICIES, Policy
from planner.simulate.trace import Trace


def simulate(scenario: Scenario, trace: Trace, policy: Policy) -> Result:
    """The Result of one policy on one trace; the same input always gives the same result. Raises PlanError."""
    if policy.placement != BOUND:
        return Simulation(scenario, trace, policy).run()
    reached = Simulation(scenario, trace, POLICIES["unicron"]).run()
    return bound(scenario, trace, policy, reached.mean_waf)
