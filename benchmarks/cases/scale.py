"""What thousands of agents cost a real unicrond on one core while all train, and when ranks fail.

Simulated agents on another core speak to it over loopback, or with `sockets=0` to the controller's core alone, whose
clock shows its own CPU time whatever else the machine does: heartbeats and iterations once a second. Then single ranks
die, all ranks of 5 % of the nodes, and all ranks. A Break's time runs from the first report of a death until the last
agent that trains has it; a plan's from the last report of a stopped rank until the last member has it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks.report import Report
from benchmarks.scale.alone import Alone
from benchmarks.scale.lines import Failed, Sockets
from benchmarks.scale.process import PinnedController, allow_descriptors, cores
from benchmarks.scale.simulation import Counts, Lines, Simulation, names
from tests.support.processes import wait_for
from unicron_ctl.shared.system.errors import UserError

FORM_SECONDS = 120.0  # limits of the waits
BREAK_SECONDS, PLAN_SECONDS, START_SECONDS, REJOIN_SECONDS, SETTLE_SECONDS = 20.0, 30.0, 30.0, 60.0, 60.0
CALM_SECONDS = 3.0  # between two failures
IDLE_SECONDS = 4.0


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run; the goals are of 2,048 agents."""

    agents: int = 2048
    ranks: int = 8
    """Ranks of an agent."""
    seconds: float = 20.0
    """Time of undisturbed training."""
    failures: int = 3
    """Single ranks that die, one after the other; the median counts."""
    sockets: bool = True
    """Speak to a unicrond over sockets; else to its core in this process."""


SMALLEST = Sizes(40, 2, 2.0, 1)


def measure(sizes: Sizes, report: Report) -> None:
    """Start a controller, and measure it with agents. Raises UserError if it does not do its part."""
    try:
        (over_sockets if sizes.sockets else core_alone)(sizes, report)
    except Failed as error:
        raise UserError(f"{sizes.agents} agents were too many: {error}") from None


def core_alone(sizes: Sizes, report: Report) -> None:
    """Measure the controller's core in this process."""
    with tempfile.TemporaryDirectory(prefix="unicron-scale-") as folder:
        lines = Alone(Path(folder))
        with_agents(sizes, lines, lambda: lines.used, report)


def over_sockets(sizes: Sizes, report: Report) -> None:
    """Measure a unicrond on a core of its own."""
    allow_descriptors(sizes.agents)
    controller_core, own_core = cores()
    os.sched_setaffinity(0, {own_core})
    with tempfile.TemporaryDirectory(prefix="unicron-scale-") as folder:
        controller = PinnedController(Path(folder), controller_core)
        try:
            idle_connections(sizes.agents, controller, report)
            lines = Sockets(controller.endpoint, names(sizes.agents))
            with_agents(sizes, lines, controller.cpu_seconds, report)
            report.figure("memory, at most", controller.peak_mib(), "MiB", 1024.0)
            controller.close()
        finally:
            controller.kill()


def idle_connections(agents: int, controller: PinnedController, report: Report) -> None:
    """Compare the CPU time with as many silent connections as there will be agents, and without."""

    def share() -> float:
        used, began = controller.cpu_seconds(), time.monotonic()
        time.sleep(IDLE_SECONDS)
        return (controller.cpu_seconds() - used) / (time.monotonic() - began)

    without, open_before = share(), controller.descriptors()
    with contextlib.closing(Sockets(controller.endpoint, names(agents))):
        time.sleep(0.5)
        report.figure("share of the core that idle connections take", max(0.0, share() - without), "", 0.005)
    wait_for(lambda: controller.descriptors() <= open_before, "the controller has closed them", SETTLE_SECONDS)


