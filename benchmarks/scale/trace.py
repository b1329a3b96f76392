"""``python -m benchmarks.scale.trace [--seconds 600]``: the controller under the failures of a run of 16,384 GPUs.

A real unicrond on one core, 2,048 simulated agents of 8 ranks on another, over loopback and on a simulated Slurm with
spare nodes. What fails is drawn with the rate and causes of the Llama 3 run (arXiv 2407.21783 [S]: 419 unexpected
interruptions in 54 days), a thousand times as fast: a failure about every 11 s. Printed: what the controller made of
each failure, who was touched that had not failed, and what its parts took.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import signal
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.scale.lines import Failed
from benchmarks.scale.observed import PARTS
from benchmarks.scale.process import Controller, NotStarted, allow_descriptors, cores
from benchmarks.scale.traced import Hosts, Traced, schedule
from benchmarks.scale.verdict import Judged, judge
from unicron_ctl.shared.log.store import Store
from unicron_planner.simulate.generate import LLAMA3_COUNTS, LLAMA3_PER_NODE_DAY, poisson

FULL = 2048  # nodes of the run whose failures these are
FORM_SECONDS, WHOLE_SECONDS = 120.0, 120.0  # limits of the waits
NAMES = {
    "turn": "one job's turn: sense, judge, decide, act",
    "fold": "one record folded into the state",
    "flush": "log written, outbox sent",
    "plan": "the planner's decision, its inputs included",
    "listing": "all that follows from a listing of Slurm",
    "message": "one message of an agent",
}


@dataclass(frozen=True)
class Options:
    """Sizes of a run.

    agents: with `ranks` ranks each, and `spares` nodes more. seconds: in which failures happen, `speed` times as fast
    as in the trace.
    """

    agents: int
    ranks: int
    spares: int
    seconds: float
    speed: float
    seed: int

    @property
    def nodes(self) -> int:
        return self.agents + self.spares


@contextmanager
def observed_controller(folder: Path, options: Options) -> Iterator[tuple[Controller, Traced]]:
    """Run a unicrond on its own core, and on another the simulated agents of a job, on a simulated Slurm.

    What its parts took is in `folder`/figures.json afterwards. Raises Failed, NotStarted, OSError.
    """
    hosts, door = Hosts(options.nodes), folder / "slurm"
    about = {"nodes": options.nodes, "elements": options.agents, "port": hosts.port, "simulator": str(door)}
    about |= {"speed": options.speed, "figures": str(folder / "figures.json")}
    (folder / "observed.json").write_text(json.dumps(about))
    program = ("-m", "benchmarks.scale.observed", str(folder / "observed.json"))
    controller = Controller(folder, cores()[0], metrics=10.0, slurm="command", program=program)
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(door))
            listening.listen(1)
            controller.start()
            slurm, _ = listening.accept()
        with slurm:
            simulation = Traced(controller.endpoint, slurm, hosts, options.nodes, options.agents, options.ranks)
            try:
                yield controller, simulation
            finally:
                simulation.close()
        controller.stop()
    finally:
        controller.kill()
        hosts.close()


def run(options: Options, folder: Path) -> dict[str, Any]:
    """All figures. Raises Failed, NotStarted, OSError."""
    rate = LLAMA3_PER_NODE_DAY * FULL / options.agents  # as many failures, however many agents there are
    trace = poisson(options.agents, options.seconds * options.speed, rate, LLAMA3_COUNTS, options.seed, "llama3")
    with observed_controller(folder, options) as (controller, simulation):
        figures = _live(simulation, controller, options, schedule(trace, options.speed))
    times = json.loads((folder / "figures.json").read_text())
    figures["parts"] = {name: _spread(times[name]) for name in PARTS}
    return figures | _judged(simulation, controller, options)


def _live(simulation: Traced, controller: Controller, options: Options, dues: list[Any]) -> dict[str, Any]:
    """From the job's forming until it is whole after the last failure."""
    gc.collect()
    gc.disable()  # its pauses in this process are no latency of the controller
    try:
        simulation.until(simulation.complete, FORM_SECONDS, "all ranks train for the first time")
        simulation.run(5.0)
        cpu, before = controller.cpu_seconds(), simulation.iterations
        began = simulation.fail_by(dues)
        simulation.run(options.seconds)
        share = (controller.cpu_seconds() - cpu) / options.seconds
        trained = simulation.iterations - before
        struck = len(dues)
        simulation.until(
            lambda: len(simulation.injected) == struck and all(one.whole for one in simulation.injected),
            WHOLE_SECONDS,
            "every rank trains after the last failure",
        )
        memory = controller.peak_mib()
    finally:
        gc.enable()
    whole = [one.whole - one.at for one in simulation.injected]
    entered = [one.entered - one.at for one in simulation.injected]
    return {
        "agents": options.agents,
        "ranks": options.agents * options.ranks,
        "seconds": options.seconds,
        "failures": len(simulation.injected),
        "causes": dict(Counter(one.cause for one in simulation.injected)),
        "severities": {str(s): n for s, n in sorted(Counter(o.severity for o in simulation.injected).items())},
        "cpu_share": share,
        "memory_mib": memory,
        "iterations": trained,
        "iterations_undisturbed": options.seconds,
        "entered_seconds": _spread(entered),
        "whole_seconds": _spread(whole),
        "elements_moved": len(simulation.moves.started),
        "began": began,
    }


