"""The controller's log over months: its size, and a start on it, also where the newest saved state is damaged.

A cluster's life, day by day, with what the controller does to keep the log small: one job has all nodes and fails as
the nodes' MTBF gives; small jobs come and go; all nodes report their health every hour, and the plan is made anew at
each failure. Everything is folded and stored as the controller does it. Each day takes some 5 s of a core, and after
two weeks one is as the other.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from benchmarks.report import Report
from benchmarks.scale.history import DAY, Month, failures
from unicron_ctl.controller.core.state_snapshot import freeze, read_state
from unicron_ctl.controller.model.cluster_state import ClusterState
from unicron_ctl.controller.model.fold import fold
from unicron_ctl.controller.server.log_upkeep import FORGET_AGAIN_SECONDS, THIN_EVERY
from unicron_ctl.shared.consensus import survivors_plan
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Record
from unicron_ctl.shared.log.store import Store
from unicron_ctl.shared.protocol.structs import Settings
from unicron_ctl.shared.protocol.wire import Plan


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    days: int = 30
    nodes: int = 2048
    ranks: int = 8
    """Ranks of a node."""


SMALLEST = Sizes(1, 16, 2)
JOB = "1"
EPOCH = 1.7e9
PARTS = round(DAY / FORGET_AGAIN_SECONDS)  # of a day, at whose ends a base is made
SMALL_JOBS = 20  # a day
HEALTH = "8 GPUs answer; 2063 GB; ib0, ib1 up; 512000 MB free; kept by a time service"
WHY = "stays on 64 nodes (25.6 PFLOP/s): no other plan gains more than its transition costs; ann has 64 of 2048 nodes"


def measure(sizes: Sizes, report: Report) -> None:
    """Let the days pass, then start on the log."""
    with tempfile.TemporaryDirectory() as folder:
        year = Year(Path(folder), sizes.nodes, sizes.ranks)
        largest = 0.0
        while year.days < sizes.days:
            year.day()
            largest = max(largest, year.bytes() / 1e6)
            if year.days in (1, 2, 7, 14) or year.days % 30 == 0:
                report.text(f"day {year.days}: {year.state.last_event:,} events, {year.bytes() / 1e6:.0f} MB")
        year.part()
        largest = max(largest, year.bytes() / 1e6)
        report.figure(f"log of {sizes.nodes:,} nodes, {sizes.days} days, at most", largest, "MB", 200.0)
        report.figure("start", start_seconds(year.store, year.state), "s", 5.0)
        year.store._db.execute("DELETE FROM state WHERE event = (SELECT max(event) FROM state)")
        report.figure("start where the newer state is damaged", start_seconds(year.store, year.state), "s", 5.0)


def start_seconds(store: Store, state: ClusterState) -> float:
    """Return the CPU seconds until the state is there, as `Server` reads it."""
    began = time.process_time()
    saved = store.states()
    store.thin(saved[0][0] if saved else 0)
    found = read_state(store)
    seconds = time.process_time() - began
    assert found == state, "the log folds to another state"
    return seconds


class QuickStore(Store):
    """A store that waits for no disk: a year has hundreds of thousands of commits that would."""

    def _transaction(self, lasting: bool = False) -> AbstractContextManager[None]:
        return super()._transaction(False)


class Year:
    """A cluster's log, which grows by a day with each call of `day`."""

    def __init__(self, folder: Path, nodes: int, ranks: int, seed: int = 0) -> None:
        self.nodes, self.ranks, self.seed, self.parts = nodes, ranks, seed, 0
        self.store = QuickStore(folder / "events.sqlite")
        self._log(EPOCH, JOB, _beginning(nodes, ranks))
        self.month = Month(self.store, nodes, ranks)
        self.month.start = EPOCH
        self._thinned = self.state.last_event

    @property
    def state(self) -> ClusterState:
        """The state that the log folds to."""
        return self.month.state

    def bytes(self) -> int:
        """Return the size of the files on the disk."""
        self.store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return sum(path.stat().st_size for path in self.store.path.parent.glob("events.sqlite*"))

    def day(self) -> None:
        """Let one more day pass."""
        for _ in range(PARTS):
            self.part()
            self._housekeeping()

    def part(self) -> None:
        """Let the time between two bases pass."""
        begin, length = self.now, DAY / PARTS
        self.month.start = begin
        for failure in failures(self.nodes, self.ranks, 1.0 / PARTS, self.seed + self.parts):
            self.month.fail(failure, self.ranks)
            self._log(begin + failure.at, JOB, self._aftermath(failure.element))
        for number in range(SMALL_JOBS // PARTS):
            job = f"{self.parts + 2}{number:02}"
            self._log(begin + number * length / SMALL_JOBS, job, self._small_job())
        for at in range(0, round(length), 3600):
            self._log(begin + at, "", self._reports(begin + at))
        self.parts += 1

    @property
    def now(self) -> float:
        """Seconds since the epoch."""
        return EPOCH + self.parts * DAY / PARTS

    @property
    def days(self) -> int:
        """Days that have passed."""
        return self.parts // PARTS

    def _housekeeping(self) -> None:
        """Thin, forget and save as `Server.flush` does."""
        if self.state.last_event - self._thinned >= THIN_EVERY:
            self.store.thin(self._thinned)
            self._thinned = self.state.last_event
        for _ in self.store.forget(self.now, self.state.last_event):
            pass
        self.store.save_state(self.state.last_event, freeze(self.state))

    def _log(self, at: float, job: str, story: Iterator[Record]) -> None:
        state = self.state if hasattr(self, "month") else None
        events, number = [], state.last_event if state else 0
        for record in story:
            number += 1
            event = records.Event(number, at, job, 0, record)
            if state:
                fold(state, event)
            events.append(event)
        self.store.append(events)

    def _reports(self, at: float) -> Iterator[Record]:
        for node in range(self.nodes):
            yield records.NodeHealth(node=f"n{node}", source="interval", verdict="good", checked_at=at, reason=HEALTH)

    def _aftermath(self, element: int) -> Iterator[Record]:
        """Yield what is asked of Slurm, and the plan."""
        node = f"n{element}"
        yield records.NodeLost(node=node, element=element, reason="silent, and Slurm has it down")
        yield records.SlurmAction(action="requeue", element=element, node=node, slurm_reason="unicron: lost")
        yield records.SlurmDone(action="requeue", element=element, node=node)
        yield records.ActionObserved(would=f"down {node}", action="down", node=node, element=element)
        reasons = {str(job): WHY for job in range(20)}
        yield records.ClusterReplanned(
            assignment=dict.fromkeys(reasons, 64),
            reasons=reasons,
            objective=1e20,
            waf=1e18,
            inputs=WHY * 10,
            trigger=WHY * 20,
            spares=0,
            looked_up=True,
        )

    def _small_job(self) -> Iterator[Record]:
        yield from _beginning(8, 8)
        yield records.JobEnded(code=0, reason="all ranks have finished")


def _beginning(nodes: int, ranks: int) -> Iterator[Record]:
    """Yield a job's start: agents register, ranks get ready, and all enter the first generation."""
    yield records.JobRegistered(
        settings=Settings(name="pretrain", user="ann", max_nodes=nodes, ranks_per_node=ranks), reason="its first agent"
    )
    slots = range(nodes * ranks)
    agents = [f"{number:032x}" for number in range(nodes)]
    own = [list(slots[number * ranks : (number + 1) * ranks]) for number in range(nodes)]
    for number, agent in enumerate(agents):
        address = f"tcp://n{number}:40000"
        yield records.AgentRegistered(
            element=number, agent=agent, node=f"n{number}", address=address, slots=own[number]
        )
        yield records.RanksReady(agent=agent, incarnations=dict.fromkeys(own[number], 1))
    plan = Plan(
        generation=1,
        members=list(slots),
        store="n0:29500",
        prefix="g1",
        assignment=survivors_plan.deal(slots, list(slots)),
    )
    crews = [records.Crew(agent, mine, [1] * ranks) for agent, mine in zip(agents, own, strict=True)]
    yield records.PlanMade(plan=plan, crews=crews, reason="all are ready")
    yield records.GenerationEntered(members=list(slots))
    yield records.Step(
        iteration=0, loss=1.0, seconds=1.0, ranks=len(slots), nodes=nodes, flops=1e15, train_iterations=10**9,
        micro_batches=len(slots), computed=len(slots),
    )  # fmt: skip
