"""How far a loss is from that of an undisturbed run."""

from __future__ import annotations

import math


def relative_difference(loss: float, reference: float) -> float:
    """Relative, absolute where the reference is 0; infinite where one of the two is no finite number, for that is near
    nothing."""
    found = abs(loss - reference) / (abs(reference) or 1.0)
    return found if math.isfinite(found) else math.inf
