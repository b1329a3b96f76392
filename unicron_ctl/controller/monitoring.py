"""Online statistical monitoring (method 4 of PAPER section 3): slow iterations are reported, iterations that do not end
are acted upon.

What is learned is soft state. Where a job stands is read from its ranks' statuses; time is judged by
:mod:`detector.statistics`, the culprit named by :mod:`detector.culprit`. A hang is believed only after every agent of
the job has answered a ping sent past the deadline: silence is the lease's matter, the answers say where ranks stand.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import TYPE_CHECKING

from detector.culprit import PHASES, Culprit, Progress, slowest, stuck
from detector.statistics import WARM_UP, Health, IterationMonitor, Limits
from detector.stragglers import Stragglers
from unicron_ctl.controller import collectives, failures
from unicron_ctl.controller.patience import STOPPED, Patience
from unicron_ctl.controller.soft import JobView
from unicron_ctl.controller.state import RECENT_STEPS, Identity, JobState
from unicron_ctl.protocol import wire

if TYPE_CHECKING:
    from unicron_ctl.config import ControllerConfig
    from unicron_ctl.controller.engine import Engine
    from unicron_ctl.controller.ledger import Account

ORDER = {"computing": 0, "reducing": 1, "synced": 2, "stepped": 3}
SHARED_PHASES = ("data", "forward", "backward")  # their time grows with the rank's number of micro-batches
MANY_PATIENCE = 3.0  # times the deadline, before more than half of the ranks are taken for stuck
WINDOW, NEWEST = 16, 4  # iterations
Limit = tuple[float, str]  # seconds that a rank may keep the others waiting, and what speaks against waiting longer


@dataclass(frozen=True)
class Standing:
    """Where a job stands: it has not come further while this stays the same.

    iteration: the first that not all members have finished. outside: members that have not begun it: they are in the
    script's own code.
    """

    generation: int
    iteration: int
    outside: tuple[int, ...]


@dataclass
class Suspect:
    """A rank that is to be stopped once its stacks are known."""

    slot: int
    identity: Identity
    failure: int
    action: str
    wait: float
    reason: str


@dataclass
class JobWatch:
    """One job's monitor. Times in seconds on the controller's clock."""

    monitor: IterationMonitor
    patience: Patience = field(default_factory=Patience)
    stragglers: Stragglers = field(default_factory=Stragglers)
    generation: int = -1
    nodes: int = 0
    memory: float = 0.0  # the usual iteration time before the size changed, scaled to the new size
    phases: dict[int, deque[dict[str, float]]] = field(default_factory=dict)
    shares: dict[int, int] = field(default_factory=dict)
    usual: dict[int, dict[str, float]] = field(default_factory=dict)
    healthy: int = 0
    degraded: dict | None = None
    straggler: dict | None = None  # a rank that is always slower than its peers, however fast the job is
    standing: Standing | None = None
    since: float = 0.0
    overdue: float | None = None  # when the deadline was found to be over
    said: bool = False  # that this iteration takes long, without anything to be done about it
    suspects: list[Suspect] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)  # slots whose stacks are awaited
    act_at: float = 0.0

    @classmethod
    def fresh(cls, config: ControllerConfig) -> JobWatch:
        return cls(IterationMonitor(Limits(floor=config.hang_floor_seconds)))

    def shift(self, seconds: float) -> None:
        """This process stood still: nobody else was late."""
        self.since += seconds
        self.act_at += seconds
        self.overdue = None

    # ------------------------------------------------------------ learning
    def adapt(self, job: JobState) -> None:
        """A new generation is warm-up, another number of nodes another job."""
        generation, nodes = job.plan.generation if job.plan else 0, len(job.elements(job.members))
        if generation == self.generation:
            return
        if self.nodes and nodes and nodes != self.nodes:
            if self.monitor.learned:
                self.memory = self.monitor.average * max(1.0, self.nodes / nodes)
            self.monitor.resized()
            self.usual, self.degraded = {}, None
        else:
            self.monitor.restarted()
        self.generation, self.nodes = generation, nodes or self.nodes
        self.phases, self.shares, self.healthy = {}, {}, 0
        self.stragglers.clear()

    def take(self, step: wire.Step) -> None:
        """A rank's phase times; nonsense is left out."""
        times = {name: seconds for name in PHASES if 0.0 <= (seconds := step.phases.get(name, -1.0)) < math.inf}
        if len(times) == len(PHASES):
            outside = step.phases.get("outside", 0.0)
            self.patience.was_outside(step.slot, outside)
            times["outside"] = outside if 0.0 <= outside < math.inf else 0.0
            self.phases.setdefault(step.slot, deque(maxlen=WINDOW)).append(times)
            self.shares[step.slot] = len(step.computed)

    def comparable(self, last: int = WINDOW) -> dict[int, dict[str, float]]:
        """slot -> phase -> mean seconds of the `last` iterations, as if all ranks had equally many micro-batches.

        Eight micro-batches on three ranks are 3, 3 and 2: the third computes less and waits longer, which is no fault
        of anybody.
        """
        means = {
            slot: {name: fmean(row[name] for row in [*rows][-last:]) for name in (*PHASES, "outside")}
            for slot, rows in self.phases.items()
        }
        shares = {slot: self.shares[slot] for slot in means if self.shares[slot] > 0}
        if not shares:
            return {}
        mean, most = fmean(shares.values()), max(shares.values())
        each = median(sum(means[slot][name] for name in SHARED_PHASES) / count for slot, count in shares.items())
        for slot, count in shares.items():
            for name in SHARED_PHASES:
                means[slot][name] *= mean / count
            means[slot]["reduce"] = max(0.0, means[slot]["reduce"] - (most - count) * each)
        return {slot: means[slot] for slot in shares}

    # ------------------------------------------------------------ the iteration in progress
    def limit(self, job: JobState, config: ControllerConfig) -> float:
        """Seconds that the present iteration may take."""
        usual = self.monitor.average if self.monitor.learned else self.memory
        if not usual and len(job.recent) >= RECENT_STEPS:  # a restarted controller knows this much
            usual = job.seconds or 0.0
        self.monitor.begin(0.0)
        deadline = self.monitor.deadline(0.0)
        return self.patience.warm_up(usual, config) if deadline is None else deadline

    def limits(self, view: JobView, now: Standing, waited: float, config: ControllerConfig) -> dict[int, Limit]:
        """The same for each rank: one that is outside the iteration may be saving something."""
        inside = self.limit(view.state, config)
        return {
            slot: self.patience.between(slot, view.status(slot), waited, inside, config)
            if slot in now.outside
            else (inside, _stopped(view, slot))
            for slot in view.state.members
        }


