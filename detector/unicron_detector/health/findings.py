"""Findings of a check about a node."""

from __future__ import annotations

from dataclasses import dataclass, field

GOOD, WARNING, UNKNOWN, BAD = "good", "warning", "unknown", "bad"


@dataclass(frozen=True)
class Finding:
    """One check's answer. verdict: see :mod:`unicron_detector.health.checks`."""

    verdict: str
    reason: str
    values: dict[str, object] = field(default_factory=dict)
