"""``python -m benchmarks.scale [--json FILE]``: what thousands of agents cost the controller, on one core.

A real unicrond on one core, simulated agents on another, over loopback: heartbeats and iterations once a second, then
single ranks die, then all ranks of 5 % of the nodes, then all of them; then the
controller is started on a month's log. See :mod:`benchmarks.scale.measure` for what is measured.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.scale.measure import Figures, Options, measure
from benchmarks.scale.process import allow_descriptors, cores

FULL = 2048  # agents at which the marks count
MARKS = (  # figure, what it is, the most it may be, unit
    ("cpu_share", "share of the core that steady training takes", 0.5, ""),
    ("idle_cpu_share", "share that as many idle connections take", 0.005, ""),
    ("p99_ms", "99th percentile of handling a message", 10.0, "ms"),
    ("leases_lost", "leases lost", 0, ""),
    ("break_ms", "a rank dies: Break at all agents", 50.0, "ms"),
    ("plan_ms", "all reports sent to all plans there", 150.0, "ms"),
    ("mass_break_ms", "5 % of the nodes die: Break at all agents", 500.0, "ms"),
    ("mass_plan_ms", "the same, all reports sent to all plans there", 500.0, "ms"),
    ("all_start_ms", "all ranks die: the last one is told to start again", 2000.0, "ms"),
    ("start_seconds", "start on the log of a month", 1.0, "s"),
    ("memory_mib", "memory", 1024.0, "MiB"),
)
COLUMNS = (  # figure, heading, digits after the point
    ("agents", "agents", 0),
    ("ranks", "ranks", 0),
    ("cpu_share", "CPU share", 3),
    ("p99_ms", "p99 ms", 2),
    ("break_ms", "break ms", 1),
    ("plan_ms", "plan ms", 1),
    ("mass_break_ms", "5 %: break", 1),
    ("mass_plan_ms", "plan ms", 1),
    ("all_start_ms", "all: start ms", 1),
    ("memory_mib", "MiB", 0),
    ("start_seconds", "start s", 2),
    ("leases_lost", "leases lost", 0),
    ("heartbeats_per_second", "beats/s", 0),
    ("steps_per_second", "steps/s", 0),
    ("simulator_cpu_share", "simulator CPU", 3),
    ("simulator_late_ms", "late ms", 1),
)


def row(figures: Figures) -> str:
    """One line of the table; a dash where a step failed."""
    cells = []
    for name, heading, digits in COLUMNS:
        value = getattr(figures, name)
        text = "-" if value is None else f"{value:,.{digits}f}"
        cells.append(f"{text:>{max(8, len(heading) + 2)}}")
    return "".join(cells)


def marks(figures: Figures) -> list[str]:
    """Prints what was asked beside what was reached; which figures missed it, or were not reached."""
    missed = []
    for name, what, most, unit in MARKS:
        value = getattr(figures, name)
        good = value is not None and value <= most
        if not good:
            missed.append(name)
        shown = f"{value:>10.4g}" if value is not None else f"{'none':>10}"
        verdict = "met" if good else "MISSED" if value is not None else "NOT REACHED"
        title = f"{what}, {figures.agents:,} agents"
        print(f"{title:<66}{shown} {unit:<8}   asked: <= {most:g} {unit:<3}  {verdict}")
    return missed


def judged(results: Sequence[Figures]) -> int:
    """The last lines: which goals are met at FULL agents and which are not, and every step that failed. The exit
    status."""
    bad = False
    for figures in results:
        size = f"benchmarks.scale: {figures.agents:,} agents"
        if figures.agents >= FULL:
            missed = marks(figures)
            bad = bad or bool(missed)
            told = f"; missed: {', '.join(missed)}" if missed else ""
            print(f"{size}: {len(MARKS) - len(missed)} of {len(MARKS)} goals met{told}", flush=True)
        absent = [name for name, *_ in MARKS if getattr(figures, name) is None]
        if figures.failed or absent:
            bad = True
            why = "; ".join(figures.failed) or f"no {', '.join(absent)}"
            print(f"{size}: FAILED: {why}", file=sys.stderr, flush=True)
    return 1 if bad else 0


def write(path: Path, results: Sequence[Figures]) -> None:
    """The results so far, whole at any time."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(list(results)), indent=1) + b"\n")
    fresh.replace(path)


def sizes(text: str) -> list[int]:
    """Numbers of agents, as in "64,256"."""
    found = [int(part) for part in text.split(",")]
    if not found or min(found) < 1:
        raise ValueError(text)
    return found


def main(arguments: list[str] | None = None) -> int:
    """0 when every mark was reached, 1 when one was missed or a step failed, 2 for wrong use."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--agents", type=sizes, default=[64, 256, 1024, FULL], metavar="N,N", help="sizes to measure")
    parser.add_argument("--ranks", type=int, default=8, help="per agent")
    parser.add_argument("--seconds", type=float, default=20.0, help="of steady training")
    parser.add_argument("--failures", type=int, default=3, help="of single ranks; the median counts")
    parser.add_argument("--metrics", type=float, default=0.0, metavar="SECONDS", help="between nodes' metrics, 0: none")
    parser.add_argument(
        "--progress", action="store_true", help="statuses as often as the controller allows, not one a heartbeat"
    )
    options = parser.parse_args(arguments)
    if options.ranks < 1 or options.seconds <= 0 or options.failures < 1:
        parser.error("--ranks, --seconds and --failures must be above 0")
    if problem := allow_descriptors(max(options.agents)):
        parser.error(problem)
    controller_cpus, own_cpus = cores()
    if controller_cpus == own_cpus:
        print("benchmarks.scale: one core for controller and simulator: the figures are too high", file=sys.stderr)
    os.sched_setaffinity(0, own_cpus)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the controller on its way out
    wanted = Options(options.ranks, options.seconds, options.failures, options.metrics, options.progress)
    print("".join(f"{heading:>{max(8, len(heading) + 2)}}" for _, heading, _ in COLUMNS), flush=True)
    results: list[Figures] = []
    for agents in options.agents:
        figures = measure(agents, wanted, controller_cpus)
        figures.goals = {
            name: None if (found := getattr(figures, name)) is None else found <= most for name, _, most, _ in MARKS
        }
        results.append(figures)
        print(row(results[-1]), flush=True)
        if options.json is not None:
            write(options.json, results)
    return judged(results)


if __name__ == "__main__":
    sys.exit(main())
