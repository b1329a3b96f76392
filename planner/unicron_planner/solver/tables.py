"""Max-plus tables: Unicron's dynamic program on integer keys, and a bound that leaves out what can't win.

`S(i,j) = max_k S(i-1,j-k) + G(t_i,k)`. A table is an int64 array over j = 0..n, the nodes that may be used; as a job
may always be given 0 nodes, no entry of a finished table is -inf.
"""

from __future__ import annotations

import numpy as np

from unicron_planner.solver.keys import Row

NONE = -(2**61)  # stands for -inf: below any sum of keys, and adding keys to it can't overflow
DENSE = 48  # sizes from which blocks can be faster than one pass per size,
SPARSE = 0.3  # if they are at least this part of all sizes up to the largest
BLOCK = 32
CORE = 4  # sizes of a job, on average, that the first try looks at
STATE_COST = 5  # one entry with all sizes, in units of one size with all entries


def add(table: np.ndarray, row: Row) -> np.ndarray:
    """The table with one more job."""
    n = len(table) - 1
    sizes, keys = row.sizes, row.keys
    if len(sizes) and sizes[-1] > n:
        keep = sizes <= n
        sizes, keys = sizes[keep], keys[keep]
    out = np.full(n + 1, NONE, dtype=np.int64)
    if not len(sizes) or len(sizes) < max(DENSE, SPARSE * int(sizes[-1])):
        scratch = np.empty(n + 1, dtype=np.int64)
        for size, key in zip(sizes.tolist(), keys.tolist(), strict=True):
            shifted = scratch[: n + 1 - size]
            np.add(table[: n + 1 - size], key, out=shifted)
            np.maximum(out[size:], shifted, out=out[size:])
        return out
    return _add_blocks(table, sizes, keys, out)