def standing(job: JobView) -> Standing | None:
    """Where the job stands; None when its iteration is not to be judged: it forms, recovers, ends, or members enter
    another generation."""
    state = job.state
    if state.phase not in ("running", "offering") or state.plan is None or not state.members:
        return None
    statuses = {slot: job.status(slot) for slot in state.members}
    for slot, status in statuses.items():
        view = job.agents.get(state.element(slot))
        if (
            status is None
            or view is None
            or not view.alive
            or job.finished(slot)
            or job.identity(slot) != state.members[slot]
        ):
            return None
        if not status.micro_batches:
            return None  # a program that knows no iterations
        if status.state != "running" or status.generation != state.plan.generation or status.phase not in ORDER:
            return None
    done = {slot: status.iteration + (status.phase == "stepped") for slot, status in statuses.items()}
    iteration = max(min(done.values()), state.iteration + 1)
    outside = tuple(
        sorted(slot for slot, status in statuses.items() if status.phase == "stepped" and done[slot] <= iteration)
    )
    return Standing(state.plan.generation, iteration, outside)


def behind(job: JobView) -> list[Culprit]:
    """The members that have come least far, if others wait for them; empty when all are at the same point."""
    progress = {}
    for slot in job.state.members:
        status = job.status(slot)
        progress[slot] = Progress(len(ORDER) * status.iteration + ORDER[status.phase], None, status.phase)
    found = stuck(progress)
    if not found:
        return []
    least, most = (pick(item.collectives for item in progress.values()) for pick in (min, max))
    ahead = [slot for slot, item in progress.items() if item.collectives == most]
    where = f"{len(ahead)} other{'s wait' if len(ahead) > 1 else ' waits'} in {_place(job, ahead[0])}"
    return [
        Culprit(
            culprit.slot,
            culprit.phase,
            culprit.slowdown,
            f"slot {culprit.slot} is in {_place(job, culprit.slot)}, {where}",
        )
        for culprit in found
        if culprit.slot is not None and progress[culprit.slot].collectives == least
    ]


