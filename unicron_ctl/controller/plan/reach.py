"""Which nodes a job's elements may be given: those on which Slurm itself would start them. Pure.

Slurm decides in the end, but an element that is pinned to a node that it cannot have waits for ever, and one that takes
a node from under a pending job of higher priority jumps the queue. Sources: sbatch(1): --partition, --constraint,
--gres, --exclude, --reservation, --time; squeue(1): the scheduler's estimates.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from planner.gpus import node_peak
from unicron_ctl.controller.model.view import Listing
from unicron_ctl.slurm.client import ElementInfo, NodeInfo


@dataclass(frozen=True)
class Reach:
    """nodes: where the job's elements may go, and those that they are on. asks: what Slurm looks at, in words. barred:
    how many other nodes are out of reach, by the reason. peak: FLOP/s that one of the nodes can do at most."""

    nodes: frozenset[str]
    asks: str = ""
    barred: Mapping[str, int] = field(default_factory=dict)
    peak: float = float("inf")


class Ground:
    """What Slurm showed, for jobs that are planned for: `managed`, by id. now: seconds since the epoch."""

    def __init__(self, listing: Listing, managed: Collection[str], now: float) -> None:
        self._now, self._sorts, self._names = now, listing.sorts, listing.by_name.keys()
        self._rivals: dict[tuple[frozenset[str], float | None], ElementInfo] = {}
        """(nodes, when) -> the most urgent pending element of others that may get them then."""
        asked: set[tuple[object, ...]] = set()
        for e in listing.waiting:
            asks = (e.partition, e.features, e.gres, e.reservation, e.excluded_nodes, e.time_limit, e.planned_nodes)
            if e.job not in managed and asks not in asked:  # the first of its kind comes first
                asked.add(asks)
                nodes = e.planned_nodes or frozenset(self._names - self._barred(e).keys())
                self._rivals.setdefault((nodes, e.starts if e.planned_nodes else None), e)

    def reach(self, elements: Iterable[ElementInfo], good: Collection[str], occupied: Collection[str]) -> Reach:
        """elements: the job's. good: nodes in service that no job of others uses. occupied: those it has now."""
        listed = list(elements)
        if not listed:
            return Reach(frozenset())
        ask = next((e for e in listed if e.state == "PENDING"), listed[-1])
        barred = self._barred(ask)
        priority = min((e.priority for e in listed if e.priority), default=0)  # it has none while it is held
        ends = self._now + ask.time_limit if ask.time_limit is not None else float("inf")
        for (nodes, starts), rival in self._rivals.items():
            if rival.priority > priority and (starts is None or starts < ends):
                barred |= dict.fromkeys(nodes - barred.keys(), f"about to go to pending job {rival.job}")
        here = {name for name in occupied if name in good}
        nodes = frozenset(name for name in good if name not in barred) | here
        why = Counter(reason for name, reason in barred.items() if name in good and name not in here)
        peaks = [node_peak(sort[0].gres) for sort in self._sorts if any(node.name in nodes for node in sort)]
        return Reach(nodes, _words(ask), dict(why), max(peaks, default=float("inf")))

    def _barred(self, ask: ElementInfo) -> dict[str, str]:
        """node -> why Slurm would not start the element there."""
        barred: dict[str, str] = {}
        for sort in self._sorts:
            if why := misfit(ask, sort[0], self._now):
                barred |= {node.name: why for node in sort}
        return barred | {name: "excluded by the job" for name in ask.excluded_nodes if name in self._names}


def misfit(ask: ElementInfo, node: NodeInfo, now: float) -> str:
    """Why Slurm would not start the element on a node of this sort; empty when it would."""
    partitions = {name for name in ask.partition.split(",") if name}
    if partitions and node.partitions and partitions.isdisjoint(node.partitions):
        return f"not in partition {ask.partition}"
    if not has_gres(ask.gres, node.gres):
        return f"without {ask.gres}"
    if ask.features and not has_features(ask.features, node.features):
        return f"without the features {ask.features}"
    names = {reserved.name for reserved in node.reservations}
    if ask.reservation:
        return "" if names & set(ask.reservation.split(",")) else f"not in reservation {ask.reservation}"
    ends = now + ask.time_limit if ask.time_limit is not None else float("inf")
    reserved = next((r for r in node.reservations if r.starts < ends and r.ends > now), None)
    return f"reserved ({reserved.name})" if reserved else ""


def has_gres(asked: str, there: str) -> bool:
    """ "gpu:4" is in "gpu:a100:8", "gpu:h100:4" is not."""
    counts: Counter[tuple[str, str]] = Counter()
    for name, kind, count in _gres(there):
        counts[name, kind] += count
        if kind:
            counts[name, ""] += count
    wanted: Counter[tuple[str, str]] = Counter()
    for name, kind, count in _gres(asked):
        wanted[name, kind] += count
    return all(counts[key] >= count for key, count in wanted.items())


def _gres(text: str) -> list[tuple[str, str, int]]:
    found = []
    for item in filter(None, (part.strip().lower() for part in text.split(","))):
        words = re.split(r"[:=]", item)
        last = re.fullmatch(r"(\d+)([kmgt]?)", words[-1])
        count = int(last[1]) * 1024 ** " kmgt".index(last[2] or " ") if last else 1
        kinds = words[1:-1] if last else words[1:]
        found.append((words[0], kinds[0] if kinds else "", count))
    return found


def has_features(constraint: str, features: Collection[str]) -> bool:
    """Whether one node meets a constraint of sbatch(1): names with & and |, taken from the left, brackets of any kind,
    counts ("a*2"). False for what cannot be understood: such an element stays where Slurm puts it."""
    tokens = re.findall(r"[\[\]()&|,]|[^\[\]()&|,]+", constraint.replace(" ", ""))
    try:
        value, rest = _expression(tokens, set(features))
    except IndexError:
        return False
    return value and not rest


def _expression(tokens: Sequence[str], features: Collection[str]) -> tuple[bool, Sequence[str]]:
    value, rest = _term(tokens, features)
    while rest and rest[0] in "&|,":
        more, after = _term(rest[1:], features)
        value = (value or more) if rest[0] == "|" else (value and more)
        rest = after
    return value, rest


def _term(tokens: Sequence[str], features: Collection[str]) -> tuple[bool, Sequence[str]]:
    first, rest = tokens[0], tokens[1:]
    if first in "([":
        value, rest = _expression(rest, features)
        if rest[0] not in ")]":
            return False, rest
        rest = rest[1:]
        return value, rest[1:] if rest and re.fullmatch(r"\*\d+", rest[0]) else rest
    return first not in ")]&|," and re.sub(r"\*\d+$", "", first) in features, rest


def _words(ask: ElementInfo) -> str:
    parts = [f"partition {ask.partition}" if ask.partition else "", ask.gres, ask.features]
    parts += [f"reservation {ask.reservation}" if ask.reservation else ""]
    return ", ".join(part for part in parts if part)
