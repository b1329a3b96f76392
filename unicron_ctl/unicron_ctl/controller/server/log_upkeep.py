"""Keeps the event log short and a start quick: thins the log, deletes old records, saves states."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from unicron_ctl.controller.core.state_snapshot import freeze
from unicron_ctl.controller.model.cluster_state import ClusterState
from unicron_ctl.shared.log.store import Store

THIN_EVERY = 5000  # events: then it takes some 20 ms
FORGET_FIRST_SECONDS = 300.0  # after a start, which has more urgent things to do
FORGET_SECONDS, FORGET_AGAIN_SECONDS = 1.0, 21600.0  # between two pieces of one clean-up; between two clean-ups
SAVE_SECONDS = 600.0  # between two saves of the state, and none in the middle of a recovery


class LogUpkeep:
    """Works on the log of one controller."""

    def __init__(self, store: Store, state: ClusterState, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now  # the controller's clock
        self._thinned = state.last_event
        self._forgetting: Iterator[int] | None = None
        self._forget_at = now() + FORGET_FIRST_SECONDS
        self._saved_at = now()

    def thin(self, last: int) -> None:
        """Thins the log once enough has come since the last time. last: the id of the event stored last."""
        if last - self._thinned >= THIN_EVERY:
            self._store.thin(self._thinned)
            self._thinned = last

    def work(self, state: ClusterState) -> None:
        """Saves the state and deletes a piece of what is old, if it is time. For moments when nothing is urgent."""
        now = self._now()
        if now - self._saved_at >= SAVE_SECONDS:
            self.save_state(state)
        if now >= self._forget_at:
            if self._forgetting is None:
                summed = state.observed_after if state.observed_since > 0 else state.last_event
                self._forgetting = self._store.forget(now, summed)
            if next(self._forgetting, None) is None:
                self._forgetting = None
            self._forget_at = self._now() + (FORGET_SECONDS if self._forgetting else FORGET_AGAIN_SECONDS)

    def save_state(self, state: ClusterState) -> None:
        """Saves the state: the next start replays only later events."""
        self._saved_at = self._now()
        self._store.save_state(state.last_event, freeze(state))
