"""The controller's log over months: its size, and a start on it, also if the newest saved state is damaged.

One job has all nodes and fails at the rate of the nodes' MTBF; small jobs come and go; all nodes report their health
every hour; each failure leads to a new plan. Records are folded, stored, thinned and forgotten as the controller does.
A day takes some 5 s of a core, and after two weeks all days are alike.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.report import Report
from tests.support.controller import Controller
from unicron_ctl.controller.core.state_snapshot import freeze, read_state
from unicron_ctl.controller.model.cluster_state import ClusterState
from unicron_ctl.controller.model.fold import fold
from unicron_ctl.controller.server.log_upkeep import FORGET_AGAIN_SECONDS, THIN_EVERY
from unicron_ctl.shared.consensus import survivors_plan
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Record
from unicron_ctl.shared.log.store import Store
from unicron_ctl.shared.log.thinning import KEPT_FIRST, KEPT_LAST
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
DAY = 86400.0
PARTS = round(DAY / FORGET_AGAIN_SECONDS)  # parts of a day, each of which ends with a saved state
MTBF_NODE_HOURS = 1000.0  # the configuration's default
NODE_SHARE = 0.1  # of the failures take a whole node, the others one rank
SMALL_JOBS = 20  # of a day
HEALTH = "8 GPUs answer; 2063 GB; ib0, ib1 up; 512000 MB free; kept by a time service"
WHY = "stays on 64 nodes (25.6 PFLOP/s): no other plan gains more than its transition costs; ann has 64 of 2048 nodes"


def measure(sizes: Sizes, report: Report) -> None:
    """Let the days pass, then start on the log."""
    with tempfile.TemporaryDirectory() as folder:
        year = Year(Path(folder, "state"), sizes.nodes, sizes.ranks)
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
        year.store.save_state(year.state.last_event, freeze(year.state))
        year.store.close()
        report.figure("a unicrond starts and answers, by the clock", clock_seconds(Path(folder)), "s", 1.0)


def start_seconds(store: Store, state: ClusterState) -> float:
    """Return the CPU seconds until the state is there, as `Server` reads it."""
    began = time.process_time()
    saved = store.states()
    store.thin(saved[0][0] if saved else 0)
    found = read_state(store)
    seconds = time.process_time() - began
    assert found == state, "the log folds to another state"
    return seconds


def clock_seconds(folder: Path) -> float:
    """Return the seconds from the start of a unicrond until it has answered."""
    began = time.monotonic()
    controller = Controller(folder)
    try:
        controller.ask("ping")
        seconds = time.monotonic() - began
        assert controller.job(JOB), "the job of the log is not known"
        return seconds
    finally:
        controller.kill()


@dataclass(frozen=True)
class Failure:
    """A rank dies, or its whole node."""

    at: float
    """Seconds after the beginning."""
    element: int
    slot: int
    node: bool


def failures(nodes: int, ranks: int, days: float, seed: int = 0) -> Iterator[Failure]:
    """Yield the failures in order, with exponential times between them by the nodes' MTBF."""
    draw = random.Random(seed)
    rate = nodes / (MTBF_NODE_HOURS * 3600.0)
    at = draw.expovariate(rate)
    while at < days * DAY:
        element = draw.randrange(nodes)
        yield Failure(at, element, element * ranks + draw.randrange(ranks), draw.random() < NODE_SHARE)
        at += draw.expovariate(rate)


class QuickStore(Store):
    """A store that does not wait for the disk: a year has hundreds of thousands of commits."""

    def _transaction(self, lasting: bool = False) -> AbstractContextManager[None]:
        return super()._transaction(False)


