"""From the plan (nodes per job) and what Slurm shows to Slurm actions in order, each with its reason. Pure and
idempotent.

Nothing is remembered but the pins, which Slurm's listing does not show: every poll compares what is wanted with what
is. The calls and their order are those measured in a private cluster: pin and release first, then take the node away.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from unicron_ctl.controller.model.cluster_state import Pin
from unicron_ctl.controller.model.requests import RELEASE_COMMENT, Action
from unicron_ctl.shared.slurm import pending_reasons
from unicron_ctl.shared.slurm.admin_comment import HOLD_PREFIX
from unicron_ctl.shared.slurm.pending_reasons import Bar
from unicron_ctl.shared.slurm.slurm_client import ElementInfo, NodeInfo
from unicron_ctl.shared.slurm.squeue import names_of, nodes_of
from unicron_ctl.shared.slurm.states import OCCUPIES, WORKS
from unicron_detector.words import plural

REQUEUE_SECONDS = 30.0  # between two requeues of an element that ended before its agent came
KICK_SECONDS = 3.0  # a pinned element that still waits is told to start again
PIN_SECONDS = 30.0  # then another node is tried
_STAYS = OCCUPIES - {"COMPLETING"}
MOST_HOLDS = 100  # of one job at once: each is two calls of Slurm; the others follow with the next listings


@dataclass(frozen=True)
class Need:
    """The elements that a job is to have, of `block` nodes each."""

    job: str
    desired: int
    members: frozenset[int] = frozenset()
    """Those that train."""
    dead: frozenset[int] = frozenset()
    """Those whose agent died while the node lives."""
    ended: frozenset[int] = frozenset()
    """Those that ended before their agent came again."""
    ending: frozenset[int] = frozenset()
    """Those that Slurm shows ended, of which nothing is decided yet."""
    leaving: tuple[int, ...] = ()
    """Those chosen before to leave."""
    home: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """The nodes that an element ran on last."""
    lives: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """Where an element's agents are heard; also those that Slurm counts as ended and has not reached yet, so that it
    would launch no second copy there, and drain the node."""
    requeued: Mapping[int, float] = field(default_factory=dict)
    """When Slurm was asked to start an element again whose agents have not come yet."""
    avoid: frozenset[str] = frozenset()
    """Nodes where none is to start."""
    refused: frozenset[str] = frozenset()
    """Nodes on which Slurm starts none, and which nobody avoids."""
    why: str = ""
    reach: frozenset[str] | None = None
    """The nodes that its elements may be given; None for all."""
    unit: int = 1
    """So many elements in a row hold whole replicas."""
    least: int = 1
    """With fewer elements it does not train."""
    block: int = 1
    allocation: tuple[str, ...] = ()
    """The nodes of a job that is one allocation, in Slurm's order."""
    stays: frozenset[int] = frozenset()
    """Elements whose nodes it does not give back."""
    empty: frozenset[int] = frozenset()
    """Those on whose nodes nothing of it runs any more."""

    @property
    def size(self) -> int:
        """Nodes that it is to have."""
        return self.desired * self.block

    def may_have(self, node: str) -> bool:
        return node not in self.avoid | self.refused and (self.reach is None or node in self.reach)

    def why_not(self, node: str) -> str:
        """Why the job may not have this node, which it may not."""
        return f"{self.job} avoids {node}" if node in self.avoid else f"{self.job} may not be given {node}"


@dataclass
class Placement:
    """actions in order. allotted, leaving: elements by job."""

    actions: list[Action] = field(default_factory=list)
    allotted: dict[str, list[int]] = field(default_factory=dict)
    leaving: dict[str, list[int]] = field(default_factory=dict)
    unpinned: list[tuple[str, int]] = field(default_factory=list)


def usable(
    nodes: Sequence[NodeInfo], elements: Sequence[ElementInfo], managed: Collection[str], put_aside: Collection[str]
) -> list[str]:
    """The nodes that the plan may give out: in service, and not used by jobs that are not managed here. A node that
    such a job leaves counts: it is free in a moment, and nothing needs to be taken from anybody in its place."""
    foreign = {name for e in elements if e.state in _STAYS and e.job not in managed for name in nodes_of(e)}
    return sorted(n.name for n in nodes if n.healthy and n.name not in put_aside and n.name not in foreign)


