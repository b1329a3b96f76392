"""The finding of a check about a node, and its verdicts (:mod:`unicron_detector.health.checks` says what they mean)."""

from __future__ import annotations

from dataclasses import dataclass, field

GOOD, WARNING, UNKNOWN, BAD = "good", "warning", "unknown", "bad"


@dataclass(frozen=True)
class Finding:
    """One check's answer."""

    verdict: str  # one of those above
    reason: str
    values: dict[str, object] = field(default_factory=dict)
