"""Admission checks of a node: quick, time-boxed, each with a kill-switch, "bad" only on proof."""

from unicron.detector.health.checks import CHECKS, HealthConfig, Settings, checks_of
from unicron.detector.health.runner import Report, Result, run

__all__ = ["CHECKS", "HealthConfig", "Report", "Result", "Settings", "checks_of", "run"]
