"""Iterations that do not end (method 4; docs/design/paper.md, section 3), and the ranks that keep the others waiting.

Each status of a rank updates the progress of its job (:class:`Standing`). A hang is declared only after every agent of
the job has answered a ping that was sent after the deadline: a silent agent is left to its lease, and the answers bring
the ranks' latest progress. The culprit's stacks are requested before any action.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from unicron_ctl.controller.model.finding import Finding, Source, What
from unicron_ctl.controller.model.job_state import Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.live import look_again
from unicron_ctl.controller.model.view import Order, Outcome, View
from unicron_ctl.controller.sense.findings import slot_finding
from unicron_ctl.controller.sense.patience import STOPPED_BY_SIGNAL, Limit
from unicron_ctl.controller.sense.timing import JobTimes
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.protocol.structs import RankStatus
from unicron_ctl.shared.settings.config import ControllerConfig
from unicron_detector.iterations.culprit import Groups, all_wait, lagging
from unicron_detector.words import number_spans
from unicron_transition.generations.layout import heads_of

ORDER = {"computing": 0, "reducing": 1, "synced": 2, "stepped": 3}
MANY_PATIENCE = 3.0  # times the deadline, before more than half of the ranks may count as stuck
MOST_STACKS = 8  # of one hang
RECORDER_SECONDS = 1.5  # within which a rank that stands still says how far its collectives are


@dataclass
class Standing:
    """Progress of the job's members. The job is in the iteration of the slowest one."""

    done: dict[int, int] = field(default_factory=dict)
    """Slot -> the number of iterations that the member has finished."""
    count: dict[int, int] = field(default_factory=dict)
    """Number of iterations -> how many members have finished exactly that many."""
    outside: dict[int, set[int]] = field(default_factory=dict)
    """done -> members in the script's own code: they have not begun the next iteration."""
    unjudged: set[int] = field(default_factory=set)
    """Members that report no iterations at present."""
    upto: int = -1
    """The iteration that the job was in at the last check."""
    moves: int = 0
    """Counts entries into `outside` and exits from it, up to that iteration."""
    moved: dict[int, int] = field(default_factory=dict)
    """Slot -> the progress of its collective, as last reported."""
    pulses: int = 0
    """Counts reports of further progress of a collective."""

    def clear(self) -> None:
        self.done.clear()
        self.count.clear()
        self.outside.clear()
        self.unjudged.clear()
        self.moved.clear()

    def update_running(self, members: Iterable[tuple[int, RankStatus]]) -> None:
        """Update the progress of members that run in the job's generation. It is one loop, because it runs for every
        rank in every iteration."""
        came, count, outside = self.done, self.count, self.outside
        for slot, status in members:
            phase = status.phase
            if not status.micro_batches or phase not in ORDER:
                self._stop_judging(slot)
                continue
            if status.moved and self.moved.get(slot) != status.moved:
                self.moved[slot] = status.moved
                self.pulses += 1
            stepped = phase == "stepped"
            done, before = status.iteration + stepped, came.get(slot)
            if before != done:
                if before is None:
                    self.unjudged.discard(slot)
                elif before in outside or count[before] == 1:
                    self._forget(slot, before)
                else:
                    count[before] -= 1
                came[slot] = done
                count[done] = count.get(done, 0) + 1
            if not stepped and done not in outside:
                continue
            waiting = outside.get(done)
            if stepped == (waiting is not None and slot in waiting):
                continue
            if stepped:
                outside.setdefault(done, set()).add(slot)
            elif waiting is not None:
                waiting.discard(slot)
            self.moves += done <= self.upto

    def on_change(self, job: JobView, slots: Iterable[int]) -> None:
        """Update the progress of members whose status or agent has changed."""
        state, agents, per_node = job.state, job.agents, job.per_node
        generation = state.plan.generation if state.plan is not None else -1
        running = []
        for slot in slots:
            member = state.members.get(slot)
            if member is None:
                self._drop(slot)
                self.unjudged.discard(slot)
                continue
            agent = agents.get(slot // per_node)
            status = agent.ranks.get(slot) if agent is not None else None
            runs = status is not None and status.state == "running" and status.generation == generation
            if runs and agent is not None and status is not None and agent.alive:
                if member == (agent.agent, status.incarnation):
                    running.append((slot, status))
                    continue
            self._stop_judging(slot)
        self.update_running(running)

    def stop_judging(self, slots: Sequence[int]) -> None:
        """Take in that these members report no iterations at present."""
        if self.done:
            for slot in slots:
                self._drop(slot)
        self.unjudged.update(slots)

    def _stop_judging(self, slot: int) -> None:
        self._drop(slot)
        self.unjudged.add(slot)

    def _drop(self, slot: int) -> None:
        before = self.done.pop(slot, None)
        if before is not None:
            self._forget(slot, before)

    def _forget(self, slot: int, before: int) -> None:
        left = self.count[before] - 1
        if left:
            self.count[before] = left
        else:
            del self.count[before]
        waiting = self.outside.get(before)
        if waiting is not None and slot in waiting:
            waiting.discard(slot)
            self.moves += before <= self.upto
            if not waiting:
                del self.outside[before]

    def least(self) -> int | None:
        """Return how many iterations all members have finished; None while the job must not be judged."""
        return None if self.unjudged or not self.count else min(self.count)


class Laggard(NamedTuple):
    """A rank that keeps the others waiting."""

    slot: int
    phase: str
    reason: str


@dataclass
class IterationWatch:
    """One job's iteration in progress. Times in seconds on the controller's clock."""

    standing: Standing = field(default_factory=Standing)
    at: tuple[int, int] | None = None
    """(generation, iteration) that the job is in; None while the job must not be judged."""
    moves: int = -1
    since: float = 0.0
    pulses: int = 0
    moved_at: float = 0.0
    """When a member's collective last made progress: a slow or lossy network is not a hang."""
    overdue: float | None = None
    """When the deadline was first seen to have passed."""
    check_at: float = 0.0
    """When to check the limits of all members next."""
    reported: bool = False
    """Whether the log already says that this iteration takes long."""
    suspects: list[Finding] = field(default_factory=list)
    """Hangs whose ranks are stopped as soon as their stacks are known; their failures are recorded already."""
    asked: set[int] = field(default_factory=set)
    """Slots whose stacks the action waits for, until `act_at`."""
    stacks_due: set[int] = field(default_factory=set)
    """Slots whose requested stacks have not arrived. Stacks of other slots are not recorded."""
    act_at: float = 0.0

    def shift(self, seconds: float) -> None:
        """Move the times on after this process was suspended, so that no rank counts as late for that."""
        self.since += seconds
        self.moved_at += seconds
        self.act_at += seconds
        self.overdue = None


def check_iteration(view: View, job: JobView, times: JobTimes, watch: IterationWatch) -> Outcome:
    """Find an iteration that does not end, and decide what to do about it."""
    out = Outcome()
    if not view.config.monitor_iterations:
        return out
    at = _current_iteration(job, watch)
    if at is not None:
        times.adapt(job.state)
        watch.standing.upto = at[1]
    if at is None or at != watch.at or watch.moves != watch.standing.moves:
        _drop_suspects(job, watch, out)
        watch.at, watch.moves = at, watch.standing.moves
        watch.since, watch.overdue, watch.check_at, watch.reported = view.now, None, 0.0, False
        return out
    if watch.pulses != watch.standing.pulses:
        watch.pulses, watch.moved_at, watch.overdue = watch.standing.pulses, view.now, None
        _drop_suspects(job, watch, out)
    if watch.suspects:
        if not job.survey.open and (not watch.asked or view.now >= watch.act_at):
            _confirm(view, job, watch, out)
        return out
    waited = view.now - max(watch.since, watch.moved_at)
    if view.now < watch.check_at or waited < times.limit(job.state, view.config):
        return out
    watch.check_at = look_again(view.now, len(job.state.members))
    limits = _limits(job, times, watch, waited, view.config)
    if waited < min(limit for limit, _ in limits.values()):
        return out
    if any(view.unread(agent.route) for agent in job.alive()):
        watch.overdue = None  # this controller is behind: the ranks have reported more than it has read
        return out
    if watch.overdue is None:
        watch.overdue = view.now
    if _all_answered(job, watch.overdue, out):
        _report_hang(view, job, times, watch, limits, out)
    return out


def _current_iteration(job: JobView, watch: IterationWatch) -> tuple[int, int] | None:
    """Return (generation, iteration) that the job is in; None while the job must not be judged."""
    state, least = job.state, watch.standing.least()
    if state.phase not in (Phase.RUNNING, Phase.OFFERING) or state.plan is None or least is None:
        return None
    # Iterations that are repeated from an older state come before the last recorded one.
    newest = state.iteration + 1 if state.stepped_in == state.plan.generation else least
    return state.plan.generation, max(least, newest)


def _outside(watch: IterationWatch) -> set[int]:
    assert watch.at is not None
    return {slot for done, slots in watch.standing.outside.items() if done <= watch.at[1] for slot in slots}


def _limits(
    job: JobView, times: JobTimes, watch: IterationWatch, waited: float, config: ControllerConfig
) -> dict[int, Limit]:
    """Return how long each rank may keep the others waiting. A rank outside an iteration may be saving a checkpoint."""
    usual, outside = times.limit(job.state, config), _outside(watch)
    found: dict[int, Limit] = {}
    for slot in job.state.members:
        status, inside = job.status(slot), times.within(slot, usual, config)
        if status is not None and not job.state.mode.reports:
            found[slot] = times.patience.own_code(status, waited, inside, times.monitor.learned, inside > usual, config)
        elif slot in outside and status is not None:
            found[slot] = times.patience.between(slot, status, waited, inside, config)
        else:
            found[slot] = inside, _signal_stop(job, slot)
    return found


def _all_answered(job: JobView, since: float, out: Outcome) -> bool:
    elements = job.state.elements(job.state.members)
    silent = [agent for e in elements if (agent := job.agents.get(e)) is not None and agent.whole_at < since]
    out.orders += [Order(agent, f"ping overdue {since}", wire.Ping()) for agent in silent]
    return not silent


def _report_hang(
    view: View, job: JobView, times: JobTimes, watch: IterationWatch, limits: dict[int, Limit], out: Outcome
) -> None:
    assert watch.at is not None
    state, iteration, took = job.state, watch.at[1], view.now - watch.since
    waited = view.now - max(watch.since, watch.moved_at)
    least = behind(job) or suspended_members(job)
    culprits = _past_limit(least, limits, waited)
    if least and not culprits:
        return  # those that are behind have longer limits
    if _recorder_may_tell(job, culprits, limits, waited):
        return
    usual = f", the usual is {times.monitor.average:.3f} s" if times.monitor.average else ""
    long = f"iteration {iteration} runs for {took:.2f} s{usual}"
    patience = MANY_PATIENCE * times.limit(state, view.config)
    many = 2 * len(culprits) > len(state.members) and waited < patience
    suspended = all(_signal_stop(job, slot) for slot in state.members)  # somebody stopped the whole job on purpose
    who = "; ".join(culprit.reason for culprit in culprits[:MOST_STACKS])
    if many or suspended or (not culprits and _some_compute(view, job, waited)):
        if not watch.reported:
            watch.reported = True
            reason = f"{long}; {who or 'no rank waits for another'}; nothing is done yet"
            out.record(state, records.Overdue(iteration=iteration, reason=reason))
            _ask_stacks(job, [culprit.slot for culprit in culprits], out)
        return
    named = [records.HangCulprit(culprit.slot, state.node(culprit.slot), culprit.phase) for culprit in culprits]
    reason = f"{long}; {who or 'all wait in the same collective'}"
    out.record(state, records.Hang(iteration=iteration, seconds=took, culprits=named, reason=reason))
    if culprits:
        _learn_outside(job, times, watch, culprits, took)
        _suspect(view, job, watch, culprits, long, out)
    else:
        text = f"{long}; all ranks wait in the same collective"
        slots = tuple(sorted(state.members))
        out.findings.append(Finding(What.COLLECTIVE, state.job, slots, view.now, Source.CLOCK, text, by="statistics"))
    watch.since, watch.overdue = view.now, None


def _recorder_may_tell(job: JobView, culprits: Sequence[Laggard], limits: Mapping[int, Limit], waited: float) -> bool:
    """Whether several ranks of a replica are equally far, and some have not said yet how far their collectives are: the
    others of the replica wait for one of them."""
    if job.replica == 1 or not job.state.mode.reports or len(culprits) < 2:
        return False
    if waited >= max(limits[one.slot][0] for one in culprits) + RECORDER_SECONDS:
        return False
    statuses = [job.status(one.slot) for one in culprits]
    return any(status is not None and not status.collectives for status in statuses)


def _past_limit(least: Sequence[Laggard], limits: dict[int, Limit], waited: float) -> list[Laggard]:
    """Return the laggards past their limits, each with the reason not to wait longer."""
    late = ((one, *limits[one.slot]) for one in least)
    return [one._replace(reason=f"{one.reason}{why and ', '}{why}") for one, most, why in late if waited >= most]


def _learn_outside(
    job: JobView, times: JobTimes, watch: IterationWatch, culprits: Sequence[Laggard], took: float
) -> None:
    """Raise the limits if a culprit was in the script's own code: a long checkpoint must not be stopped twice."""
    outside = _outside(watch) if job.state.mode.reports else job.state.members
    if any(culprit.slot in outside and not _signal_stop(job, culprit.slot) for culprit in culprits):
        times.patience.longest_outside = max(times.patience.longest_outside, took)
        times.patience.longest_idle = max(times.patience.longest_idle, took)


def _some_compute(view: View, job: JobView, waited: float) -> bool:
    """Return whether a rank is in the script's code. Plain programs run ahead of their GPU, so they count as computing
    until all have waited in a collective for `hang_idle_seconds`."""
    if not job.state.mode.reports:
        return not _all_wait(job) or waited < view.config.hang_idle_seconds
    statuses = (job.status(slot) for slot in job.state.members)
    return any(status is not None and status.phase in ("computing", "stepped") for status in statuses)


def _suspect(
    view: View, job: JobView, watch: IterationWatch, culprits: Sequence[Laggard], long: str, out: Outcome
) -> None:
    """Report the culprits and ask for their stacks. They are stopped when the stacks are there, or at `act_at`."""
    slots = [culprit.slot for culprit in culprits]
    for culprit in culprits:
        evidence = f"{long}; {culprit.reason}"
        one, identity = (culprit.slot,), job.identity(culprit.slot)
        out.findings.append(
            slot_finding(view, job, What.HANG, one, Source.PEER, evidence, "statistics", identity=identity)
        )
    waiting = next((slot for slot in job.state.members if slot not in set(slots)), None)
    watch.asked = _ask_stacks(job, slots, out)
    watch.stacks_due |= watch.asked | _ask_stacks(job, [] if waiting is None else [waiting], out)
    watch.act_at = view.now + view.config.stacks_seconds


def _ask_stacks(job: JobView, slots: Sequence[int], out: Outcome) -> set[int]:
    """Ask the first few ranks for their stacks; return their slots."""
    asked = set()
    for slot in slots[:MOST_STACKS]:
        agent, status = job.agent(slot), job.status(slot)
        if agent is not None and status is not None:
            out.send(agent, wire.Stacks(slot=slot, incarnation=status.incarnation))
            asked.add(slot)
    return asked


def on_hang_recorded(watch: IterationWatch, finding: Finding, failure: int) -> None:
    """Make the rank of a hang a suspect, after the judge has recorded the hang as this failure."""
    if finding.identity is not None:
        watch.suspects.append(replace(finding, seen=failure))


def _drop_suspects(job: JobView, watch: IterationWatch, out: Outcome) -> None:
    """Drop the suspects: the job went on, or is being healed, before any of them was stopped."""
    for suspect in watch.suspects:
        text = f"slot {suspect.slots[0]} is not stopped: the job went on"
        out.record(job.state, records.FailureAction(failure=suspect.seen, text=text))
    watch.suspects, watch.asked = [], set()


def _confirm(view: View, job: JobView, watch: IterationWatch, out: Outcome) -> None:
    """Report the suspects again, so that they are stopped now that their stacks are known. Nothing waits for their
    ends: a stuck kernel could delay these for ever."""
    for suspect in watch.suspects:
        if job.state.members.get(suspect.slots[0]) == suspect.identity:
            out.findings.append(replace(suspect, at=view.now))
    watch.suspects, watch.asked, watch.at = [], set(), None


# ---------------------------------------------------------------- who is behind
def _collectives(job: JobView) -> dict[int, Groups]:
    members = ((slot, job.status(slot)) for slot in job.state.members)
    return {slot: status.collectives for slot, status in members if status is not None and status.collectives}


def _all_wait(job: JobView) -> bool:
    known = _collectives(job)
    return len(known) == len(job.state.members) and all_wait(known)


def behind(job: JobView) -> list[Laggard]:
    """Return the members that are furthest behind, if others wait for them; none if all are at the same point. Ranks of
    a session say by themselves how far they are; the flight recorder tells which of those that are equally far has not
    come to a collective."""
    found = {c.slot: Laggard(c.slot, c.phase, c.reason) for c in lagging(_collectives(job)) if c.slot is not None}
    own = [] if found and not job.state.mode.reports else _by_own_word(job)
    if not own:
        return list(found.values())
    phases = {one.slot: one.phase for one in own}
    agreed = found if found.keys() <= phases.keys() else {}
    return [one._replace(phase=phases[slot]) for slot, one in agreed.items()] or own


def _by_own_word(job: JobView) -> list[Laggard]:
    """Return those that are behind by what all ranks say of themselves."""
    progress = _progress(job)
    if not job.state.mode.reports and all(item.phase != "reducing" for item in progress.values()):
        return []  # nobody waits
    reached = {slot: item.collectives for slot, item in progress.items()}
    least, most = min(reached.values(), default=0), max(reached.values(), default=0)
    late = sorted((slot for slot, count in reached.items() if count < most), key=lambda slot: (reached[slot], slot))
    last = {slot for slot in late if reached[slot] == least}
    if not last:
        return []
    ahead = [slot for slot, count in reached.items() if count == most]
    words: dict[int, str] = {}
    where = f"{len(ahead)} other{'s wait' if len(ahead) > 1 else ' waits'} in {_place(job, ahead[0])}"
    held_up = _held_up(job, last)
    for slot in sorted(last - held_up.keys()):
        words[slot] = f"slot {slot} is in {_place(job, slot)}{_for_whom(slot, held_up)}, {where}"
    return [Laggard(slot, progress[slot].phase, reason) for slot, reason in words.items()]


def _for_whom(slot: int, held_up: Mapping[int, int]) -> str:
    mates = [mate for mate, of in held_up.items() if of == slot]
    return f", {number_spans('slot', mates)} of its replica wait{'s' * (len(mates) == 1)} for it" if mates else ""


class Progress(NamedTuple):
    """A rank's progress: the number of collectives that it has entered, and its phase."""

    collectives: int
    phase: str


def _progress(job: JobView) -> dict[int, Progress]:
    members = ((slot, job.status(slot)) for slot in job.state.members)
    known = ((slot, status) for slot, status in members if status is not None and status.phase in ORDER)
    return {s: Progress(len(ORDER) * at.iteration + ORDER[at.phase], at.phase) for s, at in known}


def _held_up(job: JobView, last: set[int]) -> dict[int, int]:
    """Return rank -> the rank of its replica for which alone it waits, of the ranks in `last`: one that a signal has
    stopped or, if there is none, one that has computed fewer micro-batches than it."""
    if job.replica == 1:
        return {}
    held_up, heads = dict[int, int](), heads_of(job.state.order, job.replica)
    for head in {heads[slot] for slot in last if slot in heads}:
        mates = sorted(slot for slot in last if heads.get(slot) == head)
        stopped = [slot for slot in mates if _signal_stop(job, slot)]
        computed = {slot: len(status.done) for slot in mates if (status := job.status(slot)) is not None}
        fewest = [slot for slot in mates if computed.get(slot, 0) == min(computed.values(), default=0)]
        to_blame = stopped or fewest
        held_up |= {slot: to_blame[0] for slot in mates if slot not in to_blame}
    return held_up


def suspended_members(job: JobView) -> list[Laggard]:
    """Return the members that a signal has stopped; none if all are stopped. For use if nobody is behind."""
    stopped = [slot for slot in job.state.members if _signal_stop(job, slot)]
    if len(stopped) == len(job.state.members):
        return []
    statuses = ((slot, job.status(slot)) for slot in sorted(stopped))
    return [
        Laggard(slot, status.phase if status else "", f"slot {slot} is in {_place(job, slot)} like the others")
        for slot, status in statuses
    ]


def _signal_stop(job: JobView, slot: int) -> str:
    status = job.status(slot)
    return "its process is stopped by a signal" if status is not None and status.process == STOPPED_BY_SIGNAL else ""


def _place(job: JobView, slot: int) -> str:
    status = job.status(slot)
    if status is None:
        return "an unknown place"
    if status.phase == "stepped":
        return f"the script's own code after iteration {status.iteration}"
    words = {"computing": f"micro-batch {len(status.done) + 1}", "reducing": "the reduce", "synced": "the commit"}
    if not job.state.mode.reports:
        words = {"computing": "the script's own code", "reducing": "backward or a collective"}
    return f"{words.get(status.phase, status.phase)} of iteration {status.iteration}"
