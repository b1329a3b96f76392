"""From a fault to its classified event at the controller: a lost agent, an exit, an exception, a hang.

The unicrond (without Slurm), agents and ranks are real. The time runs from just before the fault's system call to the
time of the event `failure_detected`, by the same clock.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.report import Report
from tests.support.jobs import FOREVER, World


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    rounds: int = 5
    """Faults of each kind, all in one job."""


SMALLEST = Sizes(1)
GOALS = {
    "lost agent": 2.0,
    "process exit": 0.1,
    "exception": 0.1,
    "hang": None,
}  # a hang: by the iteration
SETTINGS = "allow_inject = true\nhang_floor_seconds = 0.25\nheartbeat_period = 1.0\nlease_periods = 1.8\n"
NODES, LEARNED = 2, 13  # iterations until a deadline is known


@dataclass(frozen=True)
class Detection:
    """One fault in slot 1, and its event."""

    seconds: float
    usual: float
    """Seconds of an iteration before the fault."""
    cause: str
    right_rank: bool


def measure(sizes: Sizes, report: Report) -> None:
    """Inject the faults by turns."""
    found: dict[str, list[Detection]] = {name: [] for name in GOALS}
    settings = {"TINY_ITERATIONS": FOREVER, "TINY_SLOW": "0.02"}
    with tempfile.TemporaryDirectory() as folder, World(Path(folder), NODES, SETTINGS, **settings) as job:
        for _ in range(sizes.rounds):
            for name in found:
                wait_for_training(job)
                found[name].append(detect(job, name))
    for name, rounds in found.items():
        times = [one.seconds for one in rounds]
        right, causes = sum(one.right_rank for one in rounds), ", ".join(sorted({one.cause for one in rounds}))
        report.text(f"{name}: {min(times):.3f} to {max(times):.3f} s, {right} of {len(rounds)} name the rank; {causes}")
        goal = GOALS[name] or 3 * statistics.median(one.usual for one in rounds) + 0.5
        report.figure(f"{name} to its event, median", statistics.median(times), "s", goal)
    report.details = dict(found)


def wait_for_training(job: World) -> None:
    """Wait until both nodes train again and the deadline is known."""

    def healed() -> bool:
        last = job.job().get("last_failure")
        return job.trains(range(NODES)) and (last is None or bool(last["stepped_at"]))

    job.wait(healed, "training")
    job.trains_on(range(NODES), LEARNED)


def detect(job: World, fault: str) -> Detection:
    """Inject one fault and wait for its event."""
    known = {failure["id"] for failure in job.failures()}
    usual, pid = job.job()["iteration_seconds"] or 0.0, job.rank(1)["pid"]
    began = time.time()
    if fault == "process exit":
        os.kill(pid, signal.SIGKILL)
    elif fault == "hang":
        os.kill(pid, signal.SIGSTOP)
    elif fault == "lost agent":
        job.agents[1].process.kill()
    else:
        job.ask("inject", fault="exception:cuda", job="7", slot=1)
    seen = job.wait(lambda: next((f for f in job.failures() if f["id"] not in known), None), fault)
    if fault == "lost agent":
        job.agents[1].wait()
        job.start_agent(1)
    elif fault == "exception":  # it strikes at the next micro-batch, at a time that the rank notes
        event = next(event for event in job.events("failure_detected") if event["id"] == seen["id"])
        began = event.get("fault_at") or began
    return Detection(seen["detected_at"] - began, usual, seen["cause"], seen["slots"] == [1])
