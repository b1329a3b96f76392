"""``python -m benchmarks.scale.observed OBSERVED.json OPTION...``: unicrond on a simulated Slurm, with its parts timed.

OBSERVED.json has the arguments of :class:`benchmarks.scale.slurm.LiveSlurm`, `speed`, and `figures`: a file that gets
the seconds of each call of each part. Rules that compare failures with each other look back a shorter time, by the
factor `speed`; time-outs, leases and periods stay as they are.
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

WINDOWS = ("window", "storage_patience", "flap_window", "shared_seconds")  # fields of Policy
PARTS = {
    "turn": "one job's turn: sense, judge, decide, act",
    "fold": "one record folded into the state",
    "flush": "log written, outbox sent",
    "plan": "the planner's decision, its inputs included",
    "listing": "all that follows from a listing of Slurm",
    "message": "one message of an agent",
}


def timed(call: Callable[..., Any], times: array[float]) -> Callable[..., Any]:
    """Return the same function, which adds the seconds of each call to `times`."""

    def wrapped(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            times.append(time.perf_counter() - began)

    return wrapped


def compressed(policy: Policy, speed: float) -> Policy:
    """Return the policy for a trace that is `speed` times as fast."""
    return replace(policy, **{name: getattr(policy, name) / speed for name in WINDOWS})


def observe(speed: float) -> dict[str, array[float]]:
    """Time the controller's parts and shorten its policy's windows. Return the times by part."""
    times = {name: array("d") for name in PARTS}
    core.fold = timed(core.fold, times["fold"])  # type: ignore[attr-defined]
    core.replan = timed(core.replan, times["plan"])  # type: ignore[attr-defined]
    core.Turns.advance = timed(core.Turns.advance, times["turn"])  # type: ignore[attr-defined]
    core.Core.on_listing = timed(core.Core.on_listing, times["listing"])
    core.Core.receive = timed(core.Core.receive, times["message"])
    server.Server.flush = timed(server.Server.flush, times["flush"])
    view.SUSPECT_SECONDS /= speed
    begin = server.Server.__init__

    def compressing(self: server.Server, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        self.core.state.history.policy = compressed(self.core.state.history.policy, speed)

    server.Server.__init__ = compressing
    return times


def run() -> None:
    """Raises SystemExit with unicrond's status."""
    options = json.loads(Path(sys.argv.pop(1)).read_text())
    times, figures = observe(options.pop("speed")), Path(options.pop("figures"))
    slurm = LiveSlurm(**options)
    unicrond.slurm_client = lambda config: slurm
    try:
        unicrond.main()
    finally:
        figures.write_text(json.dumps({name: list(found) for name, found in times.items()}))


if __name__ == "__main__":
    run()
