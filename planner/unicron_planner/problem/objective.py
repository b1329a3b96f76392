"""The planner's input: jobs, their throughput by size, and the cluster.

Words and formulas are those of Unicron (arXiv 2401.00134; docs/design/planning.md): `F(t,x) = w(t) * T(t,x)` where x
meets the job's requirement, else 0;
`G(t,x') = F(t,x') * D_running(n') - 1[t lost a worker or x' != x_t] * F(t,x_t) * D_transition`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

KINDS = ("continue", "restart", "move", "grow")


class PlanError(ValueError):
    """The input can't be planned with; the message is one line that says what to change."""


def number(value: object, what: str, *, positive: bool = False, finite: bool = True) -> float:
    """`value` as a float that is not NaN and not negative; raises PlanError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PlanError(f"{what} must be a number, not {value!r}")
    try:
        result = float(value)
    except OverflowError:
        raise PlanError(f"{what} is too large") from None
    if math.isnan(result) or (finite and math.isinf(result)):
        raise PlanError(f"{what} must be a finite number, not {value!r}")
    if result < 0 or (positive and result == 0):
        raise PlanError(f"{what} must be {'above 0' if positive else '0 or more'}, not {value!r}")
    return result


def whole(value: object, what: str, *, least: int = 0) -> int:
    """`value` as an integer of at least `least`; raises PlanError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanError(f"{what} must be a whole number, not {value!r}")
    if value < least:
        raise PlanError(f"{what} must be {least} or more, not {value}")
    if value > 10**7:
        raise PlanError(f"{what} is {value}: more than 10 million is not supported")
    return value


class Rates(dict[int, float]):
    """Achieved aggregate FLOP/s by node count, ascending and checked once. Raises PlanError. Not to be changed after it
    is made."""

    def __init__(self, flops: object, what: str = "flops"):
        if not isinstance(flops, Mapping) or not flops:
            raise PlanError(f"{what} has no throughput: give flops = {{ nodes = FLOP/s, ... }}")
        for size, rate in flops.items():
            whole(size, f"{what}: a node count in flops")
            number(rate, f"{what}: flops at {size} nodes")
        if flops.get(0):
            raise PlanError(f"{what}: flops at 0 nodes must be 0 or left out")
        super().__init__((size, float(flops[size])) for size in sorted(flops) if size)
        if not self:
            raise PlanError(f"{what} has no throughput at any size above 0 nodes")
        self.sizes = np.fromiter(self.keys(), dtype=np.int64, count=len(self))
        """The node counts."""
        self.rates = np.fromiter(self.values(), dtype=np.float64, count=len(self))
        """Their FLOP/s."""


def _rates(flops: object, what: str) -> Rates:
    return flops if isinstance(flops, Rates) else Rates(flops, what)


