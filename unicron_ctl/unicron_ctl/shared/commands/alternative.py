"""The planner's choice for one job, for `unicronctl explain` and the page."""

from __future__ import annotations

from typing import Any


def alternative(scenario: Any, job: str) -> Any:
    """The planner's choice for the job at present and its second choice; None where it has none."""
    from unicron_planner.problem.objective import PlanError
    from unicron_planner.problem.scenario import from_dict
    from unicron_planner.solver.explain import explain

    try:
        return explain(from_dict(scenario), job).to_dict()
    except PlanError:  # the job has no nodes and no throughput yet
        return None
