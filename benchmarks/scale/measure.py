"""One size measured: a controller is started, a job formed, watched and hurt, and the controller started again."""

from __future__ import annotations

import gc
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.scale.history import fill_month
from benchmarks.scale.lines import Failed, Sockets
from benchmarks.scale.process import Controller, NotStarted
from benchmarks.scale.simulation import Counts, Simulation, names
from benchmarks.scale.zmtp import Connection
from unicron_ctl.shared.log.store import StoreError
from unicron_ctl.shared.protocol.wire import BadMessage

FORM_SECONDS = 120.0  # limits of the waits
BREAK_SECONDS, PLAN_SECONDS, START_SECONDS, REJOIN_SECONDS, SETTLE_SECONDS = 20.0, 30.0, 30.0, 60.0, 60.0
CALM_SECONDS = 3.0  # between two measurements
IDLE_SECONDS = 4.0
MASS_SHARE = 0.05  # of the nodes


@dataclass(frozen=True)
class Options:
    """Sizes of a run.

    ranks: per agent. seconds: of the steady window. failures: of single ranks, one after the other; the median
    counts. metrics: seconds between the nodes' metrics, 0 for none. progress: statuses as often as the controller
    allows.
    """

    ranks: int = 8
    seconds: float = 20.0
    failures: int = 3
    metrics: float = 0.0
    progress: bool = False


class Figures(msgspec.Struct):
    """Figures of one size: times in the unit that their name ends with, None where a step failed."""

    agents: int
    ranks: int
    ranks_per_agent: int
    failed: list[str] = []
    """Steps that failed, each with the reason."""
    goals: dict[str, bool | None] = {}
    """Whether each goal is met; None where it was not reached."""
    idle_cpu_share: float | None = None
    cpu_share: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    break_ms: float | None = None
    report_ms: float | None = None
    plan_ms: float | None = None
    rejoin_seconds: float | None = None
    mass_break_ms: float | None = None
    mass_report_ms: float | None = None
    mass_plan_ms: float | None = None
    mass_rejoin_seconds: float | None = None
    all_start_ms: float | None = None
    all_rejoin_seconds: float | None = None
    memory_mib: float | None = None
    form_seconds: float | None = None
    leases_lost: float | None = None
    refused: float | None = None
    heartbeats_per_second: float | None = None
    steps_per_second: float | None = None
    progress_seconds: float | None = None
    simulator_cpu_share: float | None = None
    simulator_late_ms: float | None = None
    first_start_seconds: float | None = None
    stop_seconds: float | None = None
    events_added: float | None = None
    start_seconds: float | None = None

    def note(self, figures: Mapping[str, float | None]) -> None:
        """Set several figures."""
        for name, value in figures.items():
            setattr(self, name, round(value, 4) if isinstance(value, float) else value)


