"""The only place where the controller meets the planner (docs/design/planning.md): nodes for each job, and the plan for
the next event before it happens, so that at a failure it is one look-up.

The planner's look-ahead table is kept fresh in the background for the situation after the last plan. If the next
situation differs from that one by exactly one event of the table, its plan is taken from there; otherwise it is solved.
It is always solved if a job can run in several layouts, because the cost of a change is known only after the event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from unicron_detector.words import plural
from unicron_planner.ahead.lookahead import Keeper
from unicron_planner.problem.objective import Job, Scenario
from unicron_planner.problem.throughput import fit_flops
from unicron_planner.solver.plan import Plan, plan_of
from unicron_planner.solver.solve import best, by_owner
from unicron_planner.solver.spares import worth

NOWHERE: Mapping[str, int] = {}
REFRESH_RATIO = 0.05  # a larger change of a measured rate needs a new table
NOMINAL_RATE = 1e9  # FLOP/s per node of a job before anything has been measured: only ratios matter then


@dataclass(frozen=True)
class JobInput:
    """A job as the planner sees it (`plan.inputs` makes it)."""

    job: str
    weight: float
    min_nodes: int
    max_nodes: int
    nodes: int
    """Nodes before the event."""
    alive: int
    """Nodes that are left."""
    rate: float = 0.0
    """Measured aggregate FLOP/s at `measured_nodes` nodes, 0 before the first iteration."""
    measured_nodes: int = 0
    rates: Mapping[int, float] = field(default_factory=dict)
    """The rate by node count, for every size with a reliable measurement."""
    reach: frozenset[str] = frozenset()
    """The nodes that it may be given."""
    spare_nodes: int = 0
    """Nodes that growth leaves free."""
    unit: int = 1
    """Nodes of whole replicas; other counts are worth the next smaller multiple."""
    layouts: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Aggregate FLOP/s by layout and node count, in place of the rates, for a job that can run in several."""
    layout: str = ""
    """The present one."""
    restart_seconds: float = 0.0
    """The cost of a start in another one."""
    working: int = 0
    """The most of max_nodes that train, 0 for all; the others are hot spares."""
    wait_seconds: float = 0.0
    """For how long a lost node's place stays empty without a spare."""
    owner: str = ""
    """FLOP/s are compared among the jobs of one owner; a job without one is compared only with itself."""
    trained: bool = True
    """Whether it has begun, and may have a state to lose. Before, it gives up nodes that are too few to begin with."""
    block: int = 1
    """Nodes of an element, which it gets and gives up together."""

    @property
    def holds_state(self) -> bool:
        """Whether its nodes may hold the only copy of a training state."""
        return self.trained and self.alive > 0

    @property
    def whose(self) -> str:
        """The owner, as the planner knows it."""
        return self.owner or self.job

    @property
    def trains(self) -> int:
        """The most nodes that train."""
        return self.working or self.max_nodes

    @property
    def spares(self) -> int:
        """The most that wait."""
        return self.max_nodes - self.trains


def throughput(job: JobInput, per_node: float) -> dict[int, float]:
    """T(t,x) for every size that the job can be given: a fit through the measured sizes if there are at least two,
    linear in x through one, `per_node` before any. A node that completes no replica brings nothing."""
    found = _by_nodes(job, per_node)
    return {count: found.get(count - count % job.unit, 0.0) for count in found} if job.unit > 1 else found


def in_blocks(job: JobInput, found: Mapping[int, float]) -> dict[int, float]:
    """The sizes that the job can be given: whole blocks."""
    return {count: rate for count, rate in found.items() if count % job.block == 0}


def _by_nodes(job: JobInput, per_node: float) -> dict[int, float]:
    """Throughput by number of nodes, if any number could train."""
    sizes = range(1, job.trains + 1)
    if len(job.rates) >= 2:
        return fit_flops(job.rates, sizes)
    if job.rate > 0 and job.measured_nodes > 0:
        per_node = job.rate / job.measured_nodes
    return {count: per_node * count for count in sizes}


def spares(job: JobInput, per_node: float, mtbf_node_hours: float) -> dict[int, float]:
    """FLOP/s that the job's hot spares save, by its number of nodes with them."""
    if not job.spares:
        return {}
    flops = job.layouts[job.layout] if job.layouts else throughput(job, per_node)
    least = min(job.min_nodes, job.trains)
    return worth(flops, job.trains, job.spares, least, mtbf_node_hours, job.wait_seconds)


def scenario(
    jobs: Sequence[JobInput],
    nodes: int,
    mtbf_node_hours: float,
    transition_seconds: float,
    elsewhere: Mapping[str, int] = NOWHERE,
) -> Scenario:
    """The planner's scenario (docs/design/planning.md). `jobs` must not be empty. elsewhere: other nodes of the
    owners."""
    rates = [job.rate / job.measured_nodes for job in jobs if job.rate > 0 and job.measured_nodes > 0]
    usual = sum(rates) / len(rates) if rates else NOMINAL_RATE
    return Scenario(
        nodes=nodes,
        jobs=tuple(
            Job(
                name=job.job,
                flops={} if job.layouts else in_blocks(job, throughput(job, usual)),
                layouts={name: in_blocks(job, table) for name, table in job.layouts.items()},
                layout=job.layout if job.layouts else None,
                transition={"restart": job.restart_seconds} if job.layouts else {},
                weight=job.weight,
                min_nodes=min(job.min_nodes, job.max_nodes),
                max_nodes=job.max_nodes,
                nodes=min(job.nodes, job.max_nodes),
                lost_worker=job.alive < job.nodes,
                spares=in_blocks(job, spares(job, usual, mtbf_node_hours)),
                owner=job.whose,
                unit=job.unit,
                keep=min(job.alive, job.unit) if job.trained else 0,
            )
            for job in jobs
        ),
        mtbf_node_hours=mtbf_node_hours,
        transition_seconds=transition_seconds,
        elsewhere=elsewhere,
    )


