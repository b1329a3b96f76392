"""The volatile knowledge about one job, in named parts; a restart loses it. `JobState` has the durable part."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from unicron_ctl.controller.job.modes import LoggedNewcomers
from unicron_ctl.controller.job.orders import StandingOrders
from unicron_ctl.controller.job.spares import LoggedSpares
from unicron_ctl.controller.job.swaps import SwapNotes
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.job_ledger import Account, JobLedger, PlainSteps
from unicron_ctl.controller.model.job_state import Failure, Identity, JobState, Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.live import READY
from unicron_ctl.controller.model.view import Outcome
from unicron_ctl.controller.replication.cuts import Cuts
from unicron_ctl.controller.sense.sensors import SensorMemory
from unicron_ctl.controller.sense.timing import JobTimes
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import structs, wire
from unicron_ctl.shared.settings.config import ControllerConfig
from unicron_ctl.shared.system.throttle import Throttle
from unicron_transition.generations.layout import lanes_of

VIOLATIONS = 1 / 60, 100.0  # records a second, and at once
TIMINGS_KEPT = 8  # of one generation: the parts of a recovery take about as long in every rank
COLD_REASONS = 20  # on record, of one job
LATE_SECONDS = 5.0  # from an iteration to its report; more than clocks differ


@dataclass
class JobRuntime:
    """The volatile knowledge about one job."""

    sensors: SensorMemory
    ledger: JobLedger | PlainSteps
    newcomers: LoggedNewcomers = field(default_factory=LoggedNewcomers)
    spares: LoggedSpares = field(default_factory=LoggedSpares)
    swaps: SwapNotes = field(default_factory=SwapNotes)
    cuts: Cuts = field(default_factory=Cuts)
    standing_orders: StandingOrders | None = None
    """The last orders that are the same for all agents."""
    disturbed_until: int = -1
    """The last iteration around which ranks were lost, so that reports may be missing."""
    unheard_until: int = -1
    """The last iteration of which an agent's report was lost on its way, or with the previous controller."""
    outsiders: set[int] = field(default_factory=set)
    """Slots whose process a plan left out, and that may have to be started again."""
    state_awaited: int = -1
    """The generation whose state is awaited, by the log."""
    injected: set[int] = field(default_factory=set)
    """Slots that got a fault which their agent has not refused."""
    cold: set[str] = field(default_factory=set)
    """Reasons for cold starts that are on record."""
    violations: Throttle = field(default_factory=lambda: Throttle(*VIOLATIONS))
    timings: dict[int, int] = field(default_factory=dict)
    expected: tuple[tuple[int, int], Collection[int]] = ((0, 0), ())

    @classmethod
    def for_job(cls, job: JobView, config: ControllerConfig) -> JobRuntime:
        memory = SensorMemory(JobTimes.fresh(config), job.progress, job.survey)
        ledger = JobLedger if job.state.mode.reports else PlainSteps
        return cls(memory, ledger(closed=job.state.iteration))

    def on_phase_changed(self, record: records.Record) -> None:
        """Takes in a record that changed the job's phase or members."""
        if isinstance(record, records.PlanMade):
            again = record.plan.source is None and isinstance(self.ledger, JobLedger)
            self.disturbed_until = -1 if not again or record.plan.iteration is None else record.plan.iteration
        elif isinstance(record, records.Reform) and record.unsound_until >= 0 and isinstance(self.ledger, JobLedger):
            self.ledger.go_back(record.sound)
        elif isinstance(record, records.Break):
            self.outsiders.update(one.slot for one in record.lost)
        elif isinstance(record, records.GenerationEntered):
            self.outsiders.update(record.left)
            self.timings = {}

    def on_change(self, job: JobView, slots: Iterable[int]) -> None:
        banished, members = job.state.banished, job.state.members
        out = [slot for slot in slots if slot in banished or slot not in members]  # of thousands, only a few
        self.outsiders.update(slot for slot in out if self.is_outsider(job, slot))

    def is_outsider(self, job: JobView, slot: int) -> bool:
        """Whether a plan went on without the slot's process, and no new one is ordered yet."""
        agent, status = job.agent(slot), job.status(slot)
        if agent is None or status is None or job.state.slot(slot).wanted > status.incarnation:
            return False
        if job.state.banished.get(slot) == Identity(agent.agent, status.incarnation):
            return status.state != "finished"
        return status.state == "left" and slot not in job.state.members

    def note_cold_starts(self, job: JobState, agent: AgentView) -> Outcome:
        """Records why ranks of the agent did not start warm, each reason once."""
        out = Outcome()
        for slot, reason in agent.status.cold.items():
            if reason not in self.cold and len(self.cold) < COLD_REASONS:
                self.cold.add(reason)
                text = f"slot {slot} on {agent.node} started cold: {reason[:400]}"
                out.record(job, records.StartedCold(element=agent.element, reason=text), 0)
        return out

    # ------------------------------------------------------------ steps
    def on_steps(self, job: JobView, message: structs.StepTable, now: float, whole: bool = True) -> Outcome:
        """Takes in the steps of a node's ranks, and records the iterations that are complete with them.

        whole: no report was lost between the agent's previous report and this one.
        """
        out, state = Outcome(), job.state
        if not whole:
            self.unheard_until = max(self.unheard_until, message.iteration)
        bound = float("inf") if state.phase is Phase.BREAKING else max(self.disturbed_until, self.unheard_until)
        self.sensors.times.on_step(message, state.mode.reports, lanes_of(job.rank_layout))
        drops = state.replica > 1 or (state.plan is not None and state.plan.state is not None)
        accounts = self.ledger.add(message, self._reporters(state), lambda iteration: iteration <= bound, drops)
        nan_since, unsound = state.nan_since, state.unsound_seconds
        for account in accounts:
            finite = account.loss is None or math.isfinite(account.loss)
            nan_since = -1 if finite else account.iteration if nan_since < 0 else min(nan_since, account.iteration)
            recovery = account.iteration <= self.disturbed_until or bool(account.unreported)
            unsound += _unsound_seconds(state, account, finite, recovery)
            status = next((job.status(slot) for slot in message.slots), None)
            step = records.Step(
                iteration=account.iteration,
                loss=account.loss if finite else None,
                nan_since=nan_since,
                seconds=account.seconds,
                ranks=account.ranks if state.replica == 1 else len(self._reporters(state)),
                nodes=len(state.inside),
                flops=status.flops_per_iteration if status else 0.0,
                train_iterations=status.train_iterations if status else 0,
                micro_batches=account.total,
                computed=account.computed,
                unsound_seconds=unsound,
                unreported=account.unreported,
                ago=late if (late := now - message.at) > LATE_SECONDS else 0.0,
            )
            out.record(state, step, account.generation)
            for record in self.sensors.times.on_iteration(state, account, recovery, now):
                out.record(state, record, account.generation)
            if account.problems and self.violations.allows("", now):
                reason = f"iteration {account.iteration}: {'; '.join(account.problems[:5])}"
                problems = account.problems[:50]
                violation = records.LedgerViolation(iteration=account.iteration, problems=problems, reason=reason)
                out.record(state, violation, account.generation)
        return out

    def _reporters(self, job: JobState) -> Collection[int]:
        """The slots that have to report; computed once per membership and loss."""
        if not job.lost:
            return job.members
        key = id(job.members), len(job.lost)
        if self.expected[0] != key:
            self.expected = key, job.members.keys() - job.lost.keys()
        return self.expected[1]

    def on_timing(self, job: JobState, message: wire.Timing) -> Outcome:
        """Records how long a recovery took in one rank, for the first few ranks."""
        out = Outcome()
        if not 0 <= job.generation - message.generation <= 1:
            return out
        count = self.timings[message.generation] = self.timings.get(message.generation, 0) + 1
        if count <= TIMINGS_KEPT:
            out.record(job, records.Timing(slot=message.slot, seconds=message.seconds), message.generation)
        return out


