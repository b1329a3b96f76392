"""The interval between checkpoints of `minutes="auto"` beside the best fixed one, on the simulator's traces.

One job runs on all nodes of a trace. The loss of a node costs the work since the last checkpoint if no copies in memory
cover it: without copies always; with them if the losses have a common cause, which is drawn, or follow each other too
soon. The overhead is the time of saves and of repeated work; restarts cost the same with any interval. The best fixed
interval is chosen with all traces known; `auto` knows its prior and the past of its own trace.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.report import Report
from unicron_planner.simulate.generate import llama3, rsc1, trace_a, trace_b, unicron
from unicron_planner.simulate.trace import DAY, Trace
from unicron_transition.snapshot import save_interval
from unicron_transition.snapshot.save_interval import Risk


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    seeds: int = 40
    """Traces of each kind."""


SMALLEST = Sizes(1)
TRACES: dict[str, tuple[int, Callable[[int], Trace]]] = {
    "trace-a": (16, trace_a),
    "trace-b": (16, trace_b),
    "unicron": (16, lambda seed: unicron(16, 60 * DAY, seed)),
    "llama3": (512, lambda seed: llama3(512, 30 * DAY, seed)),
    "rsc1": (256, lambda seed: rsc1(256, 30 * DAY, seed)),
}
SAVES = {"small": (0.05, 5.0), "large": (1.0, 120.0)}  # seconds that a save stops the training, and in all
INTERVALS = [30.0 * 2 ** (number / 4) for number in range(40)]  # fixed intervals: 30 s to 7 h


def measure(sizes: Sizes, report: Report) -> None:
    """Compare all traces and sizes of a save."""
    heads = ("auto", "best fixed", "over it", "auto, min", "best, min", "training time")
    report.row("trace, copies, save", *heads, label=24, width=14)
    worst, most = 0.0, 0.0  # of the training time, of the time
    for name in TRACES:
        for copies in (True, False):
            for kind, save in SAVES.items():
                mine, theirs, best, last = compare(name, copies, save, sizes.seeds)
                ratio = (1.0 - theirs) / (1.0 - mine) - 1.0
                worst, most = max(worst, ratio), max(most, mine)
                cells = f"{mine:.3%}", f"{theirs:.3%}", f"{mine / theirs - 1.0:+.1%}", last / 60, best / 60
                label = f"{name}, {'copies' if copies else 'none'}, {kind}"
                report.row(label, *cells, f"{ratio:+.3%}", label=24, width=14, digits=1)
    report.figure("training time over that with the best fixed interval, at most", 100 * worst, "%", 5.0)
    report.figure("overhead, at most", 100 * most, "%", 3.5)


@dataclass(frozen=True)
class JobTrace:
    """One trace for a job."""

    until: float
    """Length in seconds."""
    losses: Sequence[tuple[float, bool]]
    """(seconds, whether a file is needed) of each loss of a node."""


def job_trace(trace: Trace, copies: bool, seed: int) -> JobTrace:
    """Return a trace for a job with or without copies in memory."""
    draw, before, losses = random.Random(f"{trace.name}/{seed}"), -save_interval.RENEWAL, []
    for event in trace.events:
        if event.event != "fail" or event.failure.severity != 1:
            continue
        second = event.seconds - before < save_interval.RENEWAL
        losses.append((event.seconds, not copies or second or draw.random() < save_interval.COMMON))
        before = event.seconds
    return JobTrace(trace.until, losses)


def overhead(trace: JobTrace, cost: float, wait: Callable[[float, int], float]) -> float:
    """Return the lost share of the time; wait(seconds, losses so far) is the time until the next checkpoint."""
    since, lost, seen = 0.0, 0.0, 0  # time of the last checkpoint, seconds lost, losses
    for when, needed in [*trace.losses, (trace.until, False)]:
        while (due := since + wait(since, seen)) + cost <= when:
            since = due + cost
            lost += cost
        if needed:
            lost += when - since
            since = when
        seen += 1
    return lost / trace.until


def compare(name: str, copies: bool, save: tuple[float, float], seeds: int) -> tuple[float, float, float, float]:
    """Return the overhead of auto and of the best fixed interval, that interval, and the median last one of auto."""
    nodes, make = TRACES[name]
    blocked, written = save
    cost = blocked + save_interval.LOAD * written
    traces = [job_trace(make(seed), copies, seed) for seed in range(seeds)]

    def auto(seconds: float, losses: int) -> float:
        if seconds == 0.0:
            return save_interval.FIRST
        return save_interval.interval(blocked, written, Risk(nodes, copies, seconds, losses))

    mine = statistics.mean(overhead(each, cost, auto) for each in traces)
    fixed = {each: statistics.mean(overhead(one, cost, lambda *_, t=each: t) for one in traces) for each in INTERVALS}
    best = min(fixed, key=fixed.__getitem__)
    return mine, fixed[best], best, statistics.median(auto(each.until, len(each.losses)) for each in traces)
