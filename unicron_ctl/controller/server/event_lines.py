"""A line of unicrond's log for each event that somebody who runs the cluster wants to see: failures, actions, refusals,
jobs that come and go. What is left out is in `unicronctl events`.
"""

from __future__ import annotations

import logging

from unicron.ctl.controller.log import records
from unicron.ctl.controller.log.records import Event, Record

log = logging.getLogger("unicron.controller.events")
LEVELS: dict[type[Record], int] = {
    **dict.fromkeys(
        (
            records.LedgerViolation,
            records.SlurmFailed,
            records.IsolationWithheld,
            records.TakeWithheld,
            records.ActionFailed,
            records.NeedsAdmin,
        ),
        logging.ERROR,
    ),
    **dict.fromkeys(
        (
            records.FailureDetected,
            records.NodeLost,
            records.Isolated,
            records.SlurmAction,
            records.Hang,
            records.Parted,
            records.RegistrationRefused,
            records.InjectRefused,
            records.Injected,
        ),
        logging.WARNING,
    ),
    **dict.fromkeys(
        (
            records.JobRegistered,
            records.JobEnded,
            records.Break,
            records.PlanMade,
            records.Adopted,
            records.NodeResumed,
            records.Healed,
            records.SlurmDone,
            records.SlurmBack,
            records.Observed,
            records.Replanned,
            records.Paused,
            records.Unpaused,
        ),
        logging.INFO,
    ),
}


def tell(event: Event) -> None:
    """Write the event's line, if it has one."""
    level = LEVELS.get(type(event.record))
    if level is None or not log.isEnabledFor(level):
        return
    if getattr(event.record, "over", False):
        level = logging.INFO
    about = {"job": event.job, "node": getattr(event.record, "node", ""), "event": event.id}
    reason = f": {event.record.reason}" if event.record.reason else ""
    log.log(level, "%s%s", event.kind, reason, extra={"about": about})