def whole(element: ElementInfo, nodes: Collection[str], block: int) -> bool:
    """All of its nodes are there, and are among these."""
    names = nodes_of(element)
    return len(names) == block and all(name in nodes for name in names)


def held_by_others(element: ElementInfo, ours: Collection[tuple[str, int]]) -> bool:
    """A user or an admin holds it: it is not ours to release. ours: what the log says was held here."""
    return element.held and (element.job, element.element) not in ours


class _Place:
    """The work of one call of `place`."""

    def __init__(
        self,
        elements: Sequence[ElementInfo],
        nodes: Sequence[NodeInfo],
        pins: Mapping[tuple[str, int], Pin],
        put_aside: Collection[str],
        now: float,
        held: Collection[tuple[str, int]],
        domains: Mapping[str, str],
    ) -> None:
        self.out = Placement()
        self.now, self.pins, self.held, self.domains = now, pins, held, domains
        self.good = {n.name for n in nodes if n.healthy and n.name not in put_aside}
        self.asleep = {n.name for n in nodes if n.asleep}
        self.by_job: dict[str, dict[int, ElementInfo]] = {}
        for e in elements:
            self.by_job.setdefault(e.job, {})[e.element] = e
        self.taken = {name for e in elements if e.state in OCCUPIES for name in nodes_of(e)}
        self.groups: dict[str, dict[str, list[int]]] = {}
        self.queues: dict[str, list[ElementInfo]] = {}
        self.leavers: dict[str, list[int]] = {}
        self.started: dict[str, set[int]] = {}
        self.loose: list[tuple[str, int]] = []  # elements whose pins hold no longer

    def choose_leavers(self, needs: Sequence[Need]) -> None:
        """Surveys what each job has, and chooses who leaves."""
        self.groups = {need.job: self.survey(need) for need in needs}
        self.leavers = {need.job: [] for need in needs}
        self.started = {need.job: set() for need in needs}
        self.leavers = {need.job: _leavers(self, need, needs) for need in needs}

    def survey(self, need: Need) -> dict[str, list[int]]:
        """A job's elements by what they do: working, limbo (on a node that is out of service), coming (pinned),
        waiting, barred (Slurm gives a reason why they cannot start; `limited` are those that may at any moment).
        """
        names = ("working", "limbo", "coming", "waiting", "barred", "limited")
        groups: dict[str, list[int]] = {name: [] for name in names}
        for number, e in self.by_job.get(need.job, {}).items():
            pinned = (need.job, number) in self.pins
            if pinned and e.state in WORKS:
                self.out.unpinned.append((need.job, number))
            if why := self._why_again(need, e):
                if not self._begins(need, e):
                    self.act("requeue", e, ",".join(nodes_of(e)), f"{why}: start the element again")
                groups["limbo"].append(number)
            elif number in need.ending:
                groups["limbo"].append(number)
            elif e.state in WORKS:
                groups["working" if whole(e, self.good, need.block) else "limbo"].append(number)
            elif e.state == "PENDING" and not held_by_others(e, self.held):
                for name in self._survey_pending(need, e):
                    groups[name].append(number)
        for found in groups.values():
            found.sort()
        return groups

    def _survey_pending(self, need: Need, e: ElementInfo) -> tuple[str, ...]:
        """The groups of an element that waits."""
        pin = self.pins.get((need.job, e.element))
        told = names_of(pin.node) if pin is not None else ()
        refused = not need.refused.isdisjoint(told)
        of_others = pin is not None and not pending_reasons.is_told(e, told)  # the reason is of nodes before these
        bar = Bar.NOTHING if e.held or refused or of_others else pending_reasons.bar_of(e, self.now)
        if pin is not None and not refused and bar is Bar.NOTHING and self._pin_holds(e):
            return ("coming",)
        if pin is not None:
            self.loose.append((need.job, e.element))
        if bar is Bar.NOTHING:
            return ("waiting",)
        return ("barred", "limited") if bar is Bar.LIMIT else ("barred",)

    def _why_again(self, need: Need, e: ElementInfo) -> str:
        """Why the element is to be started again; empty where it is not."""
        if e.element in need.dead and e.state in WORKS:
            return "its agent died"
        if e.element in need.ended:
            return "it ended before its agent came"
        short = e.state == "RUNNING" and len(nodes_of(e)) < need.block
        return f"it has {len(nodes_of(e))} of its {need.block} nodes" if short else ""

    def _begins(self, need: Need, e: ElementInfo) -> bool:
        """Slurm has begun it again since its agent died: what is starting is not ended once more."""
        asked = need.requeued.get(e.element)
        here = frozenset(nodes_of(e))
        if e.state in WORKS and len(here) == need.block:
            return asked is not None or here != need.home.get(e.element, here)
        return asked is not None and self.now - asked < REQUEUE_SECONDS

    def _pin_holds(self, e: ElementInfo) -> bool:
        pin = self.pins[e.job, e.element]
        names = names_of(pin.node)
        if e.held or not self.good.issuperset(names):
            return False
        age = self.now - pin.at
        if age > PIN_SECONDS:
            return False
        self.taken.update(names)
        if age > KICK_SECONDS:
            self.act("start_now", e, pin.node, f"it has waited {age:.0f} s for {pin.node}")
        return True

    def act(self, action: str, e: ElementInfo, node: str, reason: str, text: str = "") -> None:
        self.out.actions.append(Action(action, e.job, e.element, node, reason, text))

    def start(self, e: ElementInfo, node: str, reason: str) -> None:
        self.act("pin", e, node, reason)
        if e.held:
            self.act("release", e, node, reason, RELEASE_COMMENT)
        self.taken.update(names_of(node))

    def choose(self, need: Need, e: ElementInfo, free: Sequence[str], needs: Sequence[Need]) -> str:
        """The nodes on which the element is to start, of those that are free, with commas; empty where they are too
        few. First those that it had, if all are free. Else those that fail together, with as many that it had as there
        can be, and of a domain that they fill; of these what the fewest others can use, who may have no choice."""
        lives, home = need.lives.get(e.element, ()), need.home.get(e.element, frozenset())
        fit = [name for name in free if need.may_have(name) and name not in lives]
        if len(fit) < need.block:
            return ""
        if len(home) == need.block and home.issubset(fit):
            return ",".join(sorted(home))

        def order(name: str) -> tuple[bool, int]:
            return name not in home, sum(one.may_have(name) for one in needs)

        if need.block == 1:
            return min(fit, key=order)
        ranked, near = sorted(fit, key=order), dict[str, list[str]]()
        for name in ranked:
            near.setdefault(self.domains.get(name, ""), []).append(name)
        enough = [names for names in near.values() if len(names) >= need.block]
        best = min(enough, key=lambda names: (-len(home.intersection(names)), len(names)), default=ranked)
        return ",".join(sorted(best[: need.block]))


