"""Which steps the event log can do without: a run of months would fill it with them, and a restart replays them all.

Of an uninterrupted run of one job's steps the state keeps only what the first ones and the last ones say: that the job
works again, where it stands, and how fast it was (`model.fold`). The log without the others folds to the same state.
"""

from __future__ import annotations

from collections.abc import Iterable

from unicron_ctl.controller.log.records import Step

RECENT_STEPS = 9  # of one job: its speed is the median of these
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
