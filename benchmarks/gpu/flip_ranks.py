"""Train tiny_gpt on the first card of the machine; a fault strikes silently in one rank.

Environment, beside that of ``ranks``:

GPU_STRIKES: the fault, as `unicronctl inject` has it, slot and iteration: "flip:weight:22 1 20"
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

UNICRON_PRELOAD = ("sbatch_templates.gpt_imports",)  # nothing that reads its slot at its import
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.ranks import make  # noqa: E402
from tests.support import fault_points  # noqa: E402
from unicron_detector.chaos.inject import injector  # noqa: E402

FAULT, STRUCK, AT = os.environ.get("GPU_STRIKES", "none -1 -1").split()


def strike_at(made: Any) -> Any:
    """Return a function for each iteration that lets the fault strike in its turn, once in the job."""

    def strike() -> dict[str, Any]:
        mark = fault_points.OUT / "struck"
        if fault_points.SLOT == int(STRUCK) and made.iteration == int(AT) and not mark.exists():
            mark.touch()
            injector.on_order({"fault": FAULT, "seconds": 600.0})
        return {}

    return strike


if __name__ == "__main__":
    session = make()
    fault_points.train(session, strike_at(session))
