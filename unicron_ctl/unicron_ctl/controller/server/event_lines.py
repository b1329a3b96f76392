"""A line of unicrond's log for each event that somebody who runs the cluster wants to see: failures, actions, refusals,
jobs that come and go, what the configuration became. What is left out (QUIET) is in `unicronctl events`.
"""

from __future__ import annotations

import logging

from unicron_ctl.controller.model.cluster_state import ClusterState
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.naming import nodes_of
from unicron_ctl.shared.log.records import Event, Record
from unicron_ctl.shared.slurm.host_lists import fold

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
            records.ConfigRefused,
            records.Alone,
            records.MostSilent,
        ),
        logging.ERROR,
    ),
    **dict.fromkeys(
        (
            records.FailureDetected,
            records.JobSetAside,
            records.NodeLost,
            records.Isolated,
            records.Avoided,
            records.TakeDeferred,
            records.SlurmAction,
            records.Hang,
            records.Parted,
            records.Silence,
            records.NodeVerdict,
            records.NodeEventsDropped,
            records.NoCopies,
            records.CopiesRefused,
            records.BadMessage,
            records.RegistrationRefused,
            records.InjectRefused,
            records.Injected,
            records.HeldAgain,
            records.Restored,
        ),
        logging.WARNING,
    ),
    **dict.fromkeys(
        (
            records.Started,
            records.Configured,
            records.JobRegistered,
            records.JobEnded,
            records.Reallocated,
            records.Noticed,
            records.FailureVerdict,
            records.FailureAction,
            records.Break,
            records.PlanMade,
            records.Adopted,
            records.Reform,
            records.Rejoined,
            records.HeardAgain,
            records.MostHeard,
            records.NodeResumed,
            records.Healed,
            records.NodeEvent,
            records.AdmissionWaits,
            records.SlurmDone,
            records.SlurmBack,
            records.Observed,
            records.ObservedWeek,
            records.Replanned,
            records.Paused,
            records.Unpaused,
        ),
        logging.INFO,
    ),
}
QUIET = frozenset(
    (
        *(records.AgentRegistered, records.AgentConfirmed, records.AgentGone, records.AgentBack, records.JobConfirmed),
        *(records.RanksReady, records.RankStart, records.StartedCold, records.ExitNoted, records.LeaveOut),
        *(records.Step, records.Steady, records.Timing, records.Entered, records.Offer, records.OfferWithdrawn),
        *(records.NumberUsed, records.Reinstated, records.StateAwaited, records.LastCopy, records.NewcomersWait),
        *(records.LayoutWanted, records.LayoutChosen, records.Spares, records.Stacks, records.Overdue),
        *(records.Degraded, records.DegradedOver, records.Anomaly, records.AnomalyOver),
        *(records.SlurmdReached, records.NodeHealth, records.Unpinned, records.Allotted, records.Unreadable),
        records.Told,
    )
)


def log_event(event: Event, state: ClusterState) -> None:
    """Write the event's line, if it has one. state: after the event."""
    level = LEVELS.get(type(event.record))
    if level is None or not log.isEnabledFor(level):
        return
    if getattr(event.record, "over", False):
        level = logging.INFO
    said = event.record.reason or getattr(event.record, "text", "")
    log.log(level, "%s%s", event.kind, f": {said}" if said else "", extra={"about": _about(event, state)})


def _about(event: Event, state: ClusterState) -> dict[str, object]:
    """The job, the nodes as a host list, and the event's number."""
    record, job = event.record, event.job
    if isinstance(record, records.RegistrationRefused):
        job = record.peer.partition(" ")[0]
    names = nodes_of(record)
    known = state.jobs.get(job)
    if not names and known is not None and isinstance(element := getattr(record, "element", None), int):
        agent = known.agents.get(element)
        names = [agent.node] if agent is not None else []
    return {"job": job, "node": fold(names), "event": event.id}
