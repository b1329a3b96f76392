"""A scrape by Prometheus of a controller with many jobs: its CPU time, and the loop's part of it."""

from __future__ import annotations

import gc
import gzip
import time

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import generate_latest

from benchmarks.report import Report, median_seconds
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.server.metrics import Counts, gauges


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    nodes: int = 2048
    jobs: int = 64
    rounds: int = 20
    """Scrapes; the median counts."""


SMALLEST = Sizes(16, 2, 2)
PERIOD = 15.0  # seconds between two scrapes, as in Prometheus' own example


class ScrapedPage:
    """The page that a scrape reads, without HTTP."""

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
        """Do the loop's part."""
        self.found = list(gauges(self._world.core, {}, {}, 0))

    def text(self) -> bytes:
        """Do the thread's part."""
        return gzip.compress(generate_latest(self.registry))


def many_jobs(nodes: int, jobs: int) -> World:
    """Return a core whose jobs have all nodes."""
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


def measure(sizes: Sizes, report: Report) -> None:
    """Scrape several times."""
    page = ScrapedPage(many_jobs(sizes.nodes, sizes.jobs))
    gc.collect()
    loop = median_seconds(page.read, sizes.rounds, time.process_time)
    text = median_seconds(page.text, sizes.rounds, time.process_time)
    report.text(f"{len(generate_latest(page.registry)):,} bytes, {len(page.text()):,} packed")
    report.figure("a scrape, CPU time of the loop", 1e3 * loop, "ms")
    report.figure("a scrape, CPU time in all", 1e3 * (loop + text), "ms", most=50.0)
    report.figure(f"share of the core, a scrape every {PERIOD:g} s", (loop + text) / PERIOD, "", most=0.01)
