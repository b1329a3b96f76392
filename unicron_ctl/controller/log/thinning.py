"""What the event log can do without: a run of months would fill it with steps, and a restart replays them all.

Of an uninterrupted run of one job's steps the state keeps only what the first ones and the last ones say: that the job
works again, where it stands, and how fast it was (`model.fold`). The log without the others folds to the same state.

Of a job that ended long ago and that the state has forgotten only what was asked of Slurm, decided about nodes, or
is summed up counts any more. The rest (`OF_THE_ENDED`) goes. Of what agents said of nodes (`OF_NODES`) that long ago
only what the state still holds of each node counts.
"""

from __future__ import annotations

from collections.abc import Iterable

from unicron_ctl.controller.log import records
from unicron_ctl.controller.log.records import Record, Step

RECENT_STEPS = 9  # of one job: its speed is the median of these
ENDED_SECONDS = 14 * 86400.0
OF_THE_ENDED: tuple[type[Record], ...] = (
    *(records.AgentRegistered, records.AgentConfirmed, records.AgentGone, records.AgentBack),
    *(records.RanksReady, records.RankStart, records.StartedCold, records.ExitNoted, records.Timing),
    *(records.FailureDetected, records.FailureVerdict, records.FailureAction, records.LeaveOut),
    *(records.Break, records.PlanMade, records.Adopted, records.NumberUsed, records.Offer, records.OfferWithdrawn),
    *(records.LayoutWanted, records.LayoutChosen, records.NoCopies, records.CopiesRefused),
    *(records.Entered, records.Reform, records.Reinstated, records.StateAwaited, records.LastCopy),
    *(records.Parted, records.Rejoined, records.Allotted, records.NewcomersWait, records.Spares, records.Silence),
    *(Step, records.Steady, records.LedgerViolation, records.Injected, records.InjectRefused),
    *(records.Degraded, records.DegradedOver, records.Overdue, records.Hang, records.Stacks),
    *(records.Anomaly, records.AnomalyOver, records.JobSetAside),
)
"""Kinds by which nothing but their own job is decided; of faults what nodes are judged by is a day old at most."""
OF_NODES: tuple[type[Record], ...] = (records.NodeEvent, records.NodeVerdict, records.NodeEventsDropped)
"""Kinds of no job, which any user's agents can have written."""
KEPT_FIRST = 2
KEPT_LAST = RECENT_STEPS + 1
_STEP = str(Step.__struct_config__.tag)


def redundant(events: Iterable[tuple[int, str, str]]) -> list[int]:
    """The ids of the steps that may go. events: (id, job, kind) in order."""
    runs: dict[str, list[int]] = {}
    found: list[int] = []
    for number, job, kind in events:
        if kind == _STEP:
            runs.setdefault(job, []).append(number)
        elif job in runs:
            found += _middle(runs.pop(job))
    for run in runs.values():
        found += _middle(run)
    return sorted(found)


def _middle(run: list[int]) -> list[int]:
    return run[KEPT_FIRST:-KEPT_LAST]
