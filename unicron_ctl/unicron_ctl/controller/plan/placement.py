"""From the plan (nodes per job) and Slurm's listing to Slurm actions in order, each with its reason. Pure and
idempotent.

Only the pins are kept, as Slurm's listing does not show them: every poll compares the plan with the listing. The calls
and their order are those measured in a private cluster: pin and release first, then take the node away.
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
KICK_SECONDS = 3.0  # a pinned element that still waits is started again
PIN_SECONDS = 30.0  # then another node is tried
_STAYS = OCCUPIES - {"COMPLETING"}
MOST_HOLDS = 100  # of one job at once: each is two calls of Slurm; the others follow with the next listings


@dataclass(frozen=True)
class Need:
    """The elements that the plan gives a job, of `block` nodes each."""

    job: str
    desired: int
    members: frozenset[int] = frozenset()
    """Elements that train."""
    dead: frozenset[int] = frozenset()
    """Elements whose agent died while the node lives."""
    ended: frozenset[int] = frozenset()
    """Elements that ended before their agent came again."""
    ending: frozenset[int] = frozenset()
    """Elements that ended according to Slurm, without a decision yet."""
    leaving: tuple[int, ...] = ()
    """Elements chosen earlier to leave."""
    home: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """The last nodes of each element."""
    lives: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """The nodes of each element's living agents, even if Slurm counts them as ended without having reached them: it
    would launch no second copy there, and drain the node."""
    requeued: Mapping[int, float] = field(default_factory=dict)
    """Times of the requeue requests for elements whose agents have not come yet."""
    avoid: frozenset[str] = frozenset()
    """Nodes that the job avoids."""
    refused: frozenset[str] = frozenset()
    """Nodes on which Slurm starts none of its elements."""
    why: str = ""
    reach: frozenset[str] | None = None
    """Nodes that its elements may get; None for all."""
    unit: int = 1
    """Elements in a row that hold whole replicas."""
    least: int = 1
    """Elements without which it does not train."""
    block: int = 1
    allocation: tuple[str, ...] = ()
    """The nodes of a job that is one allocation, in Slurm's order."""
    stays: frozenset[int] = frozenset()
    """Elements whose nodes are never given back."""
    empty: frozenset[int] = frozenset()
    """Elements on whose nodes nothing of the job runs any more."""

    @property
    def size(self) -> int:
        """Nodes that the plan gives it."""
        return self.desired * self.block

    def may_have(self, node: str) -> bool:
        return node not in self.avoid | self.refused and (self.reach is None or node in self.reach)

    def why_not(self, node: str) -> str:
        """Why the job may not have a node that `may_have` denies it."""
        return f"{self.job} avoids {node}" if node in self.avoid else f"{self.job} may not be given {node}"


@dataclass
class Placement:
    """The elements of each job, and the actions that bring Slurm there, in order."""

    actions: list[Action] = field(default_factory=list)
    allotted: dict[str, list[int]] = field(default_factory=dict)  # job -> elements
    leaving: dict[str, list[int]] = field(default_factory=dict)  # job -> elements
    unpinned: list[tuple[str, int]] = field(default_factory=list)  # (job, element)


def usable(
    nodes: Sequence[NodeInfo], elements: Sequence[ElementInfo], managed: Collection[str], put_aside: Collection[str]
) -> list[str]:
    """The nodes that the plan may give out: in service, and not used by unmanaged jobs. A node that such a job is
    leaving counts: it is free in a moment, and no job has to lose another in its place."""
    foreign = {name for e in elements if e.state in _STAYS and e.job not in managed for name in nodes_of(e)}
    return sorted(n.name for n in nodes if n.healthy and n.name not in put_aside and n.name not in foreign)


def whole(element: ElementInfo, nodes: Collection[str], block: int) -> bool:
    """Whether all of its nodes are there, and are among these."""
    names = nodes_of(element)
    return len(names) == block and all(name in nodes for name in names)


def held_by_others(element: ElementInfo, ours: Collection[tuple[str, int]]) -> bool:
    """Whether a user or an admin holds it, so that only they may release it. ours: this controller's holds by the
    log."""
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
        self.loose: list[tuple[str, int]] = []  # elements with outdated pins

    def choose_leavers(self, needs: Sequence[Need]) -> None:
        """Surveys the elements of each job, and chooses those that leave."""
        self.groups = {need.job: self.survey(need) for need in needs}
        self.leavers = {need.job: [] for need in needs}
        self.started = {need.job: set() for need in needs}
        self.leavers = {need.job: _leavers(self, need, needs) for need in needs}

    def survey(self, need: Need) -> dict[str, list[int]]:
        """A job's elements by what they do: working, limbo (on a node that is out of service), coming (pinned),
        waiting, barred (they cannot start for a reason of Slurm's; the `limited` among them may start at any moment).
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
        """The groups of a waiting element."""
        pin = self.pins.get((need.job, e.element))
        pinned = names_of(pin.node) if pin is not None else ()
        refused = not need.refused.isdisjoint(pinned)
        of_others = pin is not None and not pending_reasons.is_told(e, pinned)  # the reason is about earlier nodes
        bar = Bar.NOTHING if e.held or refused or of_others else pending_reasons.bar_of(e, self.now)
        if pin is not None and not refused and bar is Bar.NOTHING and self._pin_holds(e):
            return ("coming",)
        if pin is not None:
            self.loose.append((need.job, e.element))
        if bar is Bar.NOTHING:
            return ("waiting",)
        return ("barred", "limited") if bar is Bar.LIMIT else ("barred",)

    def _why_again(self, need: Need, e: ElementInfo) -> str:
        """Why the element must start again; empty if it need not."""
        if e.element in need.dead and e.state in WORKS:
            return "its agent died"
        if e.element in need.ended:
            return "it ended before its agent came"
        short = e.state == "RUNNING" and len(nodes_of(e)) < need.block
        return f"it has {len(nodes_of(e))} of its {need.block} nodes" if short else ""

    def _begins(self, need: Need, e: ElementInfo) -> bool:
        """Whether Slurm has begun it again since its agent died: a starting element is not ended once more."""
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
        """The free nodes on which the element starts, with commas; empty if they are too few. Its last ones come first,
        if all are free. Otherwise nodes of one failure domain, with the most of its last ones, and of the smallest such
        domain; among these the ones that fewest other jobs can use, which may have no choice."""
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
    """Return the actions by which every job gets its nodes. `needs` are the managed jobs; other jobs' elements only
    occupy nodes. held: this controller's holds. domains: node -> the switch or the block with which it fails."""
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
        # A leaver that still trains is allotted to no job: it leaves at an iteration boundary.
    for job, number in work.loose:
        if number not in work.started[job]:  # another pin takes the place of the first
            work.act("pin", work.by_job[job][number], "", f"it is not to wait for {pins[job, number].node} any more")
    return work.out


