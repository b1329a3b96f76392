"""Replay of failure traces under several policies: what each would have cost."""

from __future__ import annotations

from dataclasses import replace

from unicron_planner.problem.objective import Scenario
from unicron_planner.simulate.clairvoyant import bound
from unicron_planner.simulate.engine import Result, Simulation
from unicron_planner.simulate.policies import BOUND, POLICIES, Policy
from unicron_planner.simulate.trace import Trace, load

__all__ = ["POLICIES", "Policy", "Result", "Trace", "load", "simulate"]


def simulate(scenario: Scenario, trace: Trace, policy: Policy) -> Result:
    """The Result of one policy on one trace; the same input always gives the same result. Raises PlanError.

    All jobs are taken for one owner's: policies are compared by the weighted FLOP/s of the whole cluster.
    """
    scenario = replace(scenario, jobs=tuple(replace(job, owner="") for job in scenario.jobs))
    if policy.placement != BOUND:
        return Simulation(scenario, trace, policy).run()
    reached = Simulation(scenario, trace, POLICIES["unicron"]).run()
    return bound(scenario, trace, policy, reached.mean_waf)
