"""Replay of failure traces under several policies: what each would have cost."""

from __future__ import annotations

from unicron_planner.simulate.engine import Result
from unicron_planner.simulate.policies import POLICIES, Policy
from unicron_planner.simulate.replay import simulate
from unicron_planner.simulate.trace import Trace, load

__all__ = ["POLICIES", "Policy", "Result", "Trace", "load", "simulate"]
