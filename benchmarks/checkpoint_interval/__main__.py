"""``python -m benchmarks.checkpoint_interval``: the interval that `minutes="auto"` finds, beside the best fixed one.

One job on all nodes of a trace of the simulator. A loss of a node takes the work since the last checkpoint where the
copies in memory do not cover it: always without copies; with them where it has a common cause with theirs, which is
drawn, or comes before they are complete again. Overhead: what saves cost, and work done again, as a share of the time;
the restarts themselves cost every interval the same. The best fixed interval is chosen with all the traces known.
`auto` knows only its prior and what it has seen so far in its own trace.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.marks import print_figure
from unicron_planner.simulate.generate import llama3, rsc1, trace_a, trace_b, unicron
from unicron_planner.simulate.trace import DAY, Trace
from unicron_transition.snapshot import save_interval
from unicron_transition.snapshot.save_interval import Risk

TRACES: dict[str, tuple[int, Callable[[int], Trace]]] = {
    "trace-a": (16, trace_a),
    "trace-b": (16, trace_b),
    "unicron": (16, lambda seed: unicron(16, 60 * DAY, seed)),
    "llama3": (512, lambda seed: llama3(512, 30 * DAY, seed)),
    "rsc1": (256, lambda seed: rsc1(256, 30 * DAY, seed)),
}
SAVES = {"small": (0.05, 5.0), "large": (1.0, 120.0)}  # seconds: a save stops the training, is on disk
STEP = 2**0.25  # between two fixed intervals that are tried
FIXED = [30.0 * STEP**number for number in range(40)]  # 30 s to 7 h


@dataclass(frozen=True)
class Life:
    """One trace as a job sees it: its length, and (time, whether a file is needed) of each node's loss; seconds."""

    until: float
    losses: Sequence[tuple[float, bool]]


def life(trace: Trace, copies: bool, seed: int) -> Life:
    """What the trace means for a job with or without copies in memory."""
    draw, before, losses = random.Random(f"{trace.name}/{seed}"), -save_interval.RENEWAL, []
    for event in trace.events:
        if event.event != "fail" or event.failure.severity != 1:
            continue
        second = event.seconds - before < save_interval.RENEWAL
        losses.append((event.seconds, not copies or second or draw.random() < save_interval.COMMON))
        before = event.seconds
    return Life(trace.until, losses)


def overhead(found: Life, cost: float, wait: Callable[[float, int], float]) -> float:
    """The share of the time that is lost. wait(seconds so far, losses so far): from one checkpoint to the next."""
    since, lost, seen = 0.0, 0.0, 0  # since: the last checkpoint
    for when, needed in [*found.losses, (found.until, False)]:
        while (due := since + wait(since, seen)) + cost <= when:
            since = due + cost
            lost += cost
        if needed:
            lost += when - since
            since = when
        seen += 1
    return lost / found.until


def compared(name: str, copies: bool, save: tuple[float, float], seeds: int) -> tuple[float, float, float, float]:
    """(overhead of auto, of the best fixed interval, that interval, the usual one of auto at the end)."""
    nodes, make = TRACES[name]
    blocked, written = save
    cost = blocked + save_interval.LOAD * written
    lives = [life(make(seed), copies, seed) for seed in range(seeds)]

    def auto(seconds: float, losses: int) -> float:
        if seconds == 0.0:
            return save_interval.FIRST
        return save_interval.interval(blocked, written, Risk(nodes, copies, seconds, losses))

    mine = statistics.mean(overhead(each, cost, auto) for each in lives)
    fixed = {each: statistics.mean(overhead(one, cost, lambda *_, t=each: t) for one in lives) for each in FIXED}
    best = min(fixed, key=fixed.__getitem__)
    last = statistics.median(auto(each.until, len(each.losses)) for each in lives)
    return mine, fixed[best], best, last


def main() -> int:
    """Exit status 1 if a mark was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40, help="traces of each kind (40)")
    seeds = parser.parse_args().seeds
    print("trace     copies  save       auto  best fixed  over it   interval: auto, best       training time")
    worst, most = 0.0, 0.0  # of the training time, of the time
    for name in TRACES:
        for copies in (True, False):
            for kind, save in SAVES.items():
                mine, theirs, best, last = compared(name, copies, save, seeds)
                ratio = (1.0 - theirs) / (1.0 - mine) - 1.0
                worst, most = max(worst, ratio), max(most, mine)
                print(
                    f"{name:9} {'yes' if copies else 'no':7} {kind:6} {mine:8.3%} {theirs:11.3%} "
                    f"{mine / theirs - 1.0:+8.1%} {last / 60:13.1f}, {best / 60:.1f} min {ratio:+13.3%}"
                )
    met = print_figure("training time over that with the best fixed interval, at most", 100 * worst, "%", 5.0)
    met &= print_figure("overhead, at most", 100 * most, "%", 3.5)
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
