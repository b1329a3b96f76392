"""What acting would have saved, where the controller only observes: summed for `unicronctl status` and once a week."""

from __future__ import annotations

import logging

from unicron_ctl.controller.core.core import Core
from unicron_ctl.shared.log import savings
from unicron_ctl.shared.log.records import ObservedWeek
from unicron_ctl.shared.log.store import Store

log = logging.getLogger("unicron.controller")
MOMENT = 3600.0  # seconds: "in 0.0 days" says nothing
SUM_AGAIN = 3600.0  # seconds after a weekly sum that failed


def observed_lines(core: Core, store: Store) -> list[str]:
    """The last weekly sum and what has come since, in one line each; no line after a moment in which nothing was
    left undone, such as a short pause."""
    now = observed_since(core, store)
    if now is not None and not now.calls and now.node_hours < 0.05 and core.now - now.since < MOMENT:
        now = None
    return [week.reason for week in (core.state.observed_week, now) if week]


def observed_since(core: Core, store: Store) -> ObservedWeek | None:
    """What acting would have saved since the last sum; None when nothing is only observed."""
    state = core.state
    if not state.observed_since:
        return None
    per_node = {name: job.settings.ranks_per_node for name, job in state.jobs.items()}
    events = store.of_kinds(savings.KINDS, state.observed_after)
    return savings.saved(events, state.observed_since, core.now, per_node, state.observed_week)


class WeeklySum:
    """Records the sum once a week. A sum that fails is logged and tried again later: nobody depends on it."""

    def __init__(self, core: Core, store: Store) -> None:
        self._core, self._store = core, store
        self._next_try = 0.0

    def is_due(self, now: float) -> bool:
        since = self._core.state.observed_since
        return bool(since) and now - since >= savings.WEEK_SECONDS and now >= self._next_try

    def record_sum(self, now: float) -> None:
        """Sums up; the log must hold all that was decided."""
        self._next_try = now + SUM_AGAIN
        try:
            week = observed_since(self._core, self._store)
        except Exception:
            log.exception("could not sum up what acting would have saved")
            return
        if week is not None:
            self._core.append("", 0, week)
