"""Writes a line of unicrond's log for each event that whoever runs the cluster wants to see: failures, actions,
refusals, jobs that come and go, changes of the configuration. `unicronctl events` has the others, too."""

from __future__ import annotations

import logging

from unicron_ctl.controller.model.cluster_state import ClusterState
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.naming import nodes_of
from unicron_ctl.shared.log.records import Event, Record
from unicron_ctl.shared.slurm.host_lists import fold

log = logging.getLogger("unicron.controller.events")
LEVELS: dict[type[Record], int] = {
    **dict.fromkeys((records.LedgerViolation, records.NeedsAdmin, records.ConfigRefused), logging.ERROR),
    **dict.fromkeys((records.SlurmFailed, records.ActionFailed, records.Alone, records.MostSilent), logging.ERROR),
    **dict.fromkeys((records.IsolationWithheld, records.TakeWithheld), logging.ERROR),
    # ---- failures, actions against them, refusals
    **dict.fromkeys((records.FailureDetected, records.JobSetAside, records.Hang, records.Silence), logging.WARNING),
    **dict.fromkeys((records.NodeLost, records.NodeIsolated, records.NodeAvoided), logging.WARNING),
    **dict.fromkeys((records.NodeVerdict, records.NodeEventsDropped, records.ElementCutOff), logging.WARNING),
    **dict.fromkeys((records.TakeDeferred, records.SlurmAction, records.HeldAgain), logging.WARNING),
    **dict.fromkeys((records.LogRestored, records.NoCopies, records.CopiesRefused), logging.WARNING),
    **dict.fromkeys((records.BadMessage, records.RegistrationRefused), logging.WARNING),
    **dict.fromkeys((records.InjectRefused, records.FaultInjected), logging.WARNING),
    # ---- jobs that come, go and change; outcomes of actions
    **dict.fromkeys((records.ControllerStarted, records.ConfigReloaded, records.AdmissionWaits), logging.INFO),
    **dict.fromkeys((records.JobRegistered, records.JobEnded, records.JobReallocated, records.EndNotice), logging.INFO),
    **dict.fromkeys((records.FailureVerdict, records.FailureAction, records.JobHealed), logging.INFO),
    **dict.fromkeys((records.Break, records.PlanMade, records.GenerationAdopted, records.Reform), logging.INFO),
    **dict.fromkeys((records.ElementReconnected, records.HeardAgain, records.MostHeard), logging.INFO),
    **dict.fromkeys((records.NodeResumed, records.NodeEvent, records.SlurmDone, records.SlurmBack), logging.INFO),
    **dict.fromkeys((records.ActionObserved, records.ObservedWeek, records.ClusterReplanned), logging.INFO),
    **dict.fromkeys((records.PairTest, records.NodeSwap), logging.INFO),
    **dict.fromkeys((records.ActionsPaused, records.ActionsResumed), logging.INFO),
}
"""Records of other kinds have no line."""


def log_event(event: Event, state: ClusterState) -> None:
    """Write the event's line, if it has one. state: after the event."""
    level = LEVELS.get(type(event.record))
    if level is None or not log.isEnabledFor(level):
        return
    if getattr(event.record, "over", False):
        level = logging.INFO
    text = event.record.reason or getattr(event.record, "text", "")
    log.log(level, "%s%s", event.kind, f": {text}" if text else "", extra={"about": _about(event, state)})


def _about(event: Event, state: ClusterState) -> dict[str, object]:
    """Return the job, the nodes as a host list, and the event's number."""
    record, job = event.record, event.job
    if isinstance(record, records.RegistrationRefused):
        job = record.peer.partition(" ")[0]
    names = nodes_of(record)
    if not names and job in state.jobs and isinstance(element := getattr(record, "element", None), int):
        agent = state.jobs[job].agents.get(element)
        names = [agent.node] if agent is not None else []
    return {"job": job, "node": fold(names), "event": event.id}