@dataclass(frozen=True)
class Job:
    """One training run."""

    name: str
    flops: Mapping[int, float] = field(default_factory=dict)
    """Achieved aggregate FLOP/s by node count. The job cannot run on other counts; 0 nodes are always allowed."""
    weight: float = 1.0
    min_nodes: int = 1
    max_nodes: int | None = None
    nodes: int = 0
    """x_t; after a failure the count *before* it, so that the transition is charged at the throughput of then."""
    lost_worker: bool = False
    transition_seconds: float | None = None
    """D_transition of this job; by default the cluster's."""
    transition: Mapping[str, float] = field(default_factory=dict)
    """D_transition by kind (see `kind`)."""
    restart_only: bool = False
    """No survivor has the whole state, so every change is a restart from a checkpoint."""
    node_names: tuple[str, ...] = ()
    layouts: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """In place of `flops`: FLOP/s by way to split the model ("TP2 PP2") and node count, the preferred way first."""
    layout: str | None = None
    """The present one; None while it is free. Another one takes a restart."""
    spares: Mapping[int, float] = field(default_factory=dict)
    """Sizes above those in `flops`, whose extra nodes wait as hot spares -> the FLOP/s that these save
    (`solver.spares`). They count in G and not in F; another number of them disturbs no job."""
    owner: str = ""
    """FLOP/s are compared among the jobs of one owner only (`solver.shares`)."""
    unit: int = 1
    """Nodes of a whole replica: only multiples of it, and the minimum, are worth asking for."""
    keep: int = 0
    """Nodes that hold the state of a running job; its owner has at least as many."""
    must_run: bool = False
    """Whether it gets no nodes only if there are too few for all such jobs."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or not self.name.isprintable():
            raise PlanError(f"a job's name must be printable text, not {self.name!r}")
        what = f"job {self.name}"
        number(self.weight, f"{what}: weight")
        whole(self.min_nodes, f"{what}: min_nodes")
        whole(self.nodes, f"{what}: nodes")
        whole(self.unit, f"{what}: unit", least=1)
        whole(self.keep, f"{what}: keep")
        if not isinstance(self.owner, str) or (self.owner and not self.owner.isprintable()):
            raise PlanError(f"{what}: owner must be printable text, not {self.owner!r}")
        if self.max_nodes is not None and whole(self.max_nodes, f"{what}: max_nodes") < self.min_nodes:
            raise PlanError(f"{what}: max_nodes {self.max_nodes} is below min_nodes {self.min_nodes}")
        if not isinstance(self.lost_worker, bool) or not isinstance(self.restart_only, bool):
            raise PlanError(f"{what}: lost_worker and restart_only must be true or false")
        if self.transition_seconds is not None:
            number(self.transition_seconds, f"{what}: transition_seconds")
        if not isinstance(self.transition, Mapping):
            raise PlanError(f"{what}: transition must be a table of seconds by kind")
        for kind, seconds in self.transition.items():
            if kind not in KINDS:
                raise PlanError(f"{what}: unknown transition kind {kind!r}: use {', '.join(KINDS)}")
            number(seconds, f"{what}: transition {kind}")
        self._check_spares(what)
        self._check_layouts(what)
        object.__setattr__(self, "flops", _rates(self.flops, what))

    def _check_spares(self, what: str) -> None:
        """Adds the sizes with spares to `flops`; there the job is as fast as without them."""
        if not isinstance(self.spares, Mapping):
            raise PlanError(f"{what}: spares must be a table of FLOP/s by node count")
        if not self.spares:
            return
        for size, saved in self.spares.items():
            whole(size, f"{what}: a node count in spares", least=2)
            number(saved, f"{what}: spares at {size} nodes")
        object.__setattr__(self, "spares", {size: float(self.spares[size]) for size in sorted(self.spares)})
        if isinstance(self.flops, Mapping) and self.flops and not self.layouts:
            object.__setattr__(self, "flops", self._with_spares(self.flops, what))
        if isinstance(self.layouts, Mapping) and self.layouts:
            tables = {name: self._with_spares(table, f"{what} as {name}") for name, table in self.layouts.items()}
            object.__setattr__(self, "layouts", tables)
            object.__setattr__(self, "flops", {})

    def _with_spares(self, flops: Mapping[int, float], what: str) -> Rates:
        table = _rates(flops, what)
        most = max((size for size in table if size <= self.working), default=0)
        if not most or any(size not in self.spares for size in table if size > self.working):
            raise PlanError(f"{what}: spares must begin above the largest node count in flops")
        return Rates({**table, **dict.fromkeys(self.spares, table[most])}, what)

    @property
    def working(self) -> int:
        """The most nodes that work; those above are spares."""
        return next(iter(self.spares)) - 1 if self.spares else 10**9

    def spare_gain(self, nodes: int) -> float:
        """Weighted FLOP/s that the spares among `nodes` nodes save."""
        return self.weight * self.spares.get(nodes, 0.0) if self.runs(nodes) else 0.0

    def _check_layouts(self, what: str) -> None:
        """Sets `flops` to the best of the layouts at each size."""
        if not isinstance(self.layouts, Mapping):
            raise PlanError(f"{what}: layouts must be a table of throughputs by layout")
        if self.layout is not None and self.layout not in self.layouts:
            known = ", ".join(self.layouts) or "none"
            raise PlanError(f"{what}: it has no layout {self.layout!r}; its layouts are: {known}")
        if not self.layouts:
            return
        tables = {name: _rates(flops, f"{what} as {name}") for name, flops in self.layouts.items()}
        best = {
            size: max(table.get(size, 0.0) for table in tables.values())
            for size in sorted(set().union(*tables.values()))
        }
        if self.flops and dict(self.flops) != best:
            raise PlanError(f"{what}: give flops or layouts, not both")
        object.__setattr__(self, "layouts", tables)
        object.__setattr__(self, "flops", Rates(best, what))

    @property
    def rates(self) -> Rates:
        """`flops` with its sizes and rates as arrays."""
        return _rates(self.flops, f"job {self.name}")

    def f(self, nodes: int, layout: str | None = None) -> float:
        """F(t,x): weighted achieved FLOP/s on `nodes` nodes, in the best layout unless one is named; 0 where the job
        can't run."""
        rates = self.flops if layout is None else self.layouts[layout]
        return self.weight * rates.get(nodes, 0.0) if nodes and self.runs(nodes) else 0.0

    @property
    def holds(self) -> int:
        """The nodes that are left: one fewer than x_t after a loss."""
        return max(0, self.nodes - self.lost_worker)

    @property
    def now(self) -> float:
        """F(t,x_t), as it runs."""
        return self.f(self.nodes, self.layout)

    def runs(self, nodes: int) -> bool:
        """Whether `nodes` is a size that this job can be given (0 always is)."""
        if nodes == 0:
            return True
        return nodes in self.flops and nodes >= self.min_nodes and (self.max_nodes is None or nodes <= self.max_nodes)

    def options(self, nodes: int) -> list[int]:
        """All sizes up to `nodes` that the job can be given, ascending, 0 first."""
        return [0, *(size for size in self.flops if size <= nodes and self.runs(size))]

    def changes(self, layout: str | None) -> bool:
        """Whether `layout` differs from the one that the job runs in."""
        return layout is not None and self.layout is not None and layout != self.layout

    def disturbed(self, nodes: int, layout: str | None = None) -> bool:
        """The indicator of G: the job lost a worker, or its size or its layout changes."""
        moved = min(nodes, self.working) != min(self.nodes, self.working)
        return self.lost_worker or moved or (nodes > 0 and self.changes(layout))

    def kind(self, nodes: int, layout: str | None = None) -> str | None:
        """The way from x_t to `nodes`: None (nothing happens), continue (the survivors go on), restart, move (a
        replacement takes the lost node's place) or grow."""
        if not self.disturbed(nodes, layout) or (nodes == 0 and self.nodes == 0):
            return None
        if self.restart_only or self.nodes == 0 or self.changes(layout):
            return "restart"
        now, then = min(self.nodes, self.working), min(nodes, self.working)
        if then > now:
            return "grow"
        return "move" if then == now else "continue"


