"""The nodes that a job's elements may get: those on which Slurm itself would start them. Pure.

Slurm decides in the end, but an element pinned to a node that it cannot have waits for ever, and one that takes a node
before a pending job of higher priority jumps the queue. Sources: sbatch(1): --partition, --constraint,
--gres, --exclude, --reservation, --time; squeue(1): the scheduler's estimates.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from unicron_ctl.controller.model.view import Listing
from unicron_ctl.shared.slurm.slurm_client import ElementInfo, Needs, NodeInfo, PartitionInfo, Size
from unicron_planner.problem.gpus import node_peak


@dataclass(frozen=True)
class Reach:
    """The nodes that a job can get."""

    nodes: frozenset[str]
    """Nodes to which its elements may go, and those that they are on."""
    asks: str = ""
    """The job's requests of Slurm, in words."""
    barred: Mapping[str, int] = field(default_factory=dict)
    """The number of other nodes, by the reason that they are out of reach."""
    peak: float = float("inf")
    """The highest FLOP/s of a node."""


RIVALS = 200  # kinds of pending elements examined closely
COMPONENTS = 16  # of a heterogeneous job examined closely; also choices of features in brackets
ALWAYS = float("-inf")  # a rival may get the node at any time


class Ground:
    """The nodes that the jobs of the plan can get by one listing of Slurm, with the demand of pending jobs of others.

    These jobs cost a bounded time: the most urgent kinds (RIVALS) are examined for where they fit; of the others all
    nodes of their partitions count.

    Parameters
    ----------
    listing
        Slurm's answer.
    managed
        The ids of the jobs of the plan.
    now
        Seconds since the epoch.
    """

    def __init__(self, listing: Listing, managed: Collection[str], now: float) -> None:
        self._now, self._sorts, self._names = now, listing.sorts, listing.by_name.keys()
        self._wanted: dict[str, list[tuple[float, ElementInfo]]] = {}
        """node -> (when, pending element of others that may get it then). Each is less urgent than those before it, and
        comes sooner; after one that may come at any time no other counts."""
        self._open = [{node.name for node in sort} for sort in self._sorts]
        asked: set[tuple[object, ...]] = set()
        self._whole: dict[str, list[ElementInfo]] = {}  # the components of each heterogeneous job
        for e in listing.waiting:
            if e.hetero:
                self._whole.setdefault(e.hetero, []).append(e)
        for e in listing.waiting:  # the first of its kind comes first
            asks: tuple[object, ...] = (e.partition,)
            if roughly := len(asked) >= RIVALS:
                asks = (e.partition, "roughly")
            else:
                asks += (e.features, e.gres, e.asked, e.reservation, e.time_limit)
                asks += (e.excluded_nodes, e.required_nodes, e.planned_nodes, e.hetero)
            if e.job not in managed and asks not in asked:
                asked.add(asks)
                self._want(e, roughly)
                if not any(self._open):
                    break  # none is left for the rest

    def _want(self, rival: ElementInfo, roughly: bool) -> None:
        """Notes the nodes that a rival may get. roughly: any node of its partitions."""
        planned = frozenset() if roughly else rival.planned_nodes
        if planned and rival.starts is not None:
            for name in planned & self._names:
                first = self._wanted.setdefault(name, [])
                if not first or rival.starts < first[-1][0]:
                    first.append((rival.starts, rival))
            return
        if rival.hetero and not (planned or roughly or self._may_start(rival.hetero)):
            return  # Slurm itself keeps for such a job only planned nodes
        if len(rival.required_nodes) >= rival.asked.nodes and not roughly:
            planned = planned or rival.required_nodes  # it can get no others
        for k in self._sorts_for(rival, planned, roughly):
            names = self._open[k]
            taken = names & planned if planned else set(names) if roughly else names - rival.excluded_nodes
            for name in taken:
                self._wanted.setdefault(name, []).append((ALWAYS, rival))
            names -= taken

    def _sorts_for(self, rival: ElementInfo, planned: frozenset[str], roughly: bool) -> list[int]:
        """The sorts of nodes, among those still open, that may have the rival's nodes."""
        left = [k for k, names in enumerate(self._open) if names]
        if planned:
            return left
        if roughly:
            return [k for k in left if in_partition(rival, self._sorts[k][0])]
        return sorted(self._where(rival, left).intersection(left))

    def _may_start(self, hetero: str) -> bool:
        """Whether there are enough nodes for each component of a heterogeneous job, and for all together. Slurm gives
        no node to two of them."""
        parts = self._whole[hetero]
        if len(parts) > COMPONENTS:
            return True
        fits = [self._where(part) for part in parts]
        wants = [(part.asked.nodes, where) for part, where in zip(parts, fits, strict=True)]
        wants.append((sum(count for count, _ in wants), set[int]().union(*fits)))
        return all(count <= sum(len(self._sorts[k]) for k in where) for count, where in wants)

    def _where(self, ask: ElementInfo, among: Collection[int] | None = None) -> set[int]:
        """The sorts of nodes on which the element may start. All its nodes must have the same of the features in
        brackets, so each choice must be on enough nodes. among: the sorts in question; others may be found, too."""
        choices = one_for_all(ask.features) if ask.asked.cpus_in_all and ask.asked.nodes > 1 else []
        chosen = 0 < len(choices) <= COMPONENTS
        numbers = range(len(self._sorts)) if chosen or among is None else among
        where = {k for k in numbers if not misfit(ask, self._sorts[k][0], self._now)}
        if not chosen:
            return where
        found: set[int] = set()
        for choice in choices:
            there = {k for k in where if has_features(choice, self._sorts[k][0].features)}
            if sum(node.name not in ask.excluded_nodes for k in there for node in self._sorts[k]) >= ask.asked.nodes:
                found |= there
        return found

    def reach(
        self,
        elements: Iterable[ElementInfo],
        good: Collection[str],
        occupied: Collection[str],
        refused: Mapping[str, str] = {},
    ) -> Reach:
        """The reach of a job. elements: the job's. good: nodes in service without jobs of others. occupied: the job's
        present nodes. refused: nodes on which Slurm did not start it although pinned there, and why."""
        listed = list(elements)
        if not listed:
            return Reach(frozenset())
        ask = next((e for e in listed if e.state == "PENDING"), listed[-1])
        barred = self._bars(ask) | {name: f"refused by Slurm ({why})" for name, why in refused.items()}
        self._bar_for_rivals(barred, ask, min((e.priority for e in listed if e.priority), default=0))  # 0 while held
        here = {name for name in occupied if name in good}
        nodes = frozenset(name for name in good if name not in barred) | here
        why = Counter(reason for name, reason in barred.items() if name in good and name not in here)
        peaks = [node_peak(sort[0].gres) for sort in self._sorts if any(node.name in nodes for node in sort)]
        return Reach(nodes, _words(ask), dict(why), max(peaks, default=float("inf")))

    def _bar_for_rivals(self, barred: dict[str, str], ask: ElementInfo, priority: int) -> None:
        """Adds nodes that go to an element of others with a higher priority before this one would end."""
        ends = self._now + ask.time_limit if ask.time_limit is not None else float("inf")
        for name, wanted in self._wanted.items():
            if name not in barred:
                rival = next((e for starts, e in wanted if starts < ends and e.priority > priority), None)
                if rival is not None:
                    barred[name] = f"about to go to pending job {rival.job}"

    def _bars(self, ask: ElementInfo) -> dict[str, str]:
        """node -> why Slurm would not start the element there."""
        barred: dict[str, str] = {}
        where = self._where(ask)
        for k, sort in enumerate(self._sorts):
            if k not in where:
                too_few = f"without a feature of {ask.features} that is on {ask.asked.nodes} nodes"
                why = misfit(ask, sort[0], self._now) or too_few
                barred |= {node.name: why for node in sort}
        return barred | {name: "excluded by the job" for name in ask.excluded_nodes if name in self._names}


