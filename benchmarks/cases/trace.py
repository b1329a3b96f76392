"""The controller under the failures of a run of 16,384 GPUs, a thousand times as fast: its decisions and their cost.

A real unicrond on one core, 2,048 simulated agents of 8 ranks on another, over loopback and on a simulated Slurm with
spare nodes. The failures have the rate and causes of the Llama 3 run (arXiv 2407.21783 [S]: 419 unexpected
interruptions in 54 days): one about every 11 s.
"""

from __future__ import annotations

import gc
import json
import math
import os
import socket
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from benchmarks.report import Report
from benchmarks.scale.observed import PARTS
from benchmarks.scale.process import PinnedController, allow_descriptors, cores
from benchmarks.scale.traced import Due, Hosts, Traced, schedule
from benchmarks.scale.verdict import judge
from unicron_ctl.shared.log.store import Store
from unicron_planner.simulate.generate import LLAMA3_COUNTS, LLAMA3_PER_NODE_DAY, poisson

FULL = 2048  # nodes of the run whose failures these are
FORM_SECONDS, WHOLE_SECONDS = 120.0, 120.0  # limits of the waits
SETTINGS = 'slurm = "command"\nmetrics_seconds = 10.0\n'


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    agents: int = FULL
    ranks: int = 8
    """Ranks of an agent."""
    spares: int = 64
    """Nodes beside those of the job."""
    seconds: float = 600.0
    """Time in which failures happen."""
    speed: float = 1000.0
    """How many times as fast they happen."""
    seed: int = 0


SMALLEST = Sizes(32, 2, 4, 15.0)


def measure(sizes: Sizes, report: Report) -> None:
    """Let the failures happen, then compare the log with them."""
    allow_descriptors(2 * sizes.agents + sizes.spares)
    core, own_core = cores()
    os.sched_setaffinity(0, {own_core})
    rate = LLAMA3_PER_NODE_DAY * FULL / sizes.agents  # as many failures, however many agents there are
    trace = poisson(sizes.agents, sizes.seconds * sizes.speed, rate, LLAMA3_COUNTS, sizes.seed, "llama3")
    with tempfile.TemporaryDirectory(prefix="unicron-scale-") as name:
        folder = Path(name)
        with observed_controller(folder, core, sizes) as (controller, simulation):
            fail(simulation, controller, schedule(trace, sizes.speed), sizes.seconds, report)
        print_verdict(simulation, folder / "state", sizes.ranks, report)
        times = json.loads((folder / "figures.json").read_text())
    report.row("milliseconds of", "count", "median", "p99", "max", label=46, width=10)
    for part, title in PARTS.items():
        report.row(title, *spread([1e3 * each for each in times[part]]), label=46, width=10, digits=3)


@contextmanager
def observed_controller(folder: Path, core: int, sizes: Sizes) -> Iterator[tuple[PinnedController, Traced]]:
    """Run a unicrond on a simulated Slurm, and the simulated agents of a job.

    The time of its parts is in figures.json afterwards.
    """
    nodes, path = sizes.agents + sizes.spares, folder / "slurm"
    with closing(Hosts(nodes)) as hosts, socket.socket(socket.AF_UNIX) as listening:
        about = {"nodes": nodes, "elements": sizes.agents, "port": hosts.port, "simulator": str(path)}
        about |= {"speed": sizes.speed, "figures": str(folder / "figures.json")}
        (folder / "observed.json").write_text(json.dumps(about))
        listening.bind(str(path))
        listening.listen(1)
        program = [sys.executable, "-m", "benchmarks.scale.observed", str(folder / "observed.json")]
        controller = PinnedController(folder, core, SETTINGS, program)
        try:
            slurm, _ = listening.accept()
            with slurm:
                traced = Traced(controller.endpoint, slurm, hosts, nodes, sizes.agents, sizes.ranks)
                with closing(traced):
                    yield controller, traced
            controller.close()
        finally:
            controller.kill()


def fail(simulation: Traced, controller: PinnedController, dues: Sequence[Due], seconds: float, report: Report) -> None:
    """Form the job, let the failures happen, and wait until it is whole after the last one."""
    gc.collect()
    gc.disable()  # its pauses in this process are no latency of the controller
    try:
        simulation.until(simulation.complete, FORM_SECONDS, "all ranks train for the first time")
        simulation.run(5.0)
        used, before = controller.cpu_seconds(), simulation.iterations
        simulation.fail_by(dues)
        simulation.run(seconds)
        share, trained = (controller.cpu_seconds() - used) / seconds, simulation.iterations - before
        simulation.until(
            lambda: len(simulation.injected) == len(dues) and all(one.whole for one in simulation.injected),
            WHOLE_SECONDS,
            "every rank trains after the last failure",
        )
        report.figure("share of the core", share)
        report.figure("memory, at most", controller.peak_mib(), "MiB")
        report.figure(f"iterations of 1 s, in {seconds:g} s", trained)
        report.figure("elements moved to other nodes", simulation.moved)
    finally:
        gc.enable()


def print_verdict(simulation: Traced, state_folder: Path, ranks: int, report: Report) -> None:
    """Print what the controller has made of each failure, by its log."""
    with closing(Store(state_folder / "events.sqlite")) as store:
        events = list(store.replay())
    injected = simulation.injected
    verdict = judge(injected, events, ranks)
    severities = Counter(one.severity for one in injected)
    report.text(", ".join(f"{severities[severity]} SEV{severity}" for severity in sorted(severities)))
    report.figure("records in the log", len(events))
    report.figure(f"of {len(injected)} failures decided rightly", len(verdict.detected), "", least=len(injected))
    report.figure("wrong decisions", len(verdict.wrong), "", most=0)
    for line in verdict.wrong:
        report.text(f"WRONG: {line}")
    report.row("seconds from the failure until", "count", "median", "p99", "max", label=46, width=10)
    for cause in sorted({cause for cause, _ in verdict.detected}):
        found = [seconds for each, seconds in verdict.detected if each == cause]
        report.row(f"it is on record: {cause}", *spread(found), label=46, width=10)
    report.row("the others go on", *spread([one.entered - one.at for one in injected]), label=46, width=10)
    report.row("all train again", *spread([one.whole - one.at for one in injected]), label=46, width=10)


def spread(values: Sequence[float]) -> tuple[int, float, float, float]:
    """Return number, median, 99th percentile and largest of the values."""
    ordered = sorted(values) or [0.0]
    return len(values), statistics.median(ordered), ordered[math.ceil(0.99 * len(ordered)) - 1], ordered[-1]
