"""The plan for every next event, computed before it happens; at the failure it is one look-up
(docs/design/planning.md).

Events that leave the same number of nodes share everything but one job's row, so their optima come out of one pair of
tables: with P[i] (jobs before i) and Q[i+1] (jobs after i), the best plan in which job i has the changed row V is
`max over k, a of V(k) + P[i](a) + Q[i+1](n' - k - a)`. Sizes that no event's optimum can use are left out of the tables
first (`tables.Bound`); when the optimum is known, an assignment is traced over the few sizes that reach it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from unicron_planner.ahead.next_events import Event, after, normal, pairs_of_losses, single_events
from unicron_planner.problem.objective import Job, Scenario
from unicron_planner.solver import keys, tables
from unicron_planner.solver.keys import Row
from unicron_planner.solver.plan import Plan, plan_of
from unicron_planner.solver.solve import best, by_owner, solve

MOST_JOBS_FOR_PAIRS = 16
MOST_TRACE_SIZES = 4096  # sizes over which an assignment is traced by name; above, see _Class._walk


@dataclass(frozen=True)
class Entry:
    """The plan for one event: the assignment at once, the full Plan (figures, reasons) when it is asked for."""

    assignment: dict[str, int]
    base: Scenario
    event: Event

    @cached_property
    def scenario(self) -> Scenario:
        """The scenario after the event."""
        return after(self.base, self.event)

    @cached_property
    def plan(self) -> Plan:
        """The plan of solve(self.scenario)."""
        return plan_of(self.scenario, self.assignment)


class Lookahead:
    """The table of plans for the events that may follow a scenario. `get(event)` is a dict look-up.

    Parameters
    ----------
    scenario
        The present one.
    pairs
        Whether two losses at once are among the events; by default, unless the jobs are many.
    """

    def __init__(self, scenario: Scenario, pairs: bool | None = None):
        self.scenario = scenario
        events = single_events(scenario)
        if pairs or (pairs is None and len(scenario.jobs) <= MOST_JOBS_FOR_PAIRS):
            events += pairs_of_losses(scenario)
        events = [event for event in events if event[0] != "lost" or scenario.nodes >= len(event) - 1]
        found = self._by_tables(events) if len(scenario.owners) == 1 else self._one_by_one(events)
        self.entries = {event: Entry(found[event], scenario, event) for event in events}

    def get(self, event: Event) -> Entry | None:
        """The plan for an event, whatever the order of the losses in it; None if it is not in the table."""
        entry = self.entries.get(event)
        return entry if entry is not None else self.entries.get(normal(event))

    def _one_by_one(self, events: list[Event]) -> dict[Event, dict[str, int]]:
        """Solves each event. The best plan of an owner's jobs on as many nodes is computed once."""
        best_plans: dict[tuple[int, int, tuple[int, ...]], dict[str, int]] = {}
        found, alive = {}, []
        for event in events:
            scenario = after(self.scenario, event)
            alive.append(scenario)  # `best_plans` goes by the identity of its jobs
            found[event] = _solve(scenario, best_plans)
        return found

    def _by_tables(self, events: list[Event]) -> dict[Event, dict[str, int]]:
        classes: dict[int, list[Event]] = {}
        for event in events:
            change = {"lost": 1 - len(event), "spare": -1, "join": 1}.get(event[0], 0)
            classes.setdefault(self.scenario.nodes + change, []).append(event)
        found: dict[Event, dict[str, int]] = {}
        for nodes, members in classes.items():
            found |= _Class(replace(self.scenario, nodes=nodes), members).solve()
        return found


def _solve(scenario: Scenario, best_plans: dict[tuple[int, int, tuple[int, ...]], dict[str, int]]) -> dict[str, int]:
    """The assignment of `solve`. best_plans: those of owners so far, by n', the nodes offered, and the jobs."""

    def assign(jobs: Sequence[Job], room: int) -> dict[str, int]:
        key = (scenario.nodes, room, tuple(id(job) for job in jobs))
        if key not in best_plans:
            best_plans[key] = best(scenario, jobs, room)
        return best_plans[key]

    return by_owner(scenario, assign)[0]


