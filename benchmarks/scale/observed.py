"""``python -m benchmarks.scale.observed OBSERVED.json unicrond's options``: a real unicrond whose parts are timed, on
a simulated Slurm.

OBSERVED.json has nodes, elements, port, simulator (:class:`benchmarks.scale.slurm.LiveSlurm`), speed, and `figures`,
the file into which the seconds of each call of each part are written at the end.

Rules that compare failures with each other (how many nodes say the same within 30 s, whether a fault comes back
within 30 min) are for a job's real rate of failures: their windows are shortened as the trace is. Time-outs, leases
and periods stay what they are.
"""

from __future__ import annotations

import json
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.scale.slurm import LiveSlurm
from unicron_ctl.controller import unicrond
from unicron_ctl.controller.core import core
from unicron_ctl.controller.model import view
from unicron_ctl.controller.server import server
from unicron_detector.failures.fault_history import Policy

WINDOWS = (
    "window",
    "storage_patience",
    "flap_window",
    "shared_seconds",
)  # of unicron_detector.failures.fault_history.Policy
PARTS = ("turn", "fold", "flush", "plan", "listing", "message")


def timed(call: Callable[..., Any], times: array[float]) -> Callable[..., Any]:
    """Return the same function, which notes how long each call took."""

    def wrapped(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            times.append(time.perf_counter() - began)

    return wrapped


def compressed(policy: Policy, speed: float) -> Policy:
    """With windows for a trace that is `speed` times as fast."""
    return replace(policy, **{name: getattr(policy, name) / speed for name in WINDOWS})


def observe(options: dict[str, Any]) -> dict[str, array[float]]:
    """Puts clocks around the controller's parts: one job's turn, one record's fold, one flush of the log and the
    outbox, one decision of the planner (its inputs included), all that follows from a listing, one message."""
    times = {name: array("d") for name in PARTS}
    core.fold = timed(core.fold, times["fold"])  # type: ignore[attr-defined]
    core.replan = timed(core.replan, times["plan"])  # type: ignore[attr-defined]
    core.Turns.advance = timed(core.Turns.advance, times["turn"])  # type: ignore[attr-defined]
    core.Core.on_listing = timed(core.Core.on_listing, times["listing"])
    core.Core.receive = timed(core.Core.receive, times["message"])
    server.Server.flush = timed(server.Server.flush, times["flush"])
    view.SUSPECT_SECONDS /= options["speed"]
    begin = server.Server.__init__

    def compressing(self: server.Server, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        history = self.core.state.history
        history.policy = compressed(history.policy, options["speed"])

    server.Server.__init__ = compressing
    return times


def run() -> None:
    """Raises SystemExit with unicrond's status."""
    options = json.loads(Path(sys.argv.pop(1)).read_text())
    times = observe(options)
    slurm = LiveSlurm(options["nodes"], options["elements"], options["port"], options["simulator"])
    unicrond.slurm_client = lambda config: slurm
    try:
        unicrond.main()
    finally:
        Path(options["figures"]).write_text(json.dumps({name: list(found) for name, found in times.items()}))


if __name__ == "__main__":
    run()
