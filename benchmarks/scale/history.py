"""A month of a job's life in the controller's log, to measure how long a start takes after it.

What happens is drawn here and knows nothing of the log's records; :func:`fill_month` alone writes them.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from unicron_ctl.controller.core.state_snapshot import freeze, read_state
from unicron_ctl.controller.model.fold import fold
from unicron_ctl.controller.model.job_state import Phase
from unicron_ctl.controller.server.log_upkeep import SAVE_SECONDS
from unicron_ctl.shared.consensus import survivors_plan
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.store import Store
from unicron_ctl.shared.log.thinning import KEPT_FIRST, KEPT_LAST
from unicron_ctl.shared.protocol.wire import Plan

DAYS = 30
DAY = 86400.0
MTBF_NODE_HOURS = 1000.0  # the configuration's default
NODE_SHARE = 0.1  # of the failures take the whole node, the others one rank
ITERATION_SECONDS = 1.0


@dataclass(frozen=True)
class Failure:
    """`at` seconds after the month's start, a rank dies, or its whole node."""

    at: float
    element: int
    slot: int
    node: bool


def failures(agents: int, ranks: int, days: float = DAYS, seed: int = 0) -> Iterator[Failure]:
    """Yield a month's failures in order: exponential times between failures, as many as the nodes' MTBF gives."""
    draw = random.Random(seed)
    rate = agents / (MTBF_NODE_HOURS * 3600.0)
    at = draw.expovariate(rate)
    while at < days * DAY:
        element = draw.randrange(agents)
        yield Failure(at, element, element * ranks + draw.randrange(ranks), draw.random() < NODE_SHARE)
        at += draw.expovariate(rate)


def fill_month(state_dir: Path, agents: int, ranks: int) -> int | None:
    """Write a month's events into the log of the stopped controller in `state_dir`, after what it holds: the iterations
    that thinning leaves, and for each of :func:`failures` what the controller records from its detection until all are
    members again. The state is saved as the controller saves it, so the last minutes are not in it.

    Returns how many events were written; None when the log holds no job that runs with all its ranks.
    """
    store = Store(state_dir / "events.sqlite")
    store.term = store.holder().number  # the stopped controller's, as if it had written the month
    try:
        month = Month(store, agents, ranks)
        if month.job is None:
            return None
        began, story = month.state.last_event, list(failures(agents, ranks))
        before = [failure for failure in story if failure.at < DAYS * DAY - SAVE_SECONDS]
        for failure in before:
            month.fail(failure, ranks)
        store.save_state(month.state.last_event, freeze(month.state))
        for failure in story[len(before) :]:
            month.fail(failure, ranks)
        return month.state.last_event - began
    finally:
        store.close()
        os.sync()  # a gigabyte was written just now; a start does not wait for the disk to have taken a month


class Month:
    """The log of one job while time passes."""

    def __init__(self, store: Store, agents: int, ranks: int) -> None:
        self.store, self.state = store, read_state(store)
        jobs = (job for job in self.state.jobs.values() if job.phase is Phase.RUNNING and not job.over)
        self.job = next((job for job in jobs if len(job.members) == agents * ranks), None)
        self.start = time.time() - DAYS * DAY

    def fail(self, failure: Failure, ranks: int) -> None:
        """A rank or a node dies, the others go on, and it is a member again; iterations before and after."""
        job, at = self.job, self.start + failure.at
        assert job is not None and job.plan is not None
        first = failure.element * ranks
        slots = list(range(first, first + ranks)) if failure.node else [failure.slot]
        lost = [records.LostProcess(s, job.members[s].agent, job.members[s].incarnation) for s in slots]
        agent, incarnation = lost[0].agent, lost[0].incarnation + 1
        survivors = [slot for slot in job.members if slot not in slots]
        detected = records.FailureDetected(
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
        number = job.generation
        plan = replace(job.plan, number + 1, survivors, survivors_plan.deal(range(len(job.members)), survivors))
        whole = replace(job.plan, number + 2, sorted(job.members), {})
        story: list[records.Record] = [
            detected,
            *(records.RankStart(slot=slot, incarnation=incarnation, not_before=at) for slot in slots),
            records.Break(number=number, lost=lost, reason="a rank died"),
            records.PlanMade(plan=plan, crews=self._crews(survivors), reason="the others go on"),
            records.GenerationEntered(members=survivors),
            *self._steps(),
            records.RanksReady(agent=agent, incarnations=dict.fromkeys(slots, incarnation)),
            records.Offer(
                plan=whole,
                crews=[records.Crew(agent, slots, [incarnation] * len(slots))],
                joiners=slots,
                leavers=[],
            ),
            records.GenerationEntered(members=whole.members),
            *self._steps(),
        ]
        events = []
        for record in story:
            event = records.Event(self.state.last_event + 1, at, job.job, job.generation, record)
            fold(self.state, event)
            events.append(event)
        self.store.append(events)

    def _crews(self, slots: list[int]) -> list[records.Crew]:
        assert self.job is not None
        found: dict[str, records.Crew] = {}
        for slot in slots:
            agent, incarnation = self.job.members[slot]
            crew = found.setdefault(agent, records.Crew(agent, [], []))
            crew.slots.append(slot)
            crew.incarnations.append(incarnation)
        return list(found.values())

    def _steps(self) -> list[records.Record]:
        """Return what is left of a run of iterations when the log is thinned."""
        assert self.job is not None
        steps = range(self.job.iteration + 1, self.job.iteration + 1 + KEPT_FIRST + KEPT_LAST)
        return [
            records.Step(
                iteration=iteration,
                loss=1.0,
                seconds=ITERATION_SECONDS,
                ranks=len(self.job.members),
                nodes=len(self.job.agents),
                flops=1e15,
                train_iterations=10**9,
                micro_batches=len(self.job.members),
                computed=len(self.job.members),
            )
            for iteration in steps
        ]


def replace(plan: Plan, generation: int, members: list[int], assignment: dict[int, list[int]]) -> Plan:
    """The plan of another generation."""
    return msgspec.structs.replace(plan, generation=generation, members=members, assignment=assignment, joiners=[])