def place(
    needs: Sequence[Need],
    elements: Sequence[ElementInfo],
    nodes: Sequence[NodeInfo],
    pins: Mapping[tuple[str, int], Pin] = {},
    put_aside: Collection[str] = (),
    now: float = 0.0,
    held: Collection[tuple[str, int]] = (),
    domains: Mapping[str, str] = {},
) -> Placement:
    """Return what to do now so that every job gets its nodes. `needs` are the managed jobs; other jobs' elements only
    occupy nodes. held: elements that were held here. domains: node -> the switch or the block with which it fails."""
    work = _Place(elements, nodes, pins, put_aside, now, held, domains)
    work.choose_leavers(needs)
    _give_free_nodes(work, needs)
    _change_nodes(work, needs)
    _hold_limited(work, needs)
    _take_nodes(work, needs)
    for need in needs:
        group = work.groups[need.job]
        wanted = (
            set(group["working"]) - set(work.leavers[need.job])
            | set(group["coming"])
            | work.started[need.job]
            | set(group["limbo"])
        )
        _hold(work, need, wanted)
        work.out.allotted[need.job] = sorted(wanted)
        staying = {number for number in work.leavers[need.job] if number in need.members}
        work.out.leaving[need.job] = sorted(staying)
        # What still trains stays allotted to nobody: it leaves at an iteration boundary.
    for job, number in work.loose:
        if number not in work.started[job]:  # another pin takes the place of the first
            work.act("pin", work.by_job[job][number], "", f"it is not to wait for {pins[job, number].node} any more")
    return work.out


def _hold(work: _Place, need: Need, wanted: Collection[int]) -> None:
    """Holds what waits and is not to start: as many as the job is still short of may wait unheld, for a node for them
    is on its way. Not where the job avoids nodes: Slurm knows nothing of that, and could start it there.
    """
    soon = max(0, _missing(work, need)) if not need.avoid else 0
    kept = {*wanted, *(e.element for e in _candidates(work, need, soon))}
    why = f"the plan gives {plural(need.size, 'node')} to job {need.job}, and no more"
    _hold_some(work, need, (number for number in work.groups[need.job]["waiting"] if number not in kept), why)


