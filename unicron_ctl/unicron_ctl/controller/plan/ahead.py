"""The plan for the next event is there before the event: at a failure it is one look-up (docs/design/planning.md).

The planner's look-ahead table is kept fresh in the background for the situation after the last plan. When the next
situation differs from that one by exactly one event of the table, its plan is taken from there; otherwise it is solved
as usual. So it is where a job can run in several layouts: what another one costs is known only when something happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unicron_ctl.controller.plan import planning
from unicron_ctl.controller.plan.planning import JobInput
from unicron_planner.ahead.lookahead import Keeper
from unicron_planner.solver.solve import Plan

REFRESH_RATIO = 0.05  # a table is made anew when a measured rate has moved by more than this


class Aheads:
    """The look-ahead of each pool of nodes, by the jobs that share it."""

    def __init__(self) -> None:
        self._known: dict[frozenset[str], Ahead] = {}

    def of(self, jobs: Sequence[JobInput]) -> Ahead:
        """The look-ahead that has planned for most of these jobs; a new one when none has."""
        names = frozenset(job.job for job in jobs)
        nearest = max(self._known, key=lambda known: (len(known & names), sorted(known)), default=frozenset())
        found = self._known.pop(nearest) if nearest & names else Ahead()
        self._known[names] = found
        return found

    def close_others(self, pools: Sequence[Sequence[JobInput]]) -> None:
        """Closes the tables of pools that are no more."""
        names = {frozenset(job.job for job in jobs) for jobs in pools}
        for gone in self._known.keys() - names:
            self._known.pop(gone).close()


class Ahead:
    """Plans, from the table where it can. Not thread-safe; its table is made in a thread of its own."""

    def __init__(self) -> None:
        self._keeper: Keeper | None = None  # no thread before there is anything to plan
        self._base: dict[str, JobInput] = {}
        self._nodes = 0

    def plan(
        self, jobs: Sequence[JobInput], nodes: int, mtbf_node_hours: float, transition_seconds: float
    ) -> tuple[Plan, bool]:
        """The plan, and whether it was looked up."""
        found = self._look_up(jobs, nodes)
        if found is not None and not any(job.holds_state and not found.assignment[job.job] for job in jobs):
            return found, True
        return planning.plan(jobs, nodes, mtbf_node_hours, transition_seconds), False

    def prepare(
        self,
        jobs: Sequence[JobInput],
        assignment: dict[str, int],
        nodes: int,
        mtbf_node_hours: float,
        transition_seconds: float,
    ) -> None:
        """Prepares the table for what may come once `assignment` is carried out."""
        settled = {
            job.job: replace(job, nodes=assignment.get(job.job, 0), alive=assignment.get(job.job, 0)) for job in jobs
        }
        if (
            not settled
            or any(len(job.layouts) > 1 for job in jobs)
            or (nodes == self._nodes and self._close_to(settled))
        ):
            return
        self._base, self._nodes = settled, nodes
        self._keeper = self._keeper or Keeper()
        self._keeper.update(planning.scenario(list(settled.values()), nodes, mtbf_node_hours, transition_seconds))

    def close(self) -> None:
        """End the thread."""
        if self._keeper is not None:
            self._keeper.stop()

    def _close_to(self, settled: dict[str, JobInput]) -> bool:
        """The table's situation still holds: the same but for small changes of measured rates."""
        if settled.keys() != self._base.keys():
            return False
        for name, job in settled.items():
            known = self._base[name]
            if replace(job, rate=known.rate, rates=known.rates, layouts=known.layouts) != known:
                return False
            if abs(job.rate - known.rate) > REFRESH_RATIO * known.rate or job.rates.keys() != known.rates.keys():
                return False
        return True

    def _look_up(self, jobs: Sequence[JobInput], nodes: int) -> Plan | None:
        event = event_between(self._base, self._nodes, {job.job: job for job in jobs}, nodes)
        if event is None or self._keeper is None:
            return None
        entry, ready = self._keeper.get(event)
        return entry.plan if ready else None


def event_between(
    base: dict[str, JobInput], base_nodes: int, now: dict[str, JobInput], nodes: int
) -> tuple[str, ...] | None:
    """The one event that leads from the settled situation to the present one; None when it is none or more than one."""
    gone = base.keys() - now.keys()
    if now.keys() - base.keys() or not now:
        return None
    for name, job in now.items():
        known = base[name]
        if len(job.layouts) > 1 or _fixed(job) != _fixed(known):
            return None
    lost = [name for name, job in now.items() for _ in range(job.nodes - job.alive)]
    if gone:
        return ("finish", *gone) if len(gone) == 1 and not lost and nodes == base_nodes else None
    if lost:
        return ("lost", *sorted(lost)) if len(lost) <= 2 and nodes == base_nodes - len(lost) else None
    return {-1: ("spare",), 1: ("join",)}.get(nodes - base_nodes)


def _fixed(job: JobInput) -> tuple[float, ...]:
    """What no event changes."""
    return job.nodes, job.min_nodes, job.max_nodes, job.working, job.wait_seconds, job.weight, job.unit, job.block