@dataclass(frozen=True)
class Scenario:
    """A cluster and its jobs at one moment."""

    nodes: int
    """n', the nodes that can be given out."""
    jobs: tuple[Job, ...]
    mtbf_node_hours: float = 1000.0
    transition_seconds: float = 60.0
    elsewhere: Mapping[str, int] = field(default_factory=dict)
    """Other nodes that owners have already; they count as part of their shares."""

    def __post_init__(self) -> None:
        whole(self.nodes, "cluster: nodes")
        number(self.mtbf_node_hours, "cluster: mtbf_node_hours", positive=True)
        number(self.transition_seconds, "cluster: transition_seconds")
        if not self.jobs:
            raise PlanError("there are no jobs to plan for: add at least one [[job]]")
        names = [job.name for job in self.jobs]
        if len(set(names)) != len(names):
            double = next(name for name in names if names.count(name) > 1)
            raise PlanError(f"two jobs are named {double}: names must be unique")
        for job in self.jobs:
            self._check_job(job)

    @property
    def owners(self) -> dict[str, list[Job]]:
        """The jobs of each owner, owners and jobs sorted by name."""
        found: dict[str, list[Job]] = {owner: [] for owner in sorted({job.owner for job in self.jobs})}
        for job in sorted(self.jobs, key=lambda job: job.name):
            found[job.owner].append(job)
        return found

    def _check_job(self, job: Job) -> None:
        most = float(job.rates.rates.max()) + max(job.spares.values(), default=0.0)
        longest = max(self.d_running, self.transition_seconds, job.transition_seconds or 0.0, *job.transition.values())
        if not math.isfinite(job.weight * most * longest * 4 * len(self.jobs)):
            raise PlanError(f"job {job.name}: weight x flops x time is too large for a number")

    @property
    def d_running(self) -> float:
        """D_running(n'): expected seconds until the next failure of any of the n' nodes."""
        return self.mtbf_node_hours * 3600.0 / max(self.nodes, 1)

    def d_transition(self, job: Job, nodes: int, layout: str | None = None) -> float:
        """D_transition in seconds for taking `job` to `nodes`, and to `layout` where one is named."""
        kind = job.kind(nodes, layout)
        if kind is not None and kind in job.transition and nodes:
            return job.transition[kind]
        return self.transition_seconds if job.transition_seconds is None else job.transition_seconds

    def g(self, job: Job, nodes: int) -> float:
        """G(t,x'), in weighted FLOP over the next running period; -inf if the size can't be run."""
        if not job.runs(nodes):
            return -math.inf
        return self.g_in(job, nodes, self.layout(job, nodes))

    def g_in(self, job: Job, nodes: int, layout: str | None) -> float:
        """G(t,x') in one layout; the size can be run."""
        gain = (job.f(nodes, layout) + job.spare_gain(nodes)) * self.d_running
        return gain - job.now * self.d_transition(job, nodes, layout) if job.disturbed(nodes, layout) else gain

    def layout(self, job: Job, nodes: int) -> str | None:
        """The layout with the largest G on `nodes` nodes; among equals the present one, then the first. None if the job
        names none, or gets no nodes."""
        if not job.layouts or not nodes:
            return None
        names = sorted(job.layouts, key=lambda name: name != job.layout)
        return max(names, key=lambda name: self.g_in(job, nodes, name))

    def job(self, name: str) -> Job:
        """The job of that name; raises PlanError."""
        if found := next((job for job in self.jobs if job.name == name), None):
            return found
        raise PlanError(f"there is no job {name!r}: the jobs are {', '.join(job.name for job in self.jobs)}")

    def with_job(self, changed: Job) -> Scenario:
        """The scenario with the job of that name replaced."""
        return replace(self, jobs=tuple(changed if job.name == changed.name else job for job in self.jobs))