def misfit(ask: ElementInfo, node: NodeInfo, now: float) -> str:
    """Why Slurm would not start the element on a node of this sort; empty when it would."""
    if not in_partition(ask, node):
        return f"not in partition {ask.partition}"
    if not any(_allows(limit, ask) for limit in _limits(ask, node)):
        return f"beyond the limits of partition {ask.partition}"
    if not has_gres(ask.gres, node.gres):
        return f"without {ask.gres}"
    nodes = ask.asked.nodes if ask.asked.cpus_in_all else float("inf")  # unknown
    if ask.features and not has_features(ask.features, node.features, nodes):
        return f"without the features {ask.features}"
    if why := too_small(ask.asked, node.size):
        return why
    names = {reserved.name for reserved in node.reservations}
    if ask.reservation:
        return "" if names & set(ask.reservation.split(",")) else f"not in reservation {ask.reservation}"
    ends = now + ask.time_limit if ask.time_limit is not None else float("inf")
    reserved = next((r for r in node.reservations if r.starts < ends and r.ends > now), None)
    return f"reserved ({reserved.name})" if reserved else ""


def in_partition(ask: ElementInfo, node: NodeInfo) -> bool:
    """Whether one of the requested partitions has the node."""
    partitions = {name for name in ask.partition.split(",") if name}
    return not partitions or not node.partitions or not partitions.isdisjoint(node.partitions)


def _limits(ask: ElementInfo, node: NodeInfo) -> list[PartitionInfo]:
    """The limits of each partition through which the element may get the node."""
    asked = {name for name in ask.partition.split(",") if name} & set(node.partitions)
    limits = {limit.name: limit for limit in node.limits}
    return [limits.get(name, PartitionInfo(name, 0, "")) for name in sorted(asked)] or [PartitionInfo("", 0, "")]


