"""``python -m benchmarks.scrape [--nodes N] [--jobs N]``: what a scrape of Prometheus' takes, and takes of the core.

First the controller's core alone, with 2,048 nodes in 64 jobs: its processor time for what it reads in the loop, and
for the text, which a thread makes. Then a real unicrond on one core, with 2,048 simulated agents of one job on another
and a simulated Slurm: how long a scrape takes while all train, once a second, and what the controller's share of its
core is with and without it, by turns.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import generate_latest

from benchmarks.marks import print_figure
from benchmarks.scale.lines import Failed
from benchmarks.scale.observing import observed_controller
from benchmarks.scale.process import REPOSITORY, NotStarted, allow_descriptors, cores
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.server.metrics import Counts, gauges
from unicron_ctl.lab.cluster import ports

MOST_MS = 50.0
PROMETHEUS_SECONDS = 15.0  # between two scrapes, as Prometheus' own example has it
ROUNDS, FORM_SECONDS, CALM_SECONDS = 20, 120.0, 5.0


# ---------------------------------------------------------------- the core alone
def many_jobs(nodes: int, jobs: int) -> World:
    """A core with so many jobs, which have all of the nodes."""
    slurm, each = FakeSlurm(nodes), nodes // jobs
    world = World(slurm)
    for job in range(1, jobs + 1):
        slurm.submit(str(job), each)
        for element in range(each):
            agent = FakeAgent(world, str(job), element, f"n{(job - 1) * each + element + 1}", nodes=each)
            agent.register()
            agent.ready()
    world.run(3.0)
    return world


class Page:
    """All that a scrape reads, without HTTP."""

    def __init__(self, world: World) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counted = Counts(self.registry)
        for event in world.log:
            counted.note(event)
        self._world, self.found = world, list[Metric]()
        self.registry.register(self)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        return self.found

    def read(self) -> None:
        """The loop's part."""
        self.found = list(gauges(self._world.core, {}, {}, 0))

    def text(self) -> bytes:
        """The thread's part."""
        return gzip.compress(generate_latest(self.registry))


def processor_ms(work: Callable[[], object]) -> float:
    """The median of several rounds."""
    found = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return 1e3 * statistics.median(found)


def measure_core(nodes: int, jobs: int) -> None:
    """Prints what the core alone takes."""
    page = Page(many_jobs(nodes, jobs))
    gc.collect()
    loop = processor_ms(page.read)
    text = processor_ms(page.text)
    size = len(page.text())
    print(f"{nodes:,} nodes in {jobs} jobs: {len(generate_latest(page.registry)):,} bytes, {size:,} packed")
    print_figure("a scrape, of the loop's time", loop, "ms")
    print_figure("a scrape, processor time in all", loop + text, "ms", most=MOST_MS)
    share = (loop + text) / 1e3 / PROMETHEUS_SECONDS
    print_figure(f"share of the core, a scrape every {PROMETHEUS_SECONDS:g} s", share, "", most=0.01)


# ---------------------------------------------------------------- a real unicrond
def measure_real(nodes: int, ranks: int, seconds: float, turns: int) -> None:
    """Prints how long scrapes take while all train. Raises Failed, NotStarted, OSError."""
    port = ports.choose(1, str(os.getpid()))[0]
    took: list[float] = []
    shares: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="unicron-scrape-") as name:
        lines = f'metrics = "127.0.0.1:{port}"\n'
        with observed_controller(Path(name), nodes, nodes, ranks, lines=lines) as (controller, simulation):
            simulation.until(simulation.complete, FORM_SECONDS, "all ranks train for the first time")
            simulation.run(CALM_SECONDS)
            for turn in range(2 * turns):
                asked = turn % 2 == 1
                asker = start_asker(port, seconds) if asked else None
                cpu, began = controller.cpu_seconds(), time.monotonic()
                simulation.run(seconds)
                shares[asked].append((controller.cpu_seconds() - cpu) / (time.monotonic() - began))
                if asker is not None:
                    simulation.run(1.5)
                    took += [each for each, _ in json.loads(asker.communicate(timeout=60)[0])]
            lost = len(simulation.lost)
    without, scraped = (statistics.mean(shares[asked]) for asked in (False, True))
    print(f"a real unicrond, {nodes:,} agents of {ranks} ranks: {len(took)} scrapes, one a second; {lost} leases lost")
    print_figure("a scrape, median", 1e3 * statistics.median(took), "ms", most=MOST_MS)
    print_figure("a scrape, 95th percentile", 1e3 * sorted(took)[int(0.95 * (len(took) - 1))], "ms")
    print(f"share of the core: {scraped:.3f} with a scrape a second, {without:.3f} without")


def start_asker(port: int, seconds: float) -> subprocess.Popen[str]:
    """One that scrapes once a second."""
    command = [sys.executable, "-m", "benchmarks.scrape.asker", str(port), str(seconds), "1"]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


def main() -> int:
    """0 unless a measurement failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scrape", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2048)
    parser.add_argument("--jobs", type=int, default=64, help="of the core alone")
    parser.add_argument("--ranks", type=int, default=8, help="of each agent")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each turn")
    parser.add_argument("--turns", type=int, default=3, help="with scrapes, and as many without")
    options = parser.parse_args()
    if problem := allow_descriptors(3 * options.nodes):
        parser.error(problem)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the controller on its way out
    measure_core(options.nodes, options.jobs)
    os.sched_setaffinity(0, cores()[1])
    try:
        measure_real(options.nodes, options.ranks, options.seconds, options.turns)
    except (Failed, NotStarted, OSError) as error:
        print(f"benchmarks.scrape: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
