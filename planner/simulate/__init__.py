"""Replay of failure traces under several policies: what each would have cost."""

from __future__ import annotations

from planner.simulate.engine import Result
from planner.simulate.policies import POLICIES, Policy
from planner.simulate.replay import simulate
from planner.simulate.trace import Trace, load

__all__ = ["POLICIES", "Policy", "Result", "Trace", "load", "simulate"]
