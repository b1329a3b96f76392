"""Sets how long each kind of record stays in the log, so that the log's size depends on the cluster, not on its age.

The controller saves its state from time to time (`Store.save_state`). No start needs a record that is older than both
saved states, so a retention only decides how long people can read a record.

Nearly all records of a quiet log are steps. Of a run of one job's steps the fold uses only the first and the last ones:
the job works again, where it stands, how fast it was (`model.fold`). The others are deleted at once; the log folds to
the same state without them.
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
    """The seconds for which records of a kind stay."""

    seconds: float
    last_of_node: bool = False  # the last one of each node stays for good
    summed: bool = False
    """Records also stay until the weekly sum of observed actions includes them."""


SHORT = Retention(DAY)
LONG = Retention(14 * DAY)
"""Records that people ask for later: jobs, failures, nodes, actions in Slurm. Every kind that is not listed below."""
POLICIES: dict[type[Record], Retention] = {
    **dict.fromkeys(records.KINDS.values(), LONG),
    # ---- plans and what belongs to them: up to a megabyte each for a large job
    **dict.fromkeys((records.PlanMade, records.Offer, records.GenerationAdopted, records.Break), SHORT),
    **dict.fromkeys((records.MembersReinstated, records.StateAwaited, records.LastCopy, records.Hang), SHORT),
    **dict.fromkeys((records.ElementCutOff, records.ElementReconnected, records.ElementsAllotted), SHORT),
    **dict.fromkeys((records.Spares, records.NewcomersWait, records.Stacks), SHORT),
    records.GenerationEntered: SHORT._replace(summed=True),
    # ---- frequent records
    **dict.fromkeys((Step, records.WorldProved, records.Timing, records.RanksReady, records.RankStart), SHORT),
    **dict.fromkeys((records.ExitNoted, records.StartedCold, records.LedgerViolation, records.BadMessage), SHORT),
    **dict.fromkeys((records.RegistrationRefused, records.AdmissionWaits, records.NodeEventsDropped), SHORT),
    **dict.fromkeys((records.Silence, records.TakeDeferred, records.TakeWithheld, records.InjectRefused), SHORT),
    records.NoticesSent: SHORT,
    records.NodeHealth: SHORT._replace(last_of_node=True),
    # ---- the weekly sum counts these
    **dict.fromkeys((records.JobEnded, records.ActionObserved), LONG._replace(summed=True)),
}
assert {kind for kind, kept in POLICIES.items() if kept.summed} == set(savings.KINDS)


def redundant(events: Iterable[tuple[int, str, str]]) -> list[int]:
    """Return the ids of the steps that may go. events: (id, job, kind) in order."""
    current: dict[str, list[int]] = {}  # the run of steps of each job
    runs: list[list[int]] = []
    for number, job, kind in events:
        if kind != _STEP:
            current.pop(job, None)
        elif job in current:
            current[job].append(number)
        else:
            current[job] = [number]
            runs.append(current[job])
    return sorted(number for run in runs for number in run[KEPT_FIRST:-KEPT_LAST])
