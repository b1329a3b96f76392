"""The share of its time in which a job trains usefully while ranks fail, simulated from measured times of one failure.

Failures come at exponential intervals. After each the job pauses until its next step, and trains with the ranks that
are left until it is whole; a failure meanwhile begins this anew. A job that restarts also repeats what it had trained
since its last checkpoint. The times are sizes in seconds, to be taken from the leaderboard or from the case `recovery`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec

from benchmarks.report import Report


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    minutes: float = 10.0
    """Mean time between failures of the job."""
    next_step: float = 0.4
    """From a failure to the next step."""
    whole: float = 1.2
    """From a failure until all ranks train."""
    left: float = 0.5
    """Part of the ranks that trains meanwhile."""
    iteration: float = 1.0
    """Iteration of a session over a plain one."""
    restart: float = 21.0
    """From a failure to the next step of a job that restarts."""
    again: float = 30.0
    """Training that it repeats, as a mean: half the time between two checkpoints."""
    failures: int = 20_000
    """Failures to simulate."""


SMALLEST = Sizes(failures=500)
SHARE = 0.97  # MoEvement has 0.94
TIMES = 5.7  # as Lazarus has over a restart, where ranks fail often enough


@dataclass(frozen=True)
class Recovery:
    """What a failure costs, in seconds."""

    pause: float
    whole: float = 0.0
    """From the failure; before it only `left` of the ranks train."""
    left: float = 1.0
    again: float = 0.0

    def useful(self, seconds: float) -> float:
        """Return the useful seconds of a spell that begins with a failure and ends with the next one."""
        slow = max(0.0, min(seconds, self.whole) - self.pause)
        full = max(0.0, seconds - max(self.pause, self.whole))
        return self.left * slow + full - self.again


def share(recovery: Recovery, mean: float, failures: int, seed: int = 1) -> float:
    """Return the useful share of the time with failures at exponential intervals of `mean` seconds. Nothing is useful
    in a spell in which less is trained than is repeated."""
    draw = random.Random(seed)
    spells = [draw.expovariate(1 / mean) for _ in range(failures)]
    return sum(max(0.0, recovery.useful(spell)) for spell in spells) / sum(spells)


def measure(sizes: Sizes, report: Report) -> None:
    """Simulate a session and a restart, and find how often ranks may fail."""
    healed = Recovery(sizes.next_step, sizes.whole, sizes.left)
    restarted = Recovery(sizes.restart, again=sizes.again)

    def shares(minutes: float) -> tuple[float, float]:
        ours, theirs = (share(each, 60 * minutes, sizes.failures) for each in (healed, restarted))
        return ours / sizes.iteration, theirs

    report.row("a failure every", "session", "restart", "ratio", digits=3)
    for minutes in sorted({0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, sizes.minutes}):
        ours, theirs = shares(minutes)
        report.row(f"{minutes:g} min", ours, theirs, ours / theirs, digits=3)
    ours, theirs = shares(sizes.minutes)
    report.figure(f"useful share of a session, a failure every {sizes.minutes:g} min", ours, "", least=SHARE)
    lost = (1 - theirs) / max(1 - ours, 1e-9)
    report.figure(f"over that of a restart, a failure every {sizes.minutes:g} min", ours / theirs, "times")
    report.figure(f"lost time of a restart over a session's, a failure every {sizes.minutes:g} min", lost, "times")
    least, most = 0.01, 60.0
    for _ in range(20):
        middle = (least + most) / 2
        ours, theirs = shares(middle)
        least, most = (middle, most) if ours > TIMES * theirs else (least, middle)
    report.figure(f"a session trains {TIMES:g} times as much as a restart: a failure every", most, "min")