def frozen(job: JobView) -> list[Culprit]:
    """Where nobody is behind: the members whose processes are stopped by a signal, unless all are."""
    stopped = [slot for slot in job.state.members if _stopped(job, slot)]
    if len(stopped) == len(job.state.members):
        return []
    return [
        Culprit(slot, job.status(slot).phase, math.inf, f"slot {slot} is in {_place(job, slot)} like the others")
        for slot in sorted(stopped)
    ]


def _stopped(job: JobView, slot: int) -> str:
    return "its process is stopped by a signal" if job.status(slot).process == STOPPED else ""


def _place(job: JobView, slot: int) -> str:
    status = job.status(slot)
    if status.phase == "stepped":
        return f"the script's own code after iteration {status.iteration}"
    words = {"computing": f"micro-batch {len(status.done) + 1}", "reducing": "the reduce", "synced": "the commit"}
    return f"{words[status.phase]} of iteration {status.iteration}"


# ---------------------------------------------------------------- finished iterations
def stepped(engine: Engine, job: JobState, account: Account) -> None:
    """Takes an iteration's time in; reports a job that has become slow, and who makes it so."""
    watch = engine.watch(job)
    watch.adapt(job)
    if account.generation != watch.generation:
        return
    recovery = account.iteration <= engine.disturbed_until.get(job.job, -1) or bool(account.unreported)
    learned = watch.monitor.learned
    observation = watch.monitor.observe(account.seconds, "recovery" if recovery else "training")
    if not recovery:
        watch.patience.stepped(account.seconds, learned, observation.reason == WARM_UP)
    if observation.health is Health.HEALTHY:
        watch.healthy += 1
        if watch.healthy % WINDOW == 0:
            watch.usual = watch.comparable()
    if observation.health is Health.DEGRADED and watch.degraded is None:
        # The newest iterations are slow in full, but few; in noisy jobs only the longer window shows who it is.
        looks = (slowest(watch.comparable(last), watch.usual or None) for last in (NEWEST, WINDOW))
        culprit = next((found for found in looks if found), None)
        _degraded(engine, job, watch, account, observation.reason, culprit)
    elif observation.health is Health.HEALTHY and watch.degraded is not None:
        watch.degraded, watch.healthy = None, 0
        reason = f"iterations take {observation.average:.3f} s again"
        engine.emit("degraded_over", job.job, account.generation, iteration=account.iteration, reason=reason)
    if not recovery:
        _compare(engine, job, watch, account)


def _compare(engine: Engine, job: JobState, watch: JobWatch, account: Account) -> None:
    """Reports a rank that is always slower than its peers: the job's own baseline may have been learned with it."""
    before = watch.straggler
    found = watch.stragglers.observe(watch.comparable(1))
    if found is None:
        watch.straggler = None
        if before is not None and before["reported"]:
            reason = f"slot {before['slot']} is no slower than its peers any more"
            engine.emit("degraded_over", job.job, account.generation, iteration=account.iteration, reason=reason)
        return
    if before is not None and before["slot"] == found.slot:
        return
    reported = watch.degraded is None or watch.degraded["slot"] != found.slot
    named = _named(job, found)
    watch.straggler = {
        "since": engine.now,
        "iteration": account.iteration,
        **named,
        "reason": found.reason,
        "reported": reported,
    }
    if reported:
        engine.emit("degraded", job.job, account.generation, iteration=account.iteration, **named, reason=found.reason)