def plan(
    jobs: Sequence[JobInput],
    nodes: int,
    mtbf_node_hours: float,
    transition_seconds: float,
    elsewhere: Mapping[str, int] = NOWHERE,
) -> Plan:
    """The assignment of at most `nodes` nodes.

    Unlike the plain program it never takes a running job's last nodes, because they hold its training state. Such a job
    keeps its living nodes, at most its minimum if its owner's share has that, and the others share the rest.
    """
    whole = scenario(jobs, nodes, mtbf_node_hours, transition_seconds, elsewhere)
    by_name = {job.job: job for job in jobs}
    fixed: dict[str, int] = {}

    def assign(own: Sequence[Job], room: int) -> dict[str, int]:
        """The best for one owner's jobs; jobs that would stop first get the nodes that they keep."""
        free, kept = list(own), dict[str, int]()
        while free:
            found = best(whole, free, max(0, room - sum(kept.values())))
            starved = [by_name[job.name] for job in free if by_name[job.name].holds_state and not found[job.name]]
            if not starved:
                return kept | found
            # The heaviest job keeps its place first; with too few nodes for all, the others are considered again.
            keep = max(starved, key=lambda job: (job.weight, -job.min_nodes, job.job))
            free = [job for job in free if job.name != keep.job]
            states = sum(job.keep for job in free)
            least, wanted = min(keep.alive, keep.unit), min(keep.alive, max(keep.unit, keep.min_nodes))
            fixed[keep.job] = kept[keep.job] = wanted if sum(kept.values()) + wanted + states <= room else least
        return kept

    assignment, shares = by_owner(whole, assign)
    free = tuple(job for job in whole.jobs if job.name not in fixed)
    found = plan_of(replace(whole, jobs=free), assignment, shares) if free else Plan({}, 0.0, 0.0, {}, shares=shares)
    kept = {name: assignment[name] for name in fixed}
    why = {
        job: f"keeps {plural(n, 'node')}: its training state lives there and nowhere else" for job, n in kept.items()
    }
    layouts = {job.job: job.layout for job in jobs if job.job in fixed and job.layout}
    return replace(
        found,
        assignment=found.assignment | kept,
        reasons=found.reasons | why,
        layouts=found.layouts | layouts,
        spares=max(0, nodes - sum(found.assignment.values()) - sum(kept.values())),
    )


# ---------------------------------------------------------------- the plan for the next event
class Aheads:
    """The look-ahead of each pool of nodes, by the jobs that share it."""

    def __init__(self) -> None:
        self._known: dict[frozenset[str], Ahead] = {}

    def of(self, jobs: Sequence[JobInput]) -> Ahead:
        """The look-ahead that has planned for most of these jobs; a new one if none has."""
        names = frozenset(job.job for job in jobs)
        nearest = max(self._known, key=lambda known: (len(known & names), sorted(known)), default=frozenset())
        found = self._known.pop(nearest) if nearest & names else Ahead()
        self._known[names] = found
        return found

    def close_others(self, pools: Sequence[Sequence[JobInput]]) -> None:
        """Closes the tables of pools that no longer exist."""
        names = {frozenset(job.job for job in jobs) for jobs in pools}
        for gone in self._known.keys() - names:
            self._known.pop(gone).close()


class Ahead:
    """Plans, from the table if possible. Not thread-safe; its table is made in a thread of its own."""

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
        return plan(jobs, nodes, mtbf_node_hours, transition_seconds), False

    def prepare(
        self,
        jobs: Sequence[JobInput],
        assignment: dict[str, int],
        nodes: int,
        mtbf_node_hours: float,
        transition_seconds: float,
    ) -> None:
        """Prepares the table for the events after `assignment` is carried out."""
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
        self._keeper.update(scenario(list(settled.values()), nodes, mtbf_node_hours, transition_seconds))

    def close(self) -> None:
        """End the thread."""
        if self._keeper is not None:
            self._keeper.stop()

    def _close_to(self, settled: dict[str, JobInput]) -> bool:
        """Whether the table's situation still holds, except for small changes of measured rates."""
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
    """The single event that leads from the settled situation to the present one; None if there is none, or several."""
    gone = base.keys() - now.keys()
    if now.keys() - base.keys() or not now:
        return None
    for name, job in now.items():
        known = base[name]
        if len(job.layouts) > 1 or _unchanging(job) != _unchanging(known):
            return None
    lost = [name for name, job in now.items() for _ in range(job.nodes - job.alive)]
    if gone:
        return ("finish", *gone) if len(gone) == 1 and not lost and nodes == base_nodes else None
    if lost:
        return ("lost", *sorted(lost)) if len(lost) <= 2 and nodes == base_nodes - len(lost) else None
    return {-1: ("spare",), 1: ("join",)}.get(nodes - base_nodes)


def _unchanging(job: JobInput) -> tuple[float, ...]:
    """The fields that no event changes."""
    return job.nodes, job.min_nodes, job.max_nodes, job.working, job.wait_seconds, job.weight, job.unit, job.block
