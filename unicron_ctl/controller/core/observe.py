"""Where decisions go out: what the admin does not allow becomes an `observed` record, said once, and is not done.

Only what touches Slurm is held back. A job is healed within the nodes that it has in every mode: that is its owner's to
ask for, and no other job and no node is touched by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from unicron.ctl.controller.log import records
from unicron.ctl.controller.log.records import Record
from unicron.ctl.controller.model import permission
from unicron.ctl.controller.model.finding import Finding, What
from unicron.ctl.controller.model.requests import Action, Run
from unicron.ctl.controller.model.view import Outcome, View
from unicron.detector.failures.escalation import ISOLATE
from unicron.detector.failures.severity import REPORT


@dataclass
class Observer:
    """Remembers what it has said; lost with the process."""

    said: set[tuple[str, str]] = field(default_factory=set)

    def forget(self, job: str) -> None:
        """A job that is over."""
        self.said = {said for said in self.said if said[0] != job}

    def filter(self, outcome: Outcome, view: View) -> Outcome:
        """The outcome without what must not be done."""
        if not (outcome.findings or outcome.records or outcome.requests):
            return outcome
        kept = replace(outcome, records=[], findings=[], requests=[])
        kept.findings = [finding for finding in outcome.findings if self._may_judge(view, finding)]
        for job, generation, record in outcome.records:
            if isinstance(record, records.NodeVerdict) and record.action == ISOLATE:
                record = self._verdict(view, record)
            kept.records.append((job, generation, record))
        for request in outcome.requests:
            if isinstance(request, Run):
                request = self._run(view, request, kept)
            if request is not None:
                kept.requests.append(request)
        return kept

    def _run(self, view: View, run: Run, kept: Outcome) -> Run | None:
        """What may be asked of Slurm; the rest is said."""
        refused = [(action, permission.refusal(view, action)) for action in run.actions]
        for action, why in refused:
            if why and (action.job, action.label) not in self.said:
                self.said.add((action.job, action.label))
                kept.records.append((action.job, 0, observed(action, why)))
        may = tuple(action for action, why in refused if not why)
        return replace(run, actions=may) if may else None

    def _may_judge(self, view: View, finding: Finding) -> bool:
        """A node that the job must not leave is not given up: its ranks train on until they die."""
        if finding.what is not What.NODE:
            return True
        return permission.of_job(view, finding.job).may("requeue_hold")

    def _verdict(self, view: View, record: records.NodeVerdict) -> Record:
        why = permission.refusal(view, Action("requeue_hold", "", -1, record.node, ""))
        jobs = {agent.job for agent in view.live.on_node(record.node) if agent.alive}
        if any(permission.of_job(view, job).may("requeue_hold") for job in jobs) or (not jobs and not why):
            return record
        why = next((permission.of_job(view, job).refusal("requeue_hold") for job in sorted(jobs)), why)
        would = f"would leave {record.node}, but {why}: {record.reason}"
        return records.NodeVerdict(node=record.node, event=record.event, action=REPORT, reason=would)


def observed(action: Action, why: str) -> records.Observed:
    """The record for an action that is not carried out."""
    reason = f"would {action.label}: {action.reason}; not done, for {why}"
    return records.Observed(
        would=action.label, action=action.action, node=action.node, element=action.element, reason=reason
    )
