"""Everything that the controller knows about one job and that is lost with the process, in named parts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from unicron_ctl.controller.job.modes import LoggedNewcomers
from unicron_ctl.controller.job.orders import StandingOrders
from unicron_ctl.controller.job.spares import LoggedSpares
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.job_ledger import Account, JobLedger, PlainSteps
from unicron_ctl.controller.model.job_state import Identity, JobState, Phase
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

VIOLATIONS = 1 / 60, 100.0  # records of them a minute, and at once
TIMINGS_KEPT = 8  # of one generation: the parts of a recovery take about as long in every rank
COLD_REASONS = 20  # on record, of one job
LATE_SECONDS = 5.0  # after an iteration, for its report: beyond what clocks differ


@dataclass
class JobRuntime:
    """Everything about one job that is lost with the process; what is durable is in `JobState`.

    disturbed_until: the last iteration around which ranks were lost, so that reports may be missing.
    unheard_until: the last iteration of which an agent's report was lost on its way, or with the controller before.
    """

    sensors: SensorMemory
    ledger: JobLedger | PlainSteps
    newcomers: LoggedNewcomers = field(default_factory=LoggedNewcomers)
    spares: LoggedSpares = field(default_factory=LoggedSpares)
    cuts: Cuts = field(default_factory=Cuts)
    standing_orders: StandingOrders | None = None
    """What all agents were told last."""
    disturbed_until: int = -1
    unheard_until: int = -1
    outsiders: set[int] = field(default_factory=set)
    """Slots whose process was left behind by a plan and may have to be started again."""
    state_awaited: int = -1
    """The generation whose state is awaited, by the log."""
    injected: set[int] = field(default_factory=set)
    """Slots that a fault was sent to and whose agent has not refused it."""
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
        """A record changed the job's phase or members."""
        if isinstance(record, records.PlanMade):
            again = record.plan.source is None and isinstance(self.ledger, JobLedger)
            self.disturbed_until = -1 if not again or record.plan.iteration is None else record.plan.iteration
        elif isinstance(record, records.Break):
            self.outsiders.update(one.slot for one in record.lost)
        elif isinstance(record, records.GenerationEntered):
            self.outsiders.update(record.left)
            self.timings = {}

    def on_change(self, job: JobView, slot: int) -> None:
        if self.is_outsider(job, slot):
            self.outsiders.add(slot)

    def is_outsider(self, job: JobView, slot: int) -> bool:
        """The process is one that a plan went on without, and no new one is ordered yet."""
        agent, status = job.agent(slot), job.status(slot)
        if agent is None or status is None or job.state.slot(slot).wanted > status.incarnation:
            return False
        if job.state.banished.get(slot) == Identity(agent.agent, status.incarnation):
            return status.state != "finished"
        return status.state == "left" and slot not in job.state.members

    def note_cold_starts(self, job: JobState, agent: AgentView) -> Outcome:
        """Records reasons for which ranks of the agent did not start warm, each once."""
        out = Outcome()
        for slot, reason in agent.status.cold.items():
            if reason not in self.cold and len(self.cold) < COLD_REASONS:
                self.cold.add(reason)
                said = f"slot {slot} on {agent.node} started cold: {reason[:400]}"
                out.record(job, records.StartedCold(element=agent.element, reason=said), 0)
        return out

    # ------------------------------------------------------------ steps
    def on_steps(self, job: JobView, message: structs.StepReport, now: float, whole: bool = True) -> Outcome:
        """A node's ranks have stepped: the ledger and the speed of the iterations that are complete with it.

        whole: nothing was lost between its agent's report before and this one.
        """
        out, state = Outcome(), job.state
        if not whole:
            self.unheard_until = max(self.unheard_until, message.iteration)
        bound = float("inf") if state.phase is Phase.BREAKING else max(self.disturbed_until, self.unheard_until)
        self.sensors.times.on_step(message, state.mode.reports)
        drops = state.replica > 1 or (state.plan is not None and state.plan.state is not None)
        accounts = self.ledger.add(message, self._reporters(state), lambda iteration: iteration <= bound, drops)
        nan_since = state.nan_since
        for account in accounts:
            finite = account.loss is None or math.isfinite(account.loss)
            nan_since = -1 if finite else account.iteration if nan_since < 0 else min(nan_since, account.iteration)
            status = next((job.status(rank.slot) for rank in message.ranks), None)
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
                unreported=account.unreported,
                ago=late if (late := now - message.at) > LATE_SECONDS else 0.0,
            )
            out.record(state, step, account.generation)
            recovery = account.iteration <= self.disturbed_until or bool(account.unreported)
            for record in self.sensors.times.on_iteration(state, account, recovery, now):
                out.record(state, record, account.generation)
            if account.problems and self.violations.allows("", now):
                out.record(state, _violation(account), account.generation)
        return out

    def _reporters(self, job: JobState) -> Collection[int]:
        """The slots that are to report; worked out once per membership and loss."""
        if not job.lost:
            return job.members
        key = id(job.members), len(job.lost)
        if self.expected[0] != key:
            self.expected = key, job.members.keys() - job.lost.keys()
        return self.expected[1]

    def on_timing(self, job: JobState, message: wire.Timing) -> Outcome:
        """Record how long a recovery took in one rank, for the first few ranks."""
        out = Outcome()
        if not 0 <= job.generation - message.generation <= 1:
            return out
        seen = self.timings.get(message.generation, 0)
        self.timings[message.generation] = seen + 1
        if seen < TIMINGS_KEPT:
            out.record(job, records.Timing(slot=message.slot, seconds=message.seconds), message.generation)
        return out


def ready_ranks(job: JobState, agent: AgentView, slots: Iterable[int]) -> Outcome:
    """Records processes of the agent that can enter a generation for the first time. A plain program says nothing of
    it."""
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


def _violation(account: Account) -> records.LedgerViolation:
    reason = f"iteration {account.iteration}: {'; '.join(account.problems[:5])}"
    return records.LedgerViolation(iteration=account.iteration, problems=account.problems[:50], reason=reason)