@dataclass
class _Case:
    """One event as a change of rows."""

    event: Event
    changed: dict[int, Row | None]
    """The new row of each job, by index, that differs; None for a job that is gone."""
    upper: int = 0  # no plan is worth more
    best: int = 0  # the optimum so far


class _Class:
    """All events after which `scenario.nodes` nodes are left."""

    def __init__(self, scenario: Scenario, events: list[Event]):
        self.nodes = scenario.nodes
        self.jobs = sorted(scenario.jobs, key=lambda job: job.name)
        index = {job.name: i for i, job in enumerate(self.jobs)}
        lost = {name for kind, *names in events if kind == "lost" for name in names}
        losers = {name: replace(self.jobs[index[name]], lost_worker=True) for name in sorted(lost)}
        rows = keys.rows(scenario, [*self.jobs, *losers.values()])
        self.rows, changed = rows[: len(self.jobs)], dict(zip(losers, rows[len(self.jobs) :], strict=True))
        self.cases = [
            _Case(event, {index[name]: changed[name] if event[0] == "lost" else None for name in event[1:]})
            for event in events
        ]

    def solve(self) -> dict[Event, dict[str, int]]:
        """The assignment after each event."""
        bound = tables.Bound(self.rows, self.nodes)
        for case in self.cases:
            case.upper = bound.upper + sum(self._bound_change(bound, i, row) for i, row in case.changed.items())
        gap = bound.core_gap(tables.CORE)
        while True:
            self._values(bound, gap)
            needed = max(case.upper - case.best for case in self.cases)
            if needed <= gap:
                break
            gap = bound.wider(gap, needed)
        return {case.event: self._trace(bound, case) for case in self.cases}

    def _bound_change(self, bound: tables.Bound, i: int, row: Row | None) -> int:
        """The change of the bound for one changed row."""
        return (0 if row is None else int((row.keys - bound.price * row.sizes).max())) - bound.best[i]

    def _values(self, bound: tables.Bound, gap: int) -> None:
        """Sets `best` of every case: the optimum over the sizes within `gap` of the bound."""
        rows = self.kept = bound.within(gap)
        before, behind = bound.prefixes(gap), bound.suffixes(gap)
        self.before, self.behind = before, behind
        shared: dict[int, list[np.ndarray]] = {}
        for case in self.cases:
            changed = [(i, _near(bound.price, row, gap)) for i, row in sorted(case.changed.items())]
            if not changed:
                case.best = int(behind[0][self.nodes])
                continue
            first, row = changed[0]
            if len(changed) == 1:
                last = first
                table = before[first]
            else:
                last, second = changed[1]
                assert row is not None  # two changes are two losses, and a job that loses a node stays
                if first not in shared:  # P[first] + V(first) + the rows behind it, once for all pairs that start there
                    run = [tables.add(before[first], row)]
                    for other in rows[first + 1 :]:
                        run.append(tables.add(run[-1], other))
                    shared[first] = run
                table, row = shared[first][last - first - 1], second
            joined = table if row is None else tables.add(table, row)
            case.best = int((joined + behind[last + 1][::-1]).max())

    def _trace(self, bound: tables.Bound, case: _Case) -> dict[str, int]:
        """The assignment that reaches `case.best`; ties as in `solve`."""
        gap = case.upper - case.best
        names: list[str] = []
        rows: list[Row] = []
        for i, job in enumerate(self.jobs):
            if i in case.changed:
                row = _near(bound.price, case.changed[i], gap)
            else:
                row = _row_within(bound.rows[i], bound.slack[i], gap)
            if row is not None:
                names.append(job.name)
                rows.append(row)
        if len(case.changed) <= 1 and sum(len(row.sizes) for row in rows if len(row.sizes) > 1) > MOST_TRACE_SIZES:
            return self._walk(case)
        return dict(zip(names, _reach(rows, self.nodes), strict=True))

    def _walk(self, case: _Case) -> dict[str, int]:
        """An assignment that reaches `case.best`, read off the tables at hand. Its gain, disturbed jobs and total move
        are those of `solve`; but among such equals, jobs before the changed one are decided last name first. It is for
        large clusters of jobs that scale alike, where tracing all of them in order of name would take seconds."""
        i, row = next(iter(case.changed.items()), (0, None))
        whole = not case.changed
        behind = self.behind[0 if whole else i + 1]
        sizes = [0] if row is None else row.sizes.tolist()
        gains = [0] if row is None else row.keys.tolist()
        for size, gain in sorted(zip(sizes, gains, strict=True), reverse=True):
            left = self.nodes - size
            if left >= 0:
                sums = self.before[0 if whole else i][: left + 1] + behind[left::-1]
                at = int(np.argmax(sums))
                if gain + int(sums[at]) == case.best:
                    break
        chosen = dict.fromkeys(range(len(self.kept)), 0)
        if not whole:
            chosen[i] = size
        room = at
        for j in reversed(range(0 if whole else i)):
            chosen[j] = _last(self.kept[j], self.before[j], room)
            room -= chosen[j]
        room = left - at
        for j in range(0 if whole else i + 1, len(self.kept)):
            chosen[j] = _last(self.kept[j], self.behind[j + 1], room)
            room -= chosen[j]
        return {self.jobs[j].name: size for j, size in chosen.items() if j not in case.changed or case.changed[j]}


