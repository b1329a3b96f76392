"""Time-outs of a rank that the rules of `unicron_ctl.shared.settings.limits` tie to settings."""

from __future__ import annotations

PLAN_TIMEOUT = 900.0  # that a stopped rank waits for a plan; then it saves its state and its process ends
COLLECTIVE_TIMEOUT = 1800.0  # of a collective in training: torch's default; a hang is found long before
