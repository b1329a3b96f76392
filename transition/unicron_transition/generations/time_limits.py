"""Time-outs of a rank that the rules of `unicron_ctl.shared.settings.limits` tie to settings."""

from __future__ import annotations

PLAN_TIMEOUT = 900.0  # a stopped rank waits this long for a plan; then it saves its state and ends
COLLECTIVE_TIMEOUT = 1800.0  # torch's default for a collective; a hang is found long before
