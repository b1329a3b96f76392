"""Observe mode: the controller decides as always, and this filter stands where decisions go out.

What would touch a job or Slurm becomes an `observed` record, said once. A job meets the fate that it would have met
without this controller: at its first loss it ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from detector.escalation import ISOLATE
from detector.severity import REPORT
from unicron_ctl.controller.log import records
from unicron_ctl.controller.log.records import Record
from unicron_ctl.controller.model.cluster import ClusterState
from unicron_ctl.controller.model.finding import What
from unicron_ctl.controller.model.requests import Run
from unicron_ctl.controller.model.view import Outcome, Send
from unicron_ctl.protocol import wire

NOT_SENT = (wire.Break, wire.StartRank, wire.StopRank)
NOT_JUDGED = (What.HANG, What.COLLECTIVE, What.NODE, What.ACTION)  # their remedy is not carried out
DROPPED = (records.RankStart, records.Avoided, records.Isolated, records.IsolationWithheld, records.ActionFailed)


@dataclass
class Observer:
    """Remembers what it has said; lost with the process."""

    said: set[tuple[str, str]] = field(default_factory=set)

    def filter(self, outcome: Outcome, state: ClusterState) -> Outcome:
        """The outcome without what must not be done."""
        kept = Outcome(hurry=outcome.hurry)
        kept.findings = [f for f in outcome.findings if f.what not in NOT_JUDGED]
        kept.sends = [send for send in outcome.sends if self.may_send(send)]
        last: Record | None = None
        for job, generation, record in outcome.records:
            untrue = isinstance(record, records.FailureAction) and isinstance(last, records.RankStart)
            last = record
            if untrue:
                continue  # the failure's story must not tell of a process that is not started
            for changed in self._record(state, job, generation, record):
                kept.records.append((job, generation, changed))
        for request in outcome.requests:
            if isinstance(request, Run):
                for action in request.actions:
                    would = self._would(action.job, action.label, f"{action.label}: {action.reason}")
                    kept.records += [(action.job, 0, observed) for observed in would]
            else:
                kept.requests.append(request)
        return kept

    @staticmethod
    def may_send(send: Send) -> bool:
        return not isinstance(send.message, NOT_SENT)

    def _would(self, job: str, would: str, reason: str) -> list[Record]:
        if (job, would) in self.said:
            return []
        self.said.add((job, would))
        return [records.Observed(would=would, reason=f"observe mode: would {reason}")]

    def _record(self, state: ClusterState, job: str, generation: int, record: Record) -> list[Record]:
        if isinstance(record, DROPPED):
            return []
        if isinstance(record, records.Hang):
            said = f"{record.reason}; nothing is done in observe mode"
            once = self._would(job, f"stop the hang in iteration {record.iteration} of generation {generation}", said)
            return [records.Overdue(iteration=record.iteration, reason=said)] if once else []
        if isinstance(record, records.NodeVerdict) and record.action == ISOLATE:
            would = f"observe mode: would leave {record.node}: {record.reason}"
            return [records.NodeVerdict(node=record.node, event=record.event, action=REPORT, reason=would)]
        if isinstance(record, records.Break):
            return self._break(state, job, generation, record)
        return [record]

    def _break(self, state: ClusterState, job: str, generation: int, record: records.Break) -> list[Record]:
        if record.planned:
            return []
        lost = sorted(one.slot for one in record.lost)
        then = f"go on without slots {lost}" if lost else "try again"
        would = f"break generation {generation} and {then}"
        known = state.jobs.get(job)
        codes = [f.exit_code for f in known.failures if f.exit_code and set(f.slots) & set(lost)] if known else []
        code = next((code for code in reversed(codes) if 0 < code < 256), 1)
        observed = records.Observed(would=would, reason=f"observe mode: would {would}: {record.reason}")
        return [observed, records.JobEnded(code=code, reason=f"observe mode: {record.reason}")]
