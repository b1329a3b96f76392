"""The interval between checkpoints that `minutes="auto"` finds, beside the best fixed one, on the simulator's traces.

One job on all nodes of a trace. A loss of a node takes the work since the last checkpoint where the copies in memory do
not cover it: always without copies; with them where it has a common cause with theirs, which is drawn, or comes before
they are complete again. Overhead: what saves cost, and work done again, as a share of the time; the restarts
themselves cost every interval the same. The best fixed interval is chosen with all the traces known. `auto` knows only
its prior and what it has seen so far in its own trace.
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
SAVES = {"small": (0.05, 5.0), "large": (1.0, 120.0)}  # seconds: a save stops the training, is on disk
INTERVALS = [30.0 * 2 ** (number / 4) for number in range(40)]  # intervals that are tried: 30 s to 7 h


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
    """One trace as a job sees it."""

    until: float
    """Length in seconds."""
    losses: Sequence[tuple[float, bool]]
    """(seconds, whether a file is needed) of each node's loss."""


def job_trace(trace: Trace, copies: bool, seed: int) -> JobTrace:
    """Return what the trace means for a job with or without copies in memory."""
    draw, before, losses = random.Random(f"{trace.name}/{seed}"), -save_interval.RENEWAL, []
    for event in trace.events:
        if event.event != "fail" or event.failure.severity != 1:
            continue
        second = event.seconds - before < save_interval.RENEWAL
        losses.append((event.seconds, not copies or second or draw.random() < save_interval.COMMON))
        before = event.seconds
    return JobTrace(trace.until, losses)


def overhead(trace: JobTrace, cost: float, wait: Callable[[float, int], float]) -> float:
    """Return the share of the time that is lost. wait(seconds, losses so far): from one checkpoint to the next."""
    since, lost, seen = 0.0, 0.0, 0  # since: the last checkpoint
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
    """Return the overhead of auto and of the best fixed interval, that interval, and the usual last one of auto."""
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
