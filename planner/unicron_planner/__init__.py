"""Planning: which job runs on how many nodes, computed ahead of the failure; and a simulator on the same code.

Pure: standard library and numpy only, no I/O but files given to it.
"""

from __future__ import annotations

from unicron_planner.problem.objective import Job, PlanError, Scenario
from unicron_planner.solver.plan import Plan
from unicron_planner.solver.solve import solve

__all__ = ["Job", "Plan", "PlanError", "Scenario", "solve"]
