"""Admission checks of a node: quick, time-boxed, each with a kill-switch, "bad" only on proof."""

from unicron.detector.health.checks import CHECKS, Settings
from unicron.detector.health.runner import Report, Result, load_settings, run

__all__ = ["CHECKS", "Report", "Result", "Settings", "load_settings", "run"]
