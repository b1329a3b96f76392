"""The time for which each kind of record stays in the log, so that what lives bounds the log, and not time.

The controller's state is saved from time to time (`Store.save_state`): no start needs a record that is older than both
states that are kept. So what is here says only how long people can read a record, and what a start has to fold again.

Steps are nearly all of a quiet log. Of an uninterrupted run of one job's steps the state keeps only what the first
ones and the last ones say: that the job works again, where it stands, and how fast it was (`model.fold`). The others
go at once; the log without them folds to the same state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from unicron_ctl.shared.log import records, savings
from unicron_ctl.shared.log.records import Record, Step

RECENT_STEPS = 9  # of one job: its speed is the median of these
DAY = 86400.0
KEPT_FIRST = 2
KEPT_LAST = RECENT_STEPS + 1
_STEP = str(Step.__struct_config__.tag)


class Retention(NamedTuple):
    """For how many seconds records of a kind stay. last_of_node: the last one of each node stays beyond. summed: also
    while the sum of what is only observed has not been made of it."""

    seconds: float
    last_of_node: bool = False
    summed: bool = False


SHORT = Retention(DAY)
"""Large records, which name every rank of a job, and those that come all the time."""
LONG = Retention(14 * DAY)
POLICIES: dict[type[Record], Retention] = {
    # ---- plans and what belongs to them: up to a megabyte each for a large job
    **dict.fromkeys(
        (records.PlanMade, records.Offer, records.GenerationAdopted, records.Break, records.MembersReinstated), SHORT
    ),
    **dict.fromkeys((records.ElementCutOff, records.ElementReconnected, records.StateAwaited, records.LastCopy), SHORT),
    **dict.fromkeys(
        (records.ElementsAllotted, records.Spares, records.NewcomersWait, records.Stacks, records.Hang), SHORT
    ),
    records.GenerationEntered: SHORT._replace(summed=True),
    # ---- what comes all the time
    **dict.fromkeys((Step, records.WorldProved, records.Timing, records.RanksReady, records.RankStart), SHORT),
    **dict.fromkeys((records.ExitNoted, records.StartedCold, records.LedgerViolation, records.BadMessage), SHORT),
    **dict.fromkeys((records.RegistrationRefused, records.AdmissionWaits, records.NodeEventsDropped), SHORT),
    **dict.fromkeys((records.Silence, records.TakeDeferred, records.TakeWithheld, records.InjectRefused), SHORT),
    records.NoticesSent: SHORT,
    records.NodeHealth: SHORT._replace(last_of_node=True),
    # ---- what people ask for later: jobs, failures, nodes, what was asked of Slurm
    **dict.fromkeys((records.JobRegistered, records.JobConfirmed, records.JobReallocated, records.JobSetAside), LONG),
    **dict.fromkeys((records.AgentRegistered, records.AgentConfirmed, records.AgentGone, records.AgentBack), LONG),
    records.EndNotice: LONG,
    **dict.fromkeys((records.FailureDetected, records.FailureVerdict, records.FailureAction), LONG),
    **dict.fromkeys((records.JobHealed, records.NeedsAdmin), LONG),
    **dict.fromkeys((records.LeaveOut, records.ActionFailed, records.NumberUsed, records.OfferWithdrawn), LONG),
    **dict.fromkeys((records.Reform, records.LayoutWanted, records.LayoutChosen), LONG),
    **dict.fromkeys((records.NoCopies, records.CopiesRefused, records.FaultInjected), LONG),
    **dict.fromkeys((records.JobDegraded, records.JobDegradedOver, records.Overdue), LONG),
    **dict.fromkeys((records.Anomaly, records.AnomalyOver), LONG),
    **dict.fromkeys((records.SlurmAction, records.SlurmDone, records.SlurmFailed, records.SlurmBack), LONG),
    **dict.fromkeys((records.HeldAgain, records.ElementUnpinned, records.ClusterReplanned), LONG),
    **dict.fromkeys((records.Alone, records.HeardAgain, records.MostSilent, records.MostHeard), LONG),
    **dict.fromkeys((records.NodeLost, records.NodeResumed, records.NodeIsolated, records.IsolationWithheld), LONG),
    **dict.fromkeys((records.NodeAvoided, records.NodeEvent, records.NodeVerdict, records.SlurmdReached), LONG),
    **dict.fromkeys(
        (records.ControllerStarted, records.LogRestored, records.ConfigReloaded, records.ConfigRefused), LONG
    ),
    records.ObservedWeek: LONG,
    **dict.fromkeys((records.ActionsPaused, records.ActionsResumed), LONG),  # what is paused is in the state, too
    **dict.fromkeys((records.JobEnded, records.ActionObserved), LONG._replace(summed=True)),
}
"""Of every kind that can be written; `savings.KINDS` are summed."""
assert {kind for kind, kept in POLICIES.items() if kept.summed} == set(savings.KINDS)


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