def _hold(work: _Place, need: Need, wanted: Collection[int]) -> None:
    """Holds waiting elements that must not start. As many as the job still lacks wait unheld, as nodes for them are on
    their way; none if the job avoids nodes: Slurm could start it there.
    """
    soon = max(0, _missing(work, need)) if not need.avoid else 0
    kept = {*wanted, *(e.element for e in _candidates(work, need, soon))}
    why = f"the plan gives {plural(need.size, 'node')} to job {need.job}, and no more"
    _hold_some(work, need, (number for number in work.groups[need.job]["waiting"] if number not in kept), why)


def _hold_limited(work: _Place, needs: Sequence[Need]) -> None:
    """Holds elements that a limit keeps from starting, of jobs that give up nodes: one would start on the first of
    these. Those of other jobs are left alone, so that the end of the limit shows."""
    for need in needs:
        if work.leavers[need.job]:
            why = f"the plan takes nodes from {need.job}, and it would start on one of them"
            _hold_some(work, need, work.groups[need.job]["limited"], why)


def _hold_some(work: _Place, need: Need, numbers: Iterable[int], why: str) -> None:
    job = work.by_job.get(need.job, {})
    for e in islice((job[number] for number in numbers if not job[number].held), MOST_HOLDS):
        work.act("hold", e, "", why, f"{HOLD_PREFIX}, the plan has no node for it")


def _leavers(work: _Place, need: Need, needs: Sequence[Need]) -> list[int]:
    """The surplus elements of a job: those chosen earlier, then those whose nodes others can use."""
    working = work.groups[need.job]["working"]
    extra = len(working) - need.desired
    if extra <= 0:
        return []
    unit = Counter(number // need.unit for number in working)
    short = [other for other in needs if other.job != need.job and _missing(work, other) > 0]

    def order(number: int) -> tuple[bool, bool, bool, bool, int]:
        names = nodes_of(work.by_job[need.job][number])
        useless = bool(short) and not any(other.may_have(name) for other in short for name in names)
        complete = unit[number // need.unit] == need.unit  # parts of replicas go first
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
    """Pending elements, no more than `most`. Those that ran before come first, and go on under their old ids; then
    those that complete a replica beside elements already there."""
    queue = work.queues.get(need.job)
    if queue is None:
        queue = work.queues[need.job] = _queue(work, need)
    started = work.started[need.job]
    return islice((e for e in queue if e.element not in started), most)


def _queue(work: _Place, need: Need) -> list[ElementInfo]:
    """The first waiting elements, as many as the job could use at all: an array may have 100,000."""
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
    """Exchanges nodes: if a job may not have a free node, another job takes that, and leaves one of its own for it. One
    of the other job's waiting elements starts there first; if none waits, one leaves first. A job at its minimum of
    elements is left alone."""
    for need in needs:
        short = min(_missing(work, need), sum(1 for _ in _candidates(work, need)))
        for node in sorted(work.good - work.taken):
            if short <= 0:
                break
            short -= _changed(work, need, node, needs)


def _changed(work: _Place, need: Need, node: str, needs: Sequence[Need]) -> bool:
    """Whether another job takes the free node, and leaves one for `need`."""
    for other in needs:
        own = _to_leave_for(work, need, other, node)
        extra = _missing(work, other)
        if own is None or extra or work.leavers[other.job]:  # it changes already, or lacks nodes itself
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
    """The element that the other job could give up to `need` for that free node, or None.

    An idle one goes first. One that trains may leave before the newcomer has joined, so the job's minimum must train
    without it.
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
    """Takes the nodes of elements that have left (or never got in), and gives them to the jobs that come first. An
    element that needs the nodes of several waits for the last of these."""
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
    """The elements that the job can give up now, grouped by the call of Slurm that takes them: from an allocation all
    leavers at once, when nothing runs on their nodes any more."""
    job, leavers = work.by_job.get(need.job, {}), work.leavers[need.job]
    if not need.allocation:
        return [[job[number]] for number in leavers if number not in need.members]
    return [[job[number] for number in leavers]] if leavers and need.empty.issuperset(leavers) else []


def _taker(
    work: _Place, other: Need, donor: Need, free: Sequence[str], needs: Sequence[Need]
) -> tuple[ElementInfo, str] | None:
    """Starts an element of the other job on free nodes, or nodes about to be free, and returns both."""
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
    """Takes the donors' nodes, and starts the takers on them."""
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