def _judged(simulation: Traced, controller: Controller, options: Options) -> dict[str, Any]:
    """By the log."""
    store = Store(controller.state / "events.sqlite")
    try:
        events = list(store.replay())
    finally:
        store.close()
    found: Judged = judge(simulation.injected, events, options.ranks)
    kinds: dict[str, list[float]] = {}
    for cause, seconds in found.detected:
        kinds.setdefault(cause, []).append(seconds)
    return {
        "events": events[-1].id if events else 0,
        "right": len(found.detected),
        "wrong": found.wrong,
        "detected_seconds": {cause: _spread(values) for cause, values in sorted(kinds.items())},
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Number, median, 99th percentile and largest."""
    if not values:
        return {"count": 0, "median": 0.0, "p99": 0.0, "max": 0.0}
    ordered = sorted(values)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return {"count": len(ordered), "median": median(ordered), "p99": p99, "max": ordered[-1]}


def report(figures: dict[str, Any]) -> None:
    """For people."""
    severities = ", ".join(f"{count} SEV{severity}" for severity, count in figures["severities"].items())
    print(f"{figures['agents']:,} agents, {figures['ranks']:,} ranks, {figures['seconds']:g} s of failures")
    print(f"failures              {figures['failures']} ({severities}); {figures['elements_moved']} elements moved")
    print(f"decided rightly       {figures['right']} of {figures['failures']}")
    print(f"records in the log    {figures['events']:,}")
    print(f"CPU of unicrond       {figures['cpu_share']:.2f} of a core; memory {figures['memory_mib']:.0f} MiB")
    print(f"iterations of 1 s     {figures['iterations']} of {figures['iterations_undisturbed']:g}")
    print(f"\n{'seconds from the failure':<46}{'count':>8}{'median':>10}{'p99':>10}{'max':>10}")
    rows = {f"until it is on record: {cause}": found for cause, found in figures["detected_seconds"].items()}
    rows |= {"until the others go on": figures["entered_seconds"], "until all train again": figures["whole_seconds"]}
    for name, found in rows.items():
        print(f"{name:<46}{found['count']:>8}{found['median']:>10.2f}{found['p99']:>10.2f}{found['max']:>10.2f}")
    print(f"\n{'milliseconds of':<46}{'count':>8}{'median':>10}{'p99':>10}{'max':>10}")
    for part, found in figures["parts"].items():
        values = "".join(f"{1e3 * found[key]:>10.3f}" for key in ("median", "p99", "max"))
        print(f"{NAMES[part]:<46}{found['count']:>8,}{values}")
    for line in figures["wrong"]:
        print(f"WRONG: {line}")


def main(arguments: list[str] | None = None) -> int:
    """0 when each failure was decided rightly and nobody else was touched, 1 when not, 2 for wrong use."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.trace", description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=FULL)
    parser.add_argument("--ranks", type=int, default=8, help="per agent")
    parser.add_argument("--spares", type=int, default=64, help="nodes beside those of the job")
    parser.add_argument("--seconds", type=float, default=600.0, help="in which failures happen")
    parser.add_argument("--speed", type=float, default=1000.0, help="how many times as fast as they happened")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    if options.agents < 4 or options.ranks < 1 or options.spares < 1 or options.seconds <= 0 or options.speed <= 0:
        parser.error("--agents must be 4 or more, --ranks and --spares 1, --seconds and --speed above 0")
    if problem := allow_descriptors(2 * options.agents + options.spares):
        parser.error(problem)
    os.sched_setaffinity(0, cores()[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the controller on its way out
    wanted = Options(options.agents, options.ranks, options.spares, options.seconds, options.speed, options.seed)
    with tempfile.TemporaryDirectory(prefix="unicron-scale-") as folder:
        try:
            figures = run(wanted, Path(folder))
        except (Failed, NotStarted, OSError) as error:
            print(f"benchmarks.scale.trace: {error}", file=sys.stderr)
            return 1
    report(figures)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if figures["right"] == figures["failures"] and not figures["wrong"] else 1


if __name__ == "__main__":
    sys.exit(main())