def with_agents(sizes: Sizes, lines: Lines, cpu_seconds: Callable[[], float], report: Report) -> None:
    """Form a job, let it train, and let its ranks die; `cpu_seconds` has the controller's CPU time."""
    gc.collect()
    gc.disable()  # its pauses in this process are no latency of the controller
    simulation = Simulation(lines, sizes.agents, sizes.ranks)
    try:
        began = lines.now()
        simulation.start()
        simulation.until(simulation.complete, FORM_SECONDS, "all ranks train for the first time")
        report.figure("all ranks train for the first time", lines.now() - began, "s")
        calm(simulation)
        undisturbed(simulation, cpu_seconds, sizes, report)
        alone = single_slots(sizes)
        recoveries = [recover(simulation, {slot // sizes.ranks: [slot]}) for slot in alone]
        print_recovery("a rank dies", [statistics.median(each) for each in zip(*recoveries, strict=True)], report)
        hit = range(sizes.agents // 40, sizes.agents, 20)
        victims = {element: list(simulation.agents[element].ranks) for element in hit}
        print_recovery("5 % of the nodes die", recover(simulation, victims), report, plan_goal=500.0, break_goal=500.0)
        all_at_once(simulation, alone, report)
        report.figure("leases lost", len(simulation.lost), "", 0)
    finally:
        gc.enable()
        simulation.close()


def calm(simulation: Simulation) -> None:
    """Wait until all ranks train and the controller knows it."""
    simulation.until(simulation.settled, SETTLE_SECONDS, "the controller knows that every rank trains")
    simulation.run(CALM_SECONDS)


def undisturbed(simulation: Simulation, cpu_seconds: Callable[[], float], sizes: Sizes, report: Report) -> None:
    """Measure heartbeats, iterations and questions while nothing else happens."""
    simulation.counts, simulation.probing = Counts(), True
    used, own, began = cpu_seconds(), own_cpu_seconds(), simulation.lines.now()
    simulation.run(sizes.seconds)
    passed, counts = simulation.lines.now() - began, simulation.counts
    report.figure("share of the core while all train", (cpu_seconds() - used) / passed, "", 0.5)
    if sizes.sockets:
        report.figure("the simulator's share of its own core", (own_cpu_seconds() - own) / passed)
    report.figure("a heartbeat is late, at most", 1e3 * counts.late, "ms")
    report.figure("heartbeats", counts.heartbeats / passed, "1/s")
    report.figure("reports of steps", counts.steps / passed, "1/s")
    simulation.probing = False
    simulation.run(0.5)
    trips = sorted(counts.round_trips)
    if not trips or not simulation.complete():
        raise Failed("no question was answered, or the job did not train on")
    report.figure("an answer, median", 1e3 * statistics.median(trips), "ms")
    report.figure("an answer, 99th percentile", 1e3 * trips[int(0.99 * (len(trips) - 1))], "ms", 10.0)


def own_cpu_seconds() -> float:
    """Return the CPU time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def single_slots(sizes: Sizes) -> list[int]:
    """Return the slots of ranks that die alone, on different nodes."""
    elements = ((turn * 2 + 1) * sizes.agents // (2 * sizes.failures) for turn in range(sizes.failures))
    return [element * sizes.ranks + turn % sizes.ranks for turn, element in enumerate(elements)]


def recover(simulation: Simulation, victims: dict[int, list[int]]) -> tuple[float, float, float]:
    """Let ranks die. Return the seconds of the Break, of the plan, and until every rank trains again."""
    died = simulation.fail(victims)
    breaking = simulation.await_break(BREAK_SECONDS)
    if breaking.awaited:
        raise Failed(f"{len(breaking.awaited)} agents got no Break")
    planning = simulation.await_plan(PLAN_SECONDS)
    reported = breaking.sent_back[1]
    simulation.until(simulation.complete, REJOIN_SECONDS, "every rank trains again")
    rejoined = simulation.lines.now()
    calm(simulation)
    return breaking.last - died, planning.last - reported, rejoined - died


def print_recovery(
    what: str, parts: Sequence[float], report: Report, break_goal: float = 50.0, plan_goal: float = 150.0
) -> None:
    """Print the parts of a recovery beside their goals in milliseconds."""
    stopped, planned, rejoined = parts
    report.figure(f"{what}: Break at all agents", 1e3 * stopped, "ms", break_goal)
    report.figure(f"{what}: plans at all members", 1e3 * planned, "ms", plan_goal)
    report.figure(f"{what}: all train again", rejoined, "s")


def all_at_once(simulation: Simulation, but: Sequence[int], report: Report) -> None:
    """Let all ranks die. Those in `but` died before, so they wait before they start again, and do not count."""
    counted = set(range(simulation.total)) - set(but)
    died = simulation.fail({agent.element: list(agent.ranks) for agent in simulation.agents})
    simulation.until(lambda: counted <= simulation.started.keys(), START_SECONDS, "every rank has its order to start")
    last = max(simulation.started[slot] for slot in counted)
    report.figure("all ranks die: the last one has its order to start", 1e3 * (last - died), "ms", 2000.0)
    simulation.until(simulation.complete, REJOIN_SECONDS, "every rank trains after all died")
    simulation.until(simulation.settled, SETTLE_SECONDS, "the controller knows that every rank trains after all died")
    report.figure("all ranks die: all train again", simulation.lines.now() - died, "s")
    calm(simulation)