def measure(agents: int, options: Options, cpus: set[int]) -> Figures:
    """Measure one size."""
    figures = Figures(agents, agents * options.ranks, options.ranks)
    failed = figures.failed
    with tempfile.TemporaryDirectory(prefix="unicron-scale-") as folder:
        controller = Controller(Path(folder), cpus, metrics=options.metrics)
        try:
            if _step(failed, "start", lambda: figures.note({"first_start_seconds": controller.start()})):
                _step(failed, "idle connections", lambda: _idle(agents, controller, figures))
                with _quiet_collector():
                    _live(agents, options, controller, figures)
                _step(failed, "restart", lambda: _restart(agents, options, controller, figures))
        finally:
            controller.kill()
    return figures


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """The garbage collector's pauses in this process are no latency of the controller."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _step(failed: list[str], name: str, work: Callable[[], object]) -> bool:
    """False when the step failed; why is added to `failed`."""
    try:
        work()
    except (Failed, NotStarted, BadMessage, StoreError, OSError) as error:
        failed.append(f"{name}: {error}")
        return False
    return True


def _live(agents: int, options: Options, controller: Controller, figures: Figures) -> None:
    """Everything that needs agents; a step that fails ends it."""
    made: list[Simulation] = []
    if not _step(
        figures.failed,
        "connections",
        lambda: made.append(
            Simulation(Sockets(controller.endpoint, names(agents)), agents, options.ranks, options.progress)
        ),
    ):
        return
    simulation = made[0]
    try:
        for name, work in (
            ("form", lambda: _form(simulation, figures)),
            ("steady", lambda: _steady(simulation, controller, options.seconds, figures)),
            ("failures", lambda: _failures(simulation, options, figures)),
            ("mass failure", lambda: _mass_failure(simulation, options, figures)),
            ("all at once", lambda: _all_at_once(simulation, options, figures)),
        ):
            if not _step(figures.failed, name, work):
                break
        figures.note({"leases_lost": len(simulation.lost), "progress_seconds": simulation.progress_seconds})
        if controller.running:
            figures.note({"memory_mib": controller.peak_mib()})
        elif controller.complaint():
            print(f"benchmarks.scale: the controller has ended: {controller.complaint()}", file=sys.stderr, flush=True)
        _step(figures.failed, "stop", lambda: figures.note({"stop_seconds": controller.stop()}))
    finally:
        simulation.close()


def _idle(agents: int, controller: Controller, figures: Figures) -> None:
    """Measure the cost of as many silent connections as there will be agents, beyond an idle controller."""
    host, port = controller.endpoint
    alone = _share_while_asleep(controller)
    idle: list[Connection] = []
    try:
        for index in range(agents):
            idle.append(Connection(host, port, f"idle-{index}".encode()))
        time.sleep(0.5)
        figures.note({"idle_cpu_share": max(0.0, _share_while_asleep(controller) - alone)})
    finally:
        for connection in idle:
            connection.close()
    time.sleep(0.5)


def _share_while_asleep(controller: Controller) -> float:
    cpu, began = controller.cpu_seconds(), time.monotonic()
    time.sleep(IDLE_SECONDS)
    return (controller.cpu_seconds() - cpu) / (time.monotonic() - began)


def _form(simulation: Simulation, figures: Figures) -> None:
    began = time.monotonic()
    simulation.start()
    simulation.until(simulation.complete, FORM_SECONDS, "all ranks train for the first time")
    figures.note({"form_seconds": time.monotonic() - began})
    _calm(simulation)


def _calm(simulation: Simulation) -> None:
    """All train, and the controller has heard it."""
    simulation.until(simulation.settled, SETTLE_SECONDS, "the controller has heard that every rank trains")
    simulation.run(CALM_SECONDS)


def _steady(simulation: Simulation, controller: Controller, seconds: float, figures: Figures) -> None:
    """Heartbeats, iterations and questions; nothing else happens."""
    refused = simulation.counts.refused
    simulation.counts, simulation.probing = Counts(), True
    cpu, own, began = controller.cpu_seconds(), _own_cpu(), time.monotonic()
    simulation.run(seconds)
    wall = time.monotonic() - began
    counts = simulation.counts
    figures.note(
        {
            "cpu_share": (controller.cpu_seconds() - cpu) / wall,
            "simulator_cpu_share": (_own_cpu() - own) / wall,
            "simulator_late_ms": 1e3 * counts.late,
            "heartbeats_per_second": counts.heartbeats / wall,
            "steps_per_second": counts.steps / wall,
            "refused": refused + counts.refused,
        }
    )
    simulation.probing = False
    simulation.run(0.5)
    trips = sorted(counts.round_trips)
    if not trips:
        raise Failed("no question was answered")
    figures.note({"p50_ms": 1e3 * median(trips), "p99_ms": 1e3 * trips[int(0.99 * (len(trips) - 1))]})
    if not simulation.complete():
        raise Failed("the job did not train on undisturbed")


def _own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _failures(simulation: Simulation, options: Options, figures: Figures) -> None:
    """Single ranks of different nodes die, one after the other."""
    found = [
        _recovery(simulation, {slot // options.ranks: [slot]}) for slot in _singles(len(simulation.agents), options)
    ]
    for name in found[0]:
        figures.note({name: median(each[name] for each in found)})


def _singles(agents: int, options: Options) -> list[int]:
    """The slots of ranks that die alone."""
    elements = ((turn * 2 + 1) * agents // (2 * options.failures) for turn in range(options.failures))
    return [element * options.ranks + turn % options.ranks for turn, element in enumerate(elements)]


def _all_at_once(simulation: Simulation, options: Options, figures: Figures) -> None:
    """Every rank of the job dies: until the last one is told to start again, and until all train.

    Those that died alone before are not counted: a rank that dies twice waits before it is started again.
    """
    counted = set(range(simulation.total)) - set(_singles(len(simulation.agents), options))
    died = simulation.fail({agent.element: list(agent.ranks) for agent in simulation.agents})
    simulation.until(lambda: counted <= simulation.started.keys(), START_SECONDS, "every rank is told to start again")
    figures.note({"all_start_ms": 1e3 * (max(simulation.started[slot] for slot in counted) - died)})
    simulation.until(simulation.complete, REJOIN_SECONDS, "every rank trains again after all died")
    simulation.until(simulation.settled, SETTLE_SECONDS, "the controller has heard that every rank trains again")
    figures.note({"all_rejoin_seconds": simulation.lines.now() - died})
    _calm(simulation)


def _mass_failure(simulation: Simulation, options: Options, figures: Figures) -> None:
    """All ranks of a share of the nodes, spread over the job, die at once."""
    count = len(simulation.agents)
    hit = range(count // 40, count, round(1 / MASS_SHARE))
    victims = {element: list(simulation.agents[element].ranks) for element in hit}
    figures.note({f"mass_{name}": value for name, value in _recovery(simulation, victims).items()})


def _recovery(simulation: Simulation, victims: dict[int, list[int]]) -> dict[str, float]:
    """Return how long the parts of one recovery took.

    break_ms: from the first report of a death until the last agent that trains has the Break. report_ms: the sending
    of all reports; plan_ms: from the last of them until the last member has the plan. rejoin_seconds: from the death
    until every rank trains again.
    """
    died = simulation.fail(victims)
    simulation.until(
        lambda: simulation.breaking is not None and simulation.breaking.sent_back[1] > 0,
        BREAK_SECONDS,
        "the Break is at all agents that train",
    )
    breaking = simulation.breaking
    assert breaking is not None
    if breaking.awaited:
        raise Failed(f"{len(breaking.awaited)} agents got no Break")
    simulation.until(
        lambda: simulation.planning is not None and not simulation.planning.awaited,
        PLAN_SECONDS,
        "the plan is at all members",
    )
    planning = simulation.planning
    assert planning is not None
    reports_began, reports_ended = breaking.sent_back
    simulation.until(simulation.complete, REJOIN_SECONDS, "every rank trains again")
    rejoined = simulation.lines.now()
    _calm(simulation)
    return {
        "break_ms": 1e3 * (breaking.last - died),
        "report_ms": 1e3 * (reports_ended - reports_began),
        "plan_ms": 1e3 * (planning.last - reports_ended),
        "rejoin_seconds": rejoined - died,
    }


def _restart(agents: int, options: Options, controller: Controller, figures: Figures) -> None:
    """A start on the log of this run and a month of events."""
    controller.stop()  # where nothing came of the agents
    figures.note({"events_added": fill_month(controller.state, agents, options.ranks)})
    if figures.events_added is None:
        raise Failed("there is no month to start on: the log holds no job that runs with all its ranks")
    figures.note({"start_seconds": controller.start()})
    controller.stop()