def _add_blocks(table: np.ndarray, sizes: np.ndarray, keys: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Adds many sizes in blocks of consecutive ones, each small enough to stay in the cache."""
    n = len(table) - 1
    dense = np.full(n + BLOCK + 1, NONE, dtype=np.int64)
    dense[sizes] = keys
    padded = np.concatenate([np.full(BLOCK - 1, NONE, dtype=np.int64), table])
    step = padded.strides[0]
    scratch = np.empty((BLOCK, n + 1), dtype=np.int64)
    for low in range(0, int(sizes[-1]) + 1, BLOCK):
        width = n + 1 - low
        # row b, column c of the view is table[c - b], so that out[low + c] = max over b of table[c - b] + key[low + b]
        view = np.lib.stride_tricks.as_strided(padded[BLOCK - 1 :], shape=(BLOCK, width), strides=(-step, step))
        part = scratch[:, :width]
        np.add(view, dense[low : low + BLOCK, None], out=part)
        np.maximum(out[low:], part.max(axis=0), out=out[low:])
    return out


def _add_within(table: np.ndarray, row: Row, slack: np.ndarray, used: np.ndarray, gap: int) -> np.ndarray:
    """`add` without the pairs (entry of the table, size) whose slacks add up to more than `gap`. used: the slack of the
    entries. Sizes with little slack go with every entry, those with much slack only with entries that used little."""
    if len(row.sizes) < DENSE:
        return add(table, row)
    limits = np.sort(slack[:: max(len(slack) // 16, 1)]).tolist()
    cost, limit = min(
        (int(np.count_nonzero(slack <= limit)) + STATE_COST * int(np.count_nonzero(used <= gap - limit)), limit)
        for limit in limits
    )
    if cost > SPARSE * len(slack):
        return add(table, row)
    cheap = slack <= limit
    out = add(table, Row(row.sizes[cheap], row.keys[cheap]))
    sizes, keys = row.sizes[~cheap], row.keys[~cheap]
    for at in np.flatnonzero(used < gap - limit).tolist() if len(sizes) else ():
        fitting = int(np.searchsorted(sizes, len(table) - at))
        places = sizes[:fitting] + at
        out[places] = np.maximum(out[places], keys[:fitting] + table[at])
    return out


def suffixes(rows: list[Row], nodes: int) -> list[np.ndarray]:
    """Q with Q[i][j] = best of jobs i.. on j nodes; Q[len(rows)] is the empty table."""
    tables = [np.zeros(nodes + 1, dtype=np.int64)]
    for row in reversed(rows):
        tables.append(add(tables[-1], row))
    return tables[::-1]


def trace(rows: list[Row], tables: list[np.ndarray], nodes: int) -> list[int]:
    """The sizes that lead to `tables` (suffixes). Among equals the first job gets most, then the second, and so on: a
    total order, because the caller has sorted the jobs by name."""
    left, chosen = nodes, []
    for row, rest in zip(rows, tables[1:], strict=True):
        usable = int(np.searchsorted(row.sizes, left, side="right"))
        totals = row.keys[:usable] + rest[left - row.sizes[:usable]]
        size = int(row.sizes[usable - 1 - int(np.argmax(totals[::-1]))])
        chosen.append(size)
        left -= size
    return chosen


def value_of(rows: list[Row], sizes: list[int]) -> int:
    """The sum of keys of one assignment."""
    return sum(int(row.keys[np.searchsorted(row.sizes, size)]) for row, size in zip(rows, sizes, strict=True))


class Bound:
    """Lagrangian bound: with a price of `price` per node, no plan on `nodes` nodes is worth more than
    `price * nodes + sum(best)`, where best[i] = max_k key_i(k) - price * k. A size of job i that lies more than
    (bound - a value already reached) under best[i] is in no optimal plan (the reduction test of the multiple-choice
    knapsack; Pisinger 1995, "A minimal algorithm for the multiple-choice knapsack problem")."""

    def __init__(self, rows: list[Row], nodes: int):
        self.rows, self.nodes = rows, nodes
        self.price, self.chosen = self._price()
        self.slack = []
        self.best = []
        for row in rows:
            reduced = row.keys - self.price * row.sizes
            self.best.append(int(reduced.max()))
            self.slack.append(self.best[-1] - reduced)
        self.upper = self.price * nodes + sum(self.best)

    def _at(self, price: int) -> tuple[int, int, list[int]]:
        """(value, slope, sizes) of the bound at one price."""
        value, used, sizes = price * self.nodes, 0, []
        for row in self.rows:
            reduced = row.keys - price * row.sizes
            at = int(np.argmax(reduced))
            value += int(reduced[at])
            sizes.append(int(row.sizes[at]))
            used += sizes[-1]
        return value, self.nodes - used, sizes

    def _price(self) -> tuple[int, list[int]]:
        """The price with the lowest bound, found with tangents of the convex bound, and a feasible assignment."""
        low, high = 0, 2**61 // max(self.nodes, 1)
        low_value, low_slope, sizes = self._at(low)
        if low_slope >= 0:
            return low, sizes
        high_value, high_slope, feasible = self._at(high)
        best = (high_value, high)
        for _ in range(64):
            if high_slope <= 0:
                break
            cut = (high_value - low_value + low_slope * low - high_slope * high) // (low_slope - high_slope)
            price = min(max(cut, low + 1), high - 1)
            if price <= low or price >= high:
                break
            value, slope, sizes = self._at(price)
            if value <= best[0]:
                best = (value, price)
            if slope >= 0:
                done = value == high_value + high_slope * (price - high)
                high, high_value, high_slope, feasible = price, value, slope, sizes
            else:
                done = value == low_value + low_slope * (price - low)
                low, low_value, low_slope = price, value, slope
            if done or slope == 0:
                break
        return best[1], feasible

    def within(self, gap: int) -> list[Row]:
        """The rows without the sizes whose slack is above `gap`; the smallest stays, so that the tables are filled."""
        return [self._within(i, gap)[0] for i in range(len(self.rows))]

    def _within(self, i: int, gap: int) -> tuple[Row, np.ndarray]:
        """One row of `within`, and its slack."""
        row, slack = self.rows[i], self.slack[i]
        keep = slack <= gap
        keep[0] = True
        return Row(row.sizes[keep], row.keys[keep]), slack[keep]

    def prefixes(self, gap: int) -> list[np.ndarray]:
        """Like `prefixes`, exact wherever the sum of slacks is within `gap`, and elsewhere too low or NONE."""
        return self._tables(range(len(self.rows)), gap)

    def suffixes(self, gap: int) -> list[np.ndarray]:
        """Like `suffixes`, exact wherever the sum of slacks is within `gap`, and elsewhere too low or NONE."""
        return self._tables(range(len(self.rows) - 1, -1, -1), gap)[::-1]

    def _tables(self, order: range, gap: int) -> list[np.ndarray]:
        tables, best = [np.zeros(self.nodes + 1, dtype=np.int64)], 0
        price = self.price * np.arange(self.nodes + 1)
        for i in order:
            row, slack = self._within(i, gap)
            tables.append(_add_within(tables[-1], row, slack, price + best - tables[-1], gap))
            best += self.best[i]
        return tables

    def wider(self, gap: int, goal: int) -> int:
        """The next gap to try on the way to `goal`, which suffices: eight times wider while that leaves out most sizes,
        else the goal."""
        gap = 8 * max(gap, 1)
        kept = sum(int(np.count_nonzero(slack <= gap)) for slack in self.slack)
        return gap if gap < goal and 8 * kept < sum(len(slack) for slack in self.slack) else goal

    def core_gap(self, per_job: int) -> int:
        """A gap within which about `per_job` sizes of each job lie on average; less if very many lie at that gap."""
        everything = np.concatenate(self.slack)
        count = min(per_job * len(self.rows), len(everything)) - 1
        gap = int(np.partition(everything, count)[count])
        crowded = int(np.count_nonzero(everything <= gap)) > 4 * (count + 1)
        return gap - 1 if crowded else gap


def _improve(rows: list[Row], sizes: list[int], nodes: int) -> list[int]:
    """Gives the nodes that are left to the job that gains most from them, up to three times."""
    sizes = list(sizes)
    for _ in range(3):
        left = nodes - sum(sizes)
        best = (0, 0, 0)
        for i, row in enumerate(rows):
            usable = int(np.searchsorted(row.sizes, sizes[i] + left, side="right"))
            at = int(np.argmax(row.keys[:usable]))
            now = int(row.keys[np.searchsorted(row.sizes, sizes[i])])
            best = max(best, (int(row.keys[at]) - now, i, int(row.sizes[at])))
        if best[0] <= 0:
            break
        sizes[best[1]] = best[2]
    return sizes


def optimum(rows: list[Row], nodes: int) -> tuple[list[int], int]:
    """(sizes, sum of keys) of the best assignment of at most `nodes` nodes; ties as in `trace`. The smallest sizes of
    the rows must fit."""
    bound = Bound(rows, nodes)
    fits = sum(bound.chosen) <= nodes  # always, unless a row lacks 0
    reached = value_of(rows, _improve(rows, bound.chosen, nodes)) if fits else NONE
    gap, goal = bound.core_gap(CORE), bound.upper - reached
    while True:
        gap = min(gap, goal)
        tables = bound.suffixes(gap)
        goal = min(goal, bound.upper - int(tables[0][nodes]))
        if goal <= gap:  # every optimum lies within the gap, so all of them are in these tables
            return trace(bound.within(gap), tables, nodes), int(tables[0][nodes])
        gap = bound.wider(gap, goal)