def slow(engine: Engine, job: JobState) -> dict | None:
    """What makes the job slow at present, for `unicronctl status`."""
    watch = engine.watches.get(job.job)
    return (watch.degraded or watch.straggler) if watch else None


def _named(job: JobState, culprit: Culprit | None) -> dict:
    """Who is slow, for an event."""
    if culprit is None:
        return {"slot": None, "node": "", "phase": "", "slowdown": None}
    return {
        "slot": culprit.slot,
        "node": job.node(culprit.slot) if culprit.slot is not None else "",
        "phase": culprit.phase,
        "slowdown": round(culprit.slowdown, 2) if math.isfinite(culprit.slowdown) else None,
    }


def _degraded(
    engine: Engine, job: JobState, watch: JobWatch, account: Account, reason: str, culprit: Culprit | None
) -> None:
    named = _named(job, culprit)
    reason = f"{reason}; {culprit.reason if culprit else 'no rank differs from the others'}"
    watch.degraded = {"since": engine.now, "iteration": account.iteration, **named, "reason": reason}
    engine.emit("degraded", job.job, account.generation, iteration=account.iteration, **named, reason=reason)


# ---------------------------------------------------------------- the iteration in progress
def look(engine: Engine, job: JobState) -> None:
    """Acts upon an iteration that does not end. Called at every tick."""
    config, watch, view = engine.config, engine.watch(job), engine.view(job)
    if not config.monitor_iterations:
        return
    now = standing(view)
    if now is not None:
        watch.adapt(job)
    if now is None or now != watch.standing:
        _moved(engine, job, watch)
        watch.standing, watch.since, watch.overdue, watch.said = now, engine.now, None, False
        return
    if watch.suspects:
        if not watch.asked or engine.now >= watch.act_at:
            _stop(engine, job, watch)
        return
    waited = engine.now - watch.since
    limits = watch.limits(view, now, waited, config)
    if waited < min(limit for limit, _ in limits.values()):
        return
    if watch.overdue is None:
        watch.overdue = engine.now
    if _all_answered(engine, view, watch.overdue):
        _hung(engine, job, watch, limits)


def _all_answered(engine: Engine, view: JobView, since: float) -> bool:
    silent = [view.agents[e] for e in view.state.elements(view.state.members) if view.agents[e].last_heard <= since]
    for agent in silent:
        key = f"ping overdue {since}"
        if engine.now - agent.repeated.get(key, -math.inf) >= engine.config.repeat_seconds:
            agent.repeated[key] = engine.now
            engine.send(agent.route, wire.Ping())
    return not silent


