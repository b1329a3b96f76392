"""Times of iterations: the job's usual ones, and the rank that is slower than the others.

Phase times lie in one array per job, [rank, iteration modulo the window, phase], so that a step of thousands of ranks
needs no loop over them. :mod:`iterations.culprit` compares ranks pairwise; of more than :data:`MOST_COMPARED` ranks
only the slowest of each phase and an even sample of their peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from unicron_ctl.controller.model.job_ledger import Account
from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.controller.sense.patience import AGAIN, Patience
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.thinning import RECENT_STEPS
from unicron_ctl.shared.protocol import structs
from unicron_ctl.shared.settings.config import ControllerConfig
from unicron_detector.iterations.culprit import PHASES, Culprit, slowest
from unicron_detector.iterations.iteration_monitor import WARM_UP, Health, IterationMonitor, Limits
from unicron_detector.iterations.stragglers import THRESHOLD, Stragglers

WINDOW, NEWEST = 16, 4  # iterations
MOST_COMPARED = 64  # ranks that are compared with each other one by one
AT_ONCE = 1024  # ranks whose means are taken at once: those of 16,384 took 15 MiB for a moment, which stayed the peak
MOST_NOTED = 1 << 12  # ranks' steps that wait to be taken in; eight times as many held an answer up for 27 ms
CHOOSE_EVERY = 64  # iterations between two choices of the ranks to compare
COLUMNS = (*PHASES, "outside")  # of the array: the order of `structs.PHASES`
SHARED_PHASES = [COLUMNS.index(name) for name in ("data", "forward", "backward")]  # their time grows with the share
REDUCE = COLUMNS.index("reduce")
Row = dict[int, dict[str, float]]


@dataclass(frozen=True)
class Slow:
    """The reason why a job is slow at present."""

    since: float
    iteration: int
    slot: int | None  # None if no rank differs from the others
    node: str
    phase: str
    slowdown: float | None
    reason: str
    reported: bool = True


class Times(NamedTuple):
    """The phase times of one report. The rest of its message is not kept: it may be large."""

    iteration: int
    slots: list[int]
    phases: bytes
    shares: list[int]
    """Rounds that each rank computed, of a micro-batch in each lane of its replica."""
    habits: bool
    reports: bool
    """The ranks report what they do."""


@dataclass
class PhaseTimes:
    """The last phase times of a job's ranks, in seconds."""

    rows: dict[int, int] = field(default_factory=dict)
    seconds: npt.NDArray[np.float32] = field(  # half of the memory, which a large job needs most for this
        default_factory=lambda: np.zeros((0, WINDOW, len(COLUMNS)), dtype=np.float32)
    )
    stamps: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, WINDOW), dtype=np.int64))
    shares: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    newest: int = -1
    chosen_at: int = -1
    chosen: list[int] = field(default_factory=list)

    def clear(self) -> None:
        """Forget what was measured, because of other ranks or other work."""
        self.rows.clear()
        self.newest, self.chosen_at, self.chosen = -1, -1, []

    def take_in(self, steps: Sequence[Times]) -> tuple[list[int], npt.NDArray[np.float64]]:
        """Take in phases of agents' ranks. Returns the ranks' slots and phases, without those that make no sense."""
        slots = [slot for step in steps for slot in step.slots]
        values = np.frombuffer(b"".join([step.phases for step in steps]), dtype="<f8").reshape(-1, len(COLUMNS))
        shares = [share for step in steps for share in step.shares]
        iterations = np.repeat([step.iteration for step in steps], [len(step.slots) for step in steps])
        with np.errstate(over="ignore", invalid="ignore"):  # any bytes may have come
            good = (values >= 0.0).all(axis=1) & (values.sum(axis=1) < 1e9)
        if not good.all():
            slots, shares = (
                [each for each, sound in zip(column, good, strict=True) if sound] for column in (slots, shares)
            )
            values, iterations = values[good], iterations[good]
        if slots:
            if not self.rows.keys() >= set(slots):
                self._add([slot for slot in dict.fromkeys(slots) if slot not in self.rows])
            rows = [self.rows[slot] for slot in slots]
            moved = self.shares[rows] != shares
            if moved.any():  # earlier times are of another share
                self.stamps[np.array(rows)[moved]] = -1
            self.seconds[rows, iterations % WINDOW] = values
            self.stamps[rows, iterations % WINDOW] = iterations
            self.shares[rows] = shares
            self.newest = max(self.newest, int(iterations.max()))
        return slots, values

    def _add(self, slots: Sequence[int]) -> None:
        first = len(self.rows)
        count = first + len(slots)
        self.rows.update(zip(slots, range(first, count), strict=True))
        if count > len(self.shares):
            size = max(16, 2 * count)
            for name, shape in (("seconds", (size, WINDOW, len(COLUMNS))), ("stamps", (size, WINDOW))):
                old = getattr(self, name)
                new = np.zeros(shape, dtype=old.dtype)
                new[: len(old)] = old
                setattr(self, name, new)
            self.shares = np.concatenate([self.shares, np.zeros(size - len(self.shares))])
        self.stamps[first:count] = -1

    def comparable(self, last: int = WINDOW) -> Row:
        """Return slot -> phase -> mean seconds of the `last` iterations, as if all had equally many rounds.
        Of many ranks, only those that are worth comparing count.

        Eight micro-batches on three ranks are 3, 3 and 2: the third computes less and waits longer, without a fault.
        """
        slots = self._choose_slots()
        rows = np.array([self.rows[slot] for slot in slots], dtype=np.int64)
        means, seen = self._means(rows, last)
        shares = self.shares[rows] if len(rows) else np.zeros(0)
        valid = seen & (shares > 0)
        if not valid.any():
            return {}
        means, shares = means[valid], shares[valid]
        kept = [slot for slot, good in zip(slots, valid, strict=True) if good]
        each = float(np.median(means[:, SHARED_PHASES].sum(axis=1) / shares))
        means[:, SHARED_PHASES] *= (shares.mean() / shares)[:, None]
        means[:, REDUCE] = np.maximum(0.0, means[:, REDUCE] - (shares.max() - shares) * each)
        return {slot: dict(zip(COLUMNS, row, strict=True)) for slot, row in zip(kept, means.tolist(), strict=True)}

    def waste_of(self, slow: int) -> float:
        """Return by how many seconds the newest iteration would have been shorter if this rank were as fast as the
        others, and all had equally much to do."""
        slots = [slot for slot in self._choose_slots() if slot in self.rows]
        rows = np.array([self.rows[slot] for slot in slots], dtype=np.int64)
        means, seen = self._means(rows, 1)
        shares = self.shares[rows]
        others = seen & (shares > 0) & (np.array(slots) != slow)
        if not others.any() or slow not in slots:
            return 0.0
        shared, step = means[:, SHARED_PHASES].sum(axis=1), means[:, COLUMNS.index("step")]
        everybody = others | (np.array(slots) == slow)
        each, rest = np.median(shared[others] / shares[others]), np.median(step[others])
        fair = shares[everybody].mean() * each + rest
        return max(0.0, float((shared + step)[everybody].max() - fair))

    def own_work(self, slots: Sequence[int], last: int = NEWEST) -> dict[int, float]:
        """Return slot -> mean seconds in which the rank worked by itself in its last iterations."""
        known = [slot for slot in slots if slot in self.rows]
        means, seen = self._means(np.array([self.rows[slot] for slot in known], dtype=np.int64), last)
        own = means.sum(axis=1) - means[:, REDUCE]
        return {slot: float(time) for slot, time, good in zip(known, own, seen, strict=True) if good}

    def _means(self, rows: npt.NDArray[np.int64], last: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """Return (rank x phase means, whether the rank was seen) of the iterations that each rank reported last."""
        parts = [self._means_of(rows[at : at + AT_ONCE], last) for at in range(0, max(1, len(rows)), AT_ONCE)]
        return np.concatenate([means for means, _ in parts]), np.concatenate([seen for _, seen in parts])

    def _means_of(
        self, rows: npt.NDArray[np.int64], last: int
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        stamps, seconds = self.stamps[rows], self.seconds[rows]
        newest = stamps.max(axis=1, initial=-1)
        mask = (stamps >= 0) & (stamps > (newest - last)[:, None])
        count = mask.sum(axis=1)
        sums = (seconds * mask[:, :, None]).sum(axis=1)
        return sums / np.maximum(count, 1)[:, None], count > 0

    def _choose_slots(self) -> list[int]:
        """Return all ranks; of many, the slowest of each phase and an even sample, chosen anew from time to time."""
        if len(self.rows) <= MOST_COMPARED:
            return sorted(self.rows)
        if self.chosen and self.newest - self.chosen_at < CHOOSE_EVERY:
            return self.chosen
        slots = sorted(self.rows)
        rows = np.array([self.rows[slot] for slot in slots], dtype=np.int64)
        means, _ = self._means(rows, WINDOW)
        worst: set[int] = set(range(0, len(slots), max(1, len(slots) // (MOST_COMPARED // 2))))
        each = max(1, MOST_COMPARED // (2 * len(COLUMNS)))
        for column in range(len(COLUMNS)):
            worst.update(np.argsort(means[:, column])[-each:].tolist())
        worst.update(np.argsort(means[:, REDUCE])[:each].tolist())  # the slowest rank waits least
        self.chosen, self.chosen_at = sorted(slots[place] for place in worst), self.newest
        return self.chosen


def _micro_batches(step: structs.StepTable) -> Sequence[list[int]]:
    """Return the micro-batches that each rank computed."""
    if not step.computed:
        return step.micro_batches
    return [step.computed.get(slot, own) for slot, own in zip(step.slots, step.micro_batches, strict=True)]


@dataclass
class JobTimes:
    """The speed of one job, as its iterations have shown it."""

    monitor: IterationMonitor
    _patience: Patience = field(default_factory=Patience)
    stragglers: Stragglers = field(default_factory=Stragglers)
    _phases: PhaseTimes = field(default_factory=PhaseTimes)
    _noted: list[Times] = field(default_factory=list)
    """Not taken in yet."""
    _ranks_noted: int = 0
    generation: int = -1
    nodes: int = 0
    memory: float = 0.0
    """The usual iteration time before the size changed, scaled to the new size; seconds."""
    newcomers: set[int] = field(default_factory=set)
    """Slots whose process had not trained before the present generation."""
    usual: Row = field(default_factory=dict)
    healthy: int = 0
    degraded: Slow | None = None
    straggler: Slow | None = None
    """A rank that is always slower than its peers, however fast the job is."""
    straggler_cost: float = 0.0
    """Seconds that it has cost the job since it was named."""
    named: int | None = None
    """The slot that was compared: the first of its replica."""
    unclear: str = ""
    """Why nothing tells which node is slow."""

    @classmethod
    def fresh(cls, config: ControllerConfig) -> JobTimes:
        return cls(IterationMonitor(Limits(floor=config.hang_floor_seconds)))

    @property
    def slow(self) -> Slow | None:
        return self.degraded or self.straggler

    def adapt(self, job: JobState) -> None:
        """Begin a warm-up with a new generation, and learn anew with another number of nodes."""
        generation = job.plan.generation if job.plan else 0
        if generation == self.generation:
            return
        nodes = len(job.inside)
        more = nodes > self.nodes
        if self.nodes and nodes and nodes != self.nodes:
            if self.monitor.learned:
                self.memory = self.monitor.average * max(1.0, self.nodes / nodes)
                self._patience.early.clear()  # of another size
            self.monitor.learn_anew()
            self.usual, self.degraded = {}, None
        else:
            self.monitor.begin_again()
        self.generation, self.nodes, self.healthy = generation, nodes or self.nodes, 0
        old = job.worked if job.mode.keeps_state else {}  # else all processes are new
        self.newcomers = {slot for slot, process in job.members.items() if old.get(slot) != process}
        self.phases.clear()
        # A newcomer's compiler takes time from the ranks beside it, and more nodes leave each rank less to average.
        busy = {job.node(slot) for slot in self.newcomers}
        survivors = [slot for slot in job.members if slot not in self.newcomers and job.node(slot) not in busy]
        self.stragglers.clear(() if more else survivors)

    def on_step(self, step: structs.StepTable, reports: bool = True, lanes: int = 1) -> None:
        """Note the phase times of one agent's ranks. reports: they report what they do; for others, all but waiting is
        their script's own code. lanes: micro-batches that a replica computes at the same time."""
        shares = [-(-len(batches) // lanes) for batches in _micro_batches(step)]
        habits = reports or not self.monitor.warming  # its start is none of its habits
        self._noted.append(Times(step.iteration, step.slots, step.phases, shares, habits, reports))
        self._ranks_noted += len(shares)
        if self._ranks_noted >= MOST_NOTED:
            self._take_in()

    @property
    def phases(self) -> PhaseTimes:
        """The last phase times of its ranks."""
        self._take_in()
        return self._phases

    @property
    def patience(self) -> Patience:
        """Its habits. Those in iteration times, which are asked at every tick, need no phases to be taken in."""
        self._take_in()
        return self._patience

    def _take_in(self) -> None:
        """Take in what was noted: for thousands of agents at once that costs a tenth."""
        noted, self._noted, self._ranks_noted = self._noted, [], 0
        for habits, reports in {(each.habits, each.reports) for each in noted}:
            alike = [each for each in noted if (each.habits, each.reports) == (habits, reports)]
            slots, phases = self._phases.take_in(alike)
            if not slots or not habits:
                continue
            if not reports:
                self._patience.longest_idle = max(self._patience.longest_idle, float(phases[:, 0].max()))
            outside = phases[:, -1] if reports else phases.sum(axis=1) - phases[:, REDUCE]
            self._patience.on_outside(slots, float(outside.max()))

    def limit(self, job: JobState, config: ControllerConfig) -> float:
        """Return the seconds that the present iteration may take."""
        limit = self.monitor.limit()
        if limit is not None and not self.monitor.warming:
            return limit
        usual = self.monitor.average if self.monitor.learned else self.memory
        if not usual and len(job.recent) >= RECENT_STEPS:  # known to a restarted controller
            usual = job.seconds or 0.0
        seen = AGAIN * max(self._patience.early, default=0.0) if usual and limit is None else 0.0
        return max(limit or 0.0, seen, self._patience.warm_up(usual, config))

    def within(self, slot: int, inside: float, config: ControllerConfig) -> float:
        """Return the seconds that a rank may take for the present iteration. inside: the others' limit."""
        starts = slot in self.newcomers and self.monitor.warming
        return self._patience.newcomer(inside, config) if starts else inside

    # ------------------------------------------------------------ finished iterations
    def on_iteration(self, job: JobState, account: Account, recovery: bool, now: float) -> list[records.Record]:
        """Take in an iteration's time; report when the job becomes slow, and which rank makes it so."""
        self.adapt(job)
        if account.generation != self.generation:
            return []
        found: list[records.Record] = []
        learned = self.monitor.learned
        seen = self.monitor.observe(account.seconds, recovery)
        if not recovery:
            warm_up = seen.reason == WARM_UP
            known = learned or (warm_up and bool(self.memory))  # newcomers' first ones do not show the new size's time
            self._patience.on_iteration(account.seconds, known, warm_up, bool(self.newcomers))
        if seen.health is Health.HEALTHY:
            self.healthy += 1
            if self.healthy % WINDOW == 0:
                self.usual = self.phases.comparable()
        if seen.health is Health.DEGRADED and self.degraded is None:
            found.append(self._became_slow(job, account, seen.reason, now))
        elif seen.health is Health.HEALTHY and self.degraded is not None:
            self.degraded, self.healthy = None, 0
            over = f"iterations take {seen.average:.3f} s again"
            found.append(records.JobDegradedOver(iteration=account.iteration, reason=over))
        return found if recovery else found + self._compare(job, account, now)

    def _became_slow(self, job: JobState, account: Account, reason: str, now: float) -> records.JobDegraded:
        # The newest iterations are all slow, but few; in noisy jobs only the longer window shows the culprit.
        looks = (slowest(self.phases.comparable(last), self.usual or None) for last in (NEWEST, WINDOW))
        culprit = next((found for found in looks if found), None)
        reason = f"{reason}; {culprit.reason if culprit else 'no rank differs from the others'}"
        self.degraded = _slow(job, culprit, account.iteration, reason, now)
        return _record(self.degraded)

    def _compare(self, job: JobState, account: Account, now: float) -> list[records.Record]:
        """Find a rank that is slower than its peers: the job's own baseline may have been learned with it. Of a replica
        its first rank reports the shares, and all of them work at the pace of the slowest stage."""
        before = self.straggler
        row = self.phases.comparable(1)
        culprit = self.stragglers.observe(row) if row else None
        if culprit is None:
            self.straggler, self.named, self.straggler_cost = None, None, 0.0
            if before is None or not before.reported:
                return []
            over = f"slot {before.slot} is no slower than its peers any more"
            return [records.JobDegradedOver(iteration=account.iteration, reason=over)]
        assert culprit.slot is not None
        if before is not None and self.named == culprit.slot:
            self.straggler_cost += self.phases.waste_of(culprit.slot)
            return []
        self.named, self.straggler_cost = culprit.slot, 0.0
        culprit, self.unclear = self._within_replica(job, culprit, culprit.slot)
        reported = self.degraded is None or self.degraded.slot != culprit.slot
        self.straggler = _slow(job, culprit, account.iteration, culprit.reason, now, reported)
        return [_record(self.straggler)] if reported else []

    def _within_replica(self, job: JobState, culprit: Culprit, head: int) -> tuple[Culprit, str]:
        """Return the culprit with the rank of its replica that is slow; or why nothing tells which node it is on."""
        replica = next((group for group in job.groups() if head in group), [head])
        if job.replica == 1 or len(replica) != job.replica or len({job.node(slot) for slot in replica}) == 1:
            return culprit, ""
        own, apart = self.phases.own_work(job.order), list[tuple[float, int]]()
        for slot in replica:
            peers = [own[other] for other in own if other % job.replica == slot % job.replica and other != slot]
            if slot in own and peers:
                apart.append((own[slot] / max(1e-9, float(np.median(peers))), slot))
        apart.sort(reverse=True)
        if len(apart) > 1 and apart[0][0] > (1.0 + THRESHOLD) * apart[1][0]:
            ratio, slot = apart[0]
            reason = f"{culprit.reason}; of its replica slot {slot} is the slowest, at {ratio:.2f}x its peers"
            return replace(culprit, slot=slot, reason=reason), ""
        nodes = sorted({job.node(slot) for slot in replica})
        return culprit, f"its replica is on {', '.join(nodes[:8])}, and nothing tells which of them is slow"


def _slow(
    job: JobState, culprit: Culprit | None, iteration: int, reason: str, now: float, reported: bool = True
) -> Slow:
    if culprit is None:
        return Slow(now, iteration, None, "", "", None, reason, reported)
    node = job.node(culprit.slot) if culprit.slot is not None else ""
    slowdown = round(culprit.slowdown, 2) if culprit.slowdown < float("inf") else None
    return Slow(now, iteration, culprit.slot, node, culprit.phase, slowdown, reason, reported)


def _record(slow: Slow) -> records.JobDegraded:
    return msgspec.convert(slow, records.JobDegraded, from_attributes=True)