def _allows(partition: PartitionInfo, ask: ElementInfo) -> bool:
    """Whether the request is within the partition's limits. For a single partition Slurm itself reports it, and a QOS
    may lift the limit; only for CPUs of a node Slurm has no reason of its own."""
    if ask.asked.nodes == 1 and ask.asked.cpus_in_all > partition.max_cpus:
        return False
    seconds = ask.time_limit if ask.time_limit is not None else 0.0
    return "," not in ask.partition or (
        seconds <= partition.max_seconds
        and partition.min_nodes <= ask.asked.nodes <= partition.max_nodes
        and max(ask.asked.memory, ask.asked.in_all) <= partition.max_memory
    )


def too_small(ask: Needs, size: Size) -> str:
    """Say what a node of this size lacks; empty if it is large enough, or its size is unknown."""
    if not size.cpus:
        return ""
    cores = -(-size.cpus // size.threads)  # without those reserved for the system
    fewer = 0 < ask.threads < size.threads  # only so many threads of each core are used
    usable = cores * ask.threads if fewer else size.cpus
    per_socket = cores // size.sockets if ask.sockets == size.sockets else -(-cores // size.sockets)
    memory, given = ask.memory, size.memory
    if size.to_give is not None:
        cpus = ask.cpus if fewer else -(-ask.cpus // size.threads) * size.threads  # Slurm gives whole cores
        if ask.tasks_per_core == ask.cpus_per_task == 1:
            cpus = ask.cpus * size.threads  # a core for each
        memory, given = max(ask.memory, ask.in_all, ask.per_cpu * cpus), size.to_give
    # Slurm 22.05 gives the tasks of a socket whole cores, and the rest of these to others.
    a_socket = -(-ask.tasks_per_socket * ask.cpus_per_task // size.threads) * size.threads
    for_sockets = -(-ask.tasks * ask.cpus_per_task // a_socket) if a_socket else 0
    for_cores = -(-ask.tasks // ask.tasks_per_core) if ask.tasks_per_core else 0
    checks = (
        (max(ask.cpus, ask.room * ask.cpus_per_task), usable, "CPUs"),
        (max(ask.sockets, for_sockets), size.sockets, "sockets"),
        (for_cores, cores, "cores"),
        (ask.tasks_per_socket, per_socket * size.threads, "CPUs a socket"),
        (ask.cores, per_socket, "cores a socket"),
        (ask.threads, size.threads, "threads a core"),
        (memory, given, "MB of memory"),
        (ask.tmp, size.tmp, "MB of local disk"),
    )
    return next((f"with fewer than {asked} {what}" for asked, there, what in checks if asked > there), "")


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


def has_features(constraint: str, features: Collection[str], nodes: float = float("inf")) -> bool:
    """Whether one node of an element with so many meets a constraint of sbatch(1): names with & and |, taken from the
    left, brackets of any kind. Of names with counts ("[a*2&b*1]") a node needs one, and the counts are of different
    nodes. False for an unintelligible constraint: such an element stays where Slurm puts it."""
    if sum(map(int, re.findall(r"\*(\d+)", constraint))) > nodes:
        return False
    tokens = re.findall(r"[\[\]()&|,]|[^\[\]()&|,]+", constraint.replace(" ", ""))
    try:
        value, rest = _expression(tokens, set(features), "*" in constraint)
    except IndexError:
        return False
    return value and not rest


def one_for_all(constraint: str) -> list[str]:
    """The constraint with each of the choices in its brackets: `x&[a|b]` is `x&(a)` or `x&(b)`. Empty without such a
    choice."""
    found = re.fullmatch(r"([^\[\]*]*)\[([^\[\]*]*)\]([^\[\]*]*)", constraint.replace(" ", ""))
    if found is None or "|" not in found[2]:
        return []
    choices, depth = [""], 0
    for sign in found[2]:
        depth += (sign == "(") - (sign == ")")
        if sign == "|" and depth <= 0:
            choices.append("")
        else:
            choices[-1] += sign
    return [f"{found[1]}({choice}){found[3]}" for choice in choices]


def _expression(tokens: Sequence[str], features: Collection[str], counted: bool) -> tuple[bool, Sequence[str]]:
    value, rest = _term(tokens, features, counted)
    while rest and rest[0] in "&|,":
        more, after = _term(rest[1:], features, counted)
        value = (value or more) if counted or rest[0] == "|" else (value and more)
        rest = after
    return value, rest


def _term(tokens: Sequence[str], features: Collection[str], counted: bool) -> tuple[bool, Sequence[str]]:
    first, rest = tokens[0], tokens[1:]
    if first in "([":
        value, rest = _expression(rest, features, counted and first == "[")
        if rest[0] not in ")]":
            return False, rest
        rest = rest[1:]
        return value, rest[1:] if rest and re.fullmatch(r"\*\d+", rest[0]) else rest
    return first not in ")]&|," and re.sub(r"\*\d+$", "", first) in features, rest


def _words(ask: ElementInfo) -> str:
    parts = [f"partition {ask.partition}" if ask.partition else "", ask.gres, ask.features]
    parts += [f"reservation {ask.reservation}" if ask.reservation else ""]
    return ", ".join(part for part in parts if part)