class Year:
    """A cluster's log, which grows by a day with each call of `day`."""

    def __init__(self, folder: Path, nodes: int, ranks: int, seed: int = 0) -> None:
        self.nodes, self.ranks, self.seed, self.parts = nodes, ranks, seed, 0
        self.store, self.state = QuickStore(folder / "events.sqlite"), ClusterState()
        self._log(EPOCH, JOB, _beginning(nodes, ranks))
        self.job = self.state.jobs[JOB]
        self._thinned = self.state.last_event

    def bytes(self) -> int:
        """Return the size of the files on the disk."""
        self.store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return sum(path.stat().st_size for path in self.store.path.parent.glob("events.sqlite*"))

    def day(self) -> None:
        """Let a day pass."""
        for _ in range(PARTS):
            self.part()
            self._housekeeping()

    def part(self) -> None:
        """Let a part of a day pass."""
        begin, length = self.now, DAY / PARTS
        for failure in failures(self.nodes, self.ranks, 1.0 / PARTS, self.seed + self.parts):
            at = begin + failure.at
            self._log(at, JOB, self._recovery(failure, at))
            self._log(at, JOB, self._aftermath(failure.element))
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

    def _log(self, at: float, job: str, story: Iterable[Record]) -> None:
        events = []
        for record in story:
            known = self.state.jobs.get(job)
            event = records.Event(self.state.last_event + 1, at, job, known.generation if known else 0, record)
            fold(self.state, event)
            events.append(event)
        self.store.append(events)

    def _recovery(self, failure: Failure, at: float) -> Iterator[Record]:
        """Yield the records of a failure until all ranks are members again, with iterations before and after."""
        job = self.job
        assert job.plan is not None
        first = failure.element * self.ranks
        slots = list(range(first, first + self.ranks)) if failure.node else [failure.slot]
        lost = [records.LostProcess(slot, *job.members[slot]) for slot in slots]
        agent, incarnation = lost[0].agent, lost[0].incarnation + 1
        survivors = [slot for slot in job.members if slot not in slots]
        number = job.generation
        plan = replace(job.plan, number + 1, survivors, survivors_plan.deal(range(len(job.members)), survivors))
        whole = replace(job.plan, number + 2, sorted(job.members), {})
        own = records.Crew(agent, slots, [incarnation] * len(slots))
        yield records.FailureDetected(
            kind_of_failure="rank",
            slots=slots,
            severity=2,
            cause="killed_from_outside",
            action="restart",
            detected_by="process exit",
            source="agent",
            element=failure.element,
            member=True,
            leave_out=dict.fromkeys(slots, "exited with -9"),
            exit_code=-9,
        )
        yield from (records.RankStart(slot=slot, incarnation=incarnation, not_before=at) for slot in slots)
        yield records.Break(number=number, lost=lost, reason="a rank died")
        yield records.PlanMade(plan=plan, crews=self._crews(survivors), reason="the others go on")
        yield records.GenerationEntered(members=survivors)
        yield from self._steps()
        yield records.RanksReady(agent=agent, incarnations=dict.fromkeys(slots, incarnation))
        yield records.Offer(plan=whole, crews=[own], joiners=slots, leavers=[])
        yield records.GenerationEntered(members=whole.members)
        yield from self._steps()

    def _crews(self, slots: list[int]) -> list[records.Crew]:
        found: dict[str, records.Crew] = {}
        for slot in slots:
            agent, incarnation = self.job.members[slot]
            crew = found.setdefault(agent, records.Crew(agent, [], []))
            crew.slots.append(slot)
            crew.incarnations.append(incarnation)
        return list(found.values())

    def _steps(self) -> Iterator[Record]:
        """Yield the records of iterations that thinning leaves."""
        for _ in range(KEPT_FIRST + KEPT_LAST):
            yield _step(self.job.iteration + 1, len(self.job.members), len(self.job.agents))

    def _reports(self, at: float) -> Iterator[Record]:
        for node in range(self.nodes):
            yield records.NodeHealth(node=f"n{node}", source="interval", verdict="good", checked_at=at, reason=HEALTH)

    def _aftermath(self, element: int) -> Iterator[Record]:
        """Yield the requests to Slurm, and the plan."""
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
    """Yield a job's start, until all ranks are in the first generation."""
    settings = Settings(name="pretrain", user="ann", max_nodes=nodes, ranks_per_node=ranks)
    yield records.JobRegistered(settings=settings, reason="its first agent")
    slots = list(range(nodes * ranks))
    crews = []
    for number in range(nodes):
        crew = records.Crew(f"{number:032x}", slots[number * ranks : (number + 1) * ranks], [1] * ranks)
        crews.append(crew)
        address = f"tcp://n{number}:40000"
        yield records.AgentRegistered(
            element=number, agent=crew.agent, node=f"n{number}", address=address, slots=crew.slots
        )
        yield records.RanksReady(agent=crew.agent, incarnations=dict.fromkeys(crew.slots, 1))
    assignment = survivors_plan.deal(slots, slots)
    plan = Plan(generation=1, members=slots, store="n0:29500", prefix="g1", assignment=assignment)
    yield records.PlanMade(plan=plan, crews=crews, reason="all are ready")
    yield records.GenerationEntered(members=slots)
    yield _step(0, len(slots), nodes)


def _step(iteration: int, ranks: int, nodes: int) -> Record:
    """Return the record of an iteration in which each rank computes a micro-batch."""
    work = {"train_iterations": 10**9, "micro_batches": ranks, "computed": ranks, "flops": 1e15}
    return records.Step(iteration=iteration, loss=1.0, seconds=1.0, ranks=ranks, nodes=nodes, **work)


def replace(plan: Plan, generation: int, members: list[int], assignment: dict[int, list[int]]) -> Plan:
    """Return the plan of another generation."""
    return msgspec.structs.replace(plan, generation=generation, members=members, assignment=assignment, joiners=[])