def _unsound_seconds(job: JobState, account: Account, finite: bool, recovery: bool) -> float:
    """Return the time that an iteration lost because something in it was not sound."""
    if not finite:
        return account.seconds
    if recovery or account.iteration not in noted_iterations(job):  # else it was no step at first
        return 0.0
    return max(0.0, account.seconds - (job.seconds or account.seconds))


def noted_iterations(job: JobState) -> set[int]:
    """Return the iterations of which ranks have noted that something in them was not sound."""
    found = (failure.record for failure in job.failures)
    return {record.iteration for record in found if record.noted is not None and record.iteration is not None}


def ready_ranks(job: JobState, agent: AgentView, slots: Iterable[int]) -> Outcome:
    """Records processes of the agent that can enter a generation for the first time. Plain programs do not tell."""
    out, found = Outcome(), {}
    for slot in slots if job.mode.reports else ():
        rank = agent.ranks.get(slot)
        if rank is None or rank.state not in READY:
            continue
        agent.announced[slot] = rank.incarnation
        if job.slot(slot).ready != Identity(agent.agent, rank.incarnation):
            found[slot] = rank.incarnation
    if found:
        out.record(job, records.RanksReady(agent=agent.agent, incarnations=found), 0)
    return out


def report_healed(job: JobView) -> Outcome:
    """Records once for all failures that one recovery mended that the job trains again, and the cost."""
    out, state = Outcome(), job.state
    mended = {failure.id: at for failure in state.failures if (at := _mended_at(state, failure)) is not None}
    if not mended:
        return out
    failures = [failure for failure in state.failures if failure.id in mended]
    first = failures[0]
    seconds = max(0.0, max(mended.values()) - first.detected_at)
    lost = state.lost_seconds - state.lost_before if state.stepped else seconds
    elements = state.inside | set(state.elements(slot for failure in failures for slot in failure.record.slots))
    many = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
    where = f" on {first.record.node}" if first.record.node else ""
    healed = records.JobHealed(
        failures=list(mended),
        cause=first.record.cause,
        node=first.record.node,
        seconds=seconds,
        lost_seconds=max(0.0, lost),
        nodes=len(elements),
        reason=f"trains again {seconds:.1f} s after {first.record.cause}{where}{many}; {max(0.0, lost):.1f} s are lost",
    )
    out.record(state, healed)
    count = len([failure for failure in state.failures if failure.healed or failure.id in mended])
    out.note_at_end(
        job.agents,
        f"{count} failure{'s were' if count != 1 else ' was'} healed, {state.lost_seconds:.1f} s lost; the last: "
        f"{first.record.cause}{where}{many}, {seconds:.1f} s; `unicronctl explain {state.job}` has all",
    )
    return out


def _mended_at(job: JobState, failure: Failure) -> float | None:
    """When the job trained again after the failure; None if that is on record, or has not happened. Plain programs do
    not report iterations: their world counts once it has proved itself."""
    if failure.healed or failure.resumed_at is None:
        return None
    if failure.stepped_at is not None:
        return failure.stepped_at
    steady = not job.mode.reports and failure.generation is not None and job.steady > failure.generation
    return failure.resumed_at if steady else None
