"""Replay of failure traces under several policies: what each would have cost."""

from __future__ import annotations

from unicron.planner.simulate.engine import Result
from unicron.planner.simulate.policies import POLICIES, Policy
from unicron.planner.simulate.replay import simulate
from unicron.planner.simulate.trace import Trace, load

__all__ = ["POLICIES", "Policy", "Result", "Trace", "load", "simulate"]