def _hold_limited(work: _Place, needs: Sequence[Need]) -> None:
    """Elements that a limit keeps from starting are let alone, so that its end is seen; but where the job gives up
    nodes, one of them would start on the first of these."""
    for need in needs:
        if work.leavers[need.job]:
            why = f"the plan takes nodes from {need.job}, and it would start on one of them"
            _hold_some(work, need, work.groups[need.job]["limited"], why)


def _hold_some(work: _Place, need: Need, numbers: Iterable[int], why: str) -> None:
    job = work.by_job.get(need.job, {})
    for e in islice((job[number] for number in numbers if not job[number].held), MOST_HOLDS):
        work.act("hold", e, "", why, f"{HOLD_PREFIX}, the plan has no node for it")


def _leavers(work: _Place, need: Need, needs: Sequence[Need]) -> list[int]:
    """The elements that a job has too many: those chosen before, then those whose nodes others can use."""
    working = work.groups[need.job]["working"]
    extra = len(working) - need.desired
    if extra <= 0:
        return []
    unit = Counter(number // need.unit for number in working)
    short = [other for other in needs if other.job != need.job and _missing(work, other) > 0]

    def order(number: int) -> tuple[bool, bool, bool, bool, int]:
        names = nodes_of(work.by_job[need.job][number])
        useless = bool(short) and not any(other.may_have(name) for other in short for name in names)
        complete = unit[number // need.unit] == need.unit  # those that make no whole replicas go first
        return number not in need.leaving, useless, number in need.members, complete, -number

    return sorted(sorted((number for number in working if number not in need.stays), key=order)[:extra])


def _missing(work: _Place, need: Need) -> int:
    group = work.groups[need.job]
    return (
        need.desired
        - (len(group["working"]) - len(work.leavers[need.job]))
        - len(group["coming"])
        - len(group["limbo"])
        - len(work.started[need.job])
    )


def _candidates(work: _Place, need: Need, most: int | None = None) -> Iterator[ElementInfo]:
    """Pending elements, those that ran before first: they go on under their old ids. Then those beside elements that
    are there, whose replicas they complete. No more than `most`."""
    queue = work.queues.get(need.job)
    if queue is None:
        queue = work.queues[need.job] = _queue(work, need)
    started = work.started[need.job]
    return islice((e for e in queue if e.element not in started), most)


def _queue(work: _Place, need: Need) -> list[ElementInfo]:
    """The first ones of those that wait, as many as the job could use at all: an array may have 100,000."""
    group, job = work.groups[need.job], work.by_job.get(need.job, {})
    there = Counter(number // need.unit for part in ("working", "coming", "limbo") for number in group[part])

    def order(e: ElementInfo) -> tuple[bool, int, int, int]:
        held = e.held
        beside = there[e.element // need.unit] if need.unit > 1 else 0
        return held, -e.restarts if not held else 0, -beside, e.element

    most = max(need.desired, len(work.good)) + need.unit
    return heapq.nsmallest(most, (job[number] for number in group["waiting"]), key=order)


def _give_free_nodes(work: _Place, needs: Sequence[Need]) -> None:
    free = sorted(work.good - work.taken, key=lambda name: (name in work.asleep, name))
    for need in needs:
        for e in list(_candidates(work, need)):
            if _missing(work, need) <= 0:
                break
            node = work.choose(need, e, free, needs)
            if not node:
                continue
            free = [name for name in free if name not in names_of(node)]
            work.start(e, node, f"job {need.job} is to have {plural(need.size, 'node')} and {node} is free")
            work.act("start_now", e, node, "no need to wait: the node is free")
            work.started[need.job].add(e.element)


def _change_nodes(work: _Place, needs: Sequence[Need]) -> None:
    """A free node that a job may not have still helps it: another job takes that node, and leaves one of its own for
    it. One of its elements that wait is started there first; where none waits, one leaves first. A job with no more
    elements than it needs at least is let alone."""
    for need in needs:
        short = min(_missing(work, need), sum(1 for _ in _candidates(work, need)))
        for node in sorted(work.good - work.taken):
            if short <= 0:
                break
            short -= _changed(work, need, node, needs)


def _changed(work: _Place, need: Need, node: str, needs: Sequence[Need]) -> bool:
    """Whether some other job takes the free node, and leaves another for `need`."""
    for other in needs:
        own = _to_leave_for(work, need, other, node)
        extra = _missing(work, other)
        if own is None or extra or work.leavers[other.job]:  # it is changing already, or has its own wants
            continue
        taker = next((e for e in _candidates(work, other) if node not in other.lives.get(e.element, ())), None)
        if taker is None:
            work.leavers[other.job].append(own)
            return True
        work.start(taker, node, f"{need.why_not(node)}: {other.job} takes it, and leaves another for it")
        work.act("start_now", taker, node, "no need to wait: the node is free")
        work.started[other.job].add(taker.element)
        return True
    return False


def _to_leave_for(work: _Place, need: Need, other: Need, node: str) -> int | None:
    """Which of its elements the other job could leave to `need` for that free node; None where it could not.

    One that does not train goes first. One that trains may leave before the newcomer has joined, so that as many as the
    job needs at least have to train without it.
    """
    larger = max(other.unit, need.unit, other.block, need.block) > 1
    if other.job == need.job or larger or not other.may_have(node) or need.may_have(node):
        return None
    working = work.groups[other.job]["working"]
    own = [number for number in working if need.may_have(work.by_job[other.job][number].node or "")]
    if idle := [number for number in own if number not in other.members]:
        return max(idle) if len(working) > other.least else None
    return max(own) if own and sum(number in other.members for number in working) > other.least else None


def _take_nodes(work: _Place, needs: Sequence[Need]) -> None:
    """Elements that have left (or never got in) give up their nodes, to whom the plan wants there first. Whoever needs
    the nodes of several waits for the last of these."""
    free = sorted(work.good - work.taken)
    donors: list[tuple[Need, list[ElementInfo]]] = []
    for need in needs:
        for gifts in _gifts(work, need):
            donors.append((need, gifts))
            free += [name for e in gifts for name in nodes_of(e)]
            takers = []
            for other in needs:
                while found := _taker(work, other, need, free, needs):
                    takers.append(found)
                    free = [name for name in free if name not in names_of(found[1])]
            if takers or not any(other.block > 1 and _missing(work, other) > 0 for other in needs):
                _hand_over(work, donors, takers)
                donors = []
    _hand_over(work, donors, [])


def _gifts(work: _Place, need: Need) -> list[list[ElementInfo]]:
    """The elements that the job can give up now, those together that one call of Slurm takes: all that are to leave an
    allocation, once nothing runs on their nodes any more."""
    job, leavers = work.by_job.get(need.job, {}), work.leavers[need.job]
    if not need.allocation:
        return [[job[number]] for number in leavers if number not in need.members]
    return [[job[number] for number in leavers]] if leavers and need.empty.issuperset(leavers) else []


def _taker(
    work: _Place, other: Need, donor: Need, free: Sequence[str], needs: Sequence[Need]
) -> tuple[ElementInfo, str] | None:
    """An element of the other job that is started on nodes that are free, or will be, and on which."""
    if other.job == donor.job or _missing(work, other) <= 0:
        return None
    taker = next(_candidates(work, other), None)
    node = work.choose(other, taker, free, needs) if taker is not None else ""
    if taker is None or not node:
        return None
    work.start(taker, node, f"the plan moves {node} from {donor.job} to {taker.job}")
    work.started[taker.job].add(taker.element)
    return taker, node


def _hand_over(
    work: _Place, donors: Sequence[tuple[Need, Sequence[ElementInfo]]], takers: Sequence[tuple[ElementInfo, str]]
) -> None:
    """The donors' nodes are taken, and the takers start on them."""
    jobs = ", ".join(dict.fromkeys(taker.job for taker, _ in takers))
    for need, gifts in donors:
        donor, names = gifts[0], [name for e in gifts for name in nodes_of(e)]
        node = ",".join(names)
        why = f"the plan gives {plural(need.size, 'node')} to job {need.job}" + (f": {need.why}" if need.why else "")
        if need.allocation:
            staying = ",".join(name for name in need.allocation if name not in names)
            work.act("shrink", replace(donor, element=0), node, why, staying)
            continue
        work.act(
            "requeue_hold", donor, node, why, f"{HOLD_PREFIX}, the plan took {node}" + (f" for {jobs}" if jobs else "")
        )
    for taker, node in takers:
        work.act("start_now", taker, node, f"{node} is free for it now")