def _hung(engine: Engine, job: JobState, watch: JobWatch, limits: dict[int, Limit]) -> None:
    view, took = engine.view(job), engine.now - watch.since
    least = behind(view) or frozen(view)
    culprits = [
        replace(culprit, reason=", ".join(filter(None, (culprit.reason, limits[culprit.slot][1]))))
        for culprit in least
        if took >= limits[culprit.slot][0]
    ]
    if least and not culprits:
        return  # whoever is behind may take longer than the others
    limit = watch.limit(job, engine.config)
    usual = f", the usual is {watch.monitor.average:.3f} s" if watch.monitor.average else ""
    long = f"iteration {watch.standing.iteration} runs for {took:.2f} s{usual}"
    phases = {view.status(slot).phase for slot in job.members}
    many = 2 * len(culprits) > len(job.members) and took < MANY_PATIENCE * limit
    suspended = all(_stopped(view, slot) for slot in job.members)  # somebody stopped the whole job on purpose
    if engine.config.observe or many or suspended or (not culprits and phases & {"computing", "stepped"}):
        if not watch.said:
            watch.said = True
            who = "; ".join(culprit.reason for culprit in culprits[:8]) or "no rank waits for another"
            engine.emit(
                "overdue",
                job.job,
                watch.generation,
                iteration=watch.standing.iteration,
                reason=f"{long}; {who}; nothing is done yet",
            )
            _ask_stacks(engine, job, watch, [culprit.slot for culprit in culprits])
            watch.asked.clear()
        return
    engine.emit(
        "hang",
        job.job,
        watch.generation,
        iteration=watch.standing.iteration,
        seconds=took,
        culprits=[
            {"slot": culprit.slot, "node": job.node(culprit.slot), "phase": culprit.phase} for culprit in culprits
        ],
        reason=f"{long}; {'; '.join(culprit.reason for culprit in culprits[:8]) or 'all wait in the same collective'}",
    )
    if culprits:
        if any(culprit.slot in watch.standing.outside and not _stopped(view, culprit.slot) for culprit in culprits):
            # Were it a long checkpoint, then the next one is not to end the same way.
            watch.patience.longest_outside = max(watch.patience.longest_outside, took)
        _suspect(engine, job, watch, culprits, long)
    else:
        collectives.timeout(engine, job, f"{long}; all ranks wait in the same collective")
    watch.since, watch.overdue = engine.now, None


def _suspect(engine: Engine, job: JobState, watch: JobWatch, culprits: list[Culprit], long: str) -> None:
    """Records the failures and asks for stacks; what is done follows when they are there."""
    view = engine.view(job)
    for culprit in culprits:
        slot, reason = culprit.slot, f"{long}; {culprit.reason}"
        failure, decision = failures.hang(engine, job, slot, reason)
        watch.suspects.append(
            Suspect(slot, view.identity(slot), failure, decision.action, decision.wait_seconds, reason)
        )
    waiting = [slot for slot in job.members if slot not in {culprit.slot for culprit in culprits}]
    _ask_stacks(engine, job, watch, [culprit.slot for culprit in culprits], waiting[:1])
    watch.act_at = engine.now + engine.config.stacks_seconds


def _ask_stacks(engine: Engine, job: JobState, watch: JobWatch, slots: list[int], more: Sequence[int] = ()) -> None:
    """Of up to eight culprits, whose answers are awaited, and of one that waits for them."""
    view = engine.view(job)
    watch.asked = set(slots[:8])
    for slot in [*slots[:8], *more]:
        agent = view.agents[job.element(slot)]
        engine.send(agent.route, wire.Stacks(slot=slot, incarnation=view.status(slot).incarnation))


def on_stacks(engine: Engine, job: JobState, message: wire.StackTrace) -> None:
    """A trace has come: into the log."""
    said = (
        f"{message.how}, state {message.state}"
        if message.text
        else f"no stack trace; process state {message.state or 'unknown'}"
    )
    engine.emit(
        "stacks",
        job.job,
        job.generation,
        slot=message.slot,
        incarnation=message.incarnation,
        node=job.node(message.slot),
        how=message.how,
        state=message.state[:200],
        text=message.text[:16000],
        reason=f"slot {message.slot}: {said[:300]}",
    )
    engine.watch(job).asked.discard(message.slot)


def _moved(engine: Engine, job: JobState, watch: JobWatch) -> None:
    """The job went on, or is being healed already, before anybody was stopped."""
    for suspect in watch.suspects:
        engine.emit(
            "failure_action",
            job.job,
            failure=suspect.failure,
            text=f"slot {suspect.slot} is not stopped: the job went on",
        )
    watch.suspects, watch.asked = [], set()


def _stop(engine: Engine, job: JobState, watch: JobWatch) -> None:
    suspects, watch.suspects, watch.asked = watch.suspects, [], set()
    watch.standing = None
    failures.stop_hanging(engine, job, suspects)