def _last(row: Row, rest: np.ndarray, room: int) -> int:
    """The largest size of one job that is best beside `rest` on `room` nodes."""
    usable = int(np.searchsorted(row.sizes, room, side="right"))
    totals = row.keys[:usable] + rest[room - row.sizes[:usable]]
    return int(row.sizes[usable - 1 - int(np.argmax(totals[::-1]))])


def _row_within(row: Row, slack: np.ndarray, gap: int) -> Row:
    keep = slack <= gap
    return Row(row.sizes[keep], row.keys[keep])


def _near(price: int, row: Row | None, gap: int) -> Row | None:
    """The sizes of a changed row within `gap` of its best, at the price of the bound."""
    if row is None:
        return None
    reduced = row.keys - price * row.sizes
    return _row_within(row, reduced.max() - reduced, gap)


def _reach(rows: list[Row], nodes: int) -> list[int]:
    """The best assignment over rows that contain an optimum; rows with one size are taken out first."""
    free = [i for i, row in enumerate(rows) if len(row.sizes) > 1]
    sizes = [int(row.sizes[0]) for row in rows]
    left = nodes - sum(size for i, size in enumerate(sizes) if i not in set(free))
    if free:
        chosen = [rows[i] for i in free]
        for i, size in zip(free, tables.trace(chosen, tables.suffixes(chosen, left), left), strict=True):
            sizes[i] = size
    return sizes


class Keeper:
    """Keeps a Lookahead fresh in the background. `update` returns at once, the latest scenario wins, `get` never
    waits."""

    def __init__(self) -> None:
        self._wanted: Scenario | None = None
        self._table: Lookahead | None = None
        self._changed = threading.Condition()
        self._stopped = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="unicron-lookahead", daemon=True)
        self._thread.start()

    def update(self, scenario: Scenario) -> None:
        """Asks for the table of another scenario."""
        with self._changed:
            self._wanted, self._error = scenario, None
            self._changed.notify_all()

    def get(self, event: Event) -> tuple[Entry, bool]:
        """(plan for `event`, whether it was ready). Otherwise the scenario has changed since the table was made, and
        the plan is computed now."""
        with self._changed:
            table, scenario = self._table, self._wanted
        if scenario is None:
            raise RuntimeError("update() comes before get()")
        if table is not None and table.scenario is scenario:
            entry = table.get(event)
            if entry is not None:
                return entry, True
        return Entry(solve(after(scenario, event)).assignment, scenario, normal(event)), False

    def stop(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def _fresh(self) -> bool:
        return self._table is not None and self._table.scenario is self._wanted

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stopped or (self._wanted and not self._fresh() and not self._error)
                )
                if self._stopped:
                    return
                scenario = self._wanted
                assert scenario is not None
            table, error = None, None
            try:
                table = Lookahead(scenario)
            except Exception as failure:  # the thread must live on: get() still plans
                error = failure
            with self._changed:
                self._error = error
                if table is not None:
                    self._table = table
                self._changed.notify_all()
