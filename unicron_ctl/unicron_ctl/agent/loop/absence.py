"""What a job's log is told while the controller is away and the ranks of a plain program wait for it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from unicron_ctl.shared.protocol import structs
from unicron_ctl.shared.settings.limits import ORPHAN_SECONDS
from unicron_detector.failures.classify import default_classifier

AWAY_SECONDS = 2.0  # without a connection after a rank's end: a controller that is only restarted is back by then


class Absence:
    """Says once that a rank has ended while the controller is away, so that all wait for it, and once that it is back.

    speaks: this node also says so where its ranks ended only because others did.
    """

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks
        self._since: float | None = None  # what the log was told, by the time of the controller's last word

    def news(self, connected: bool, last_heard: float, ranks: Iterable[structs.RankStatus], now: float) -> str:
        """The next line for the log, or nothing. last_heard: of the controller; now: on the same, monotonic clock."""
        if self._since is not None:
            if last_heard <= self._since:
                return ""
            self._since = None
            return "the controller is back: the ranks start again as it says"
        if connected or not any(map(self._counts, ranks)):
            return ""
        self._since = last_heard
        left = max(0.0, ORPHAN_SECONDS - (now - last_heard))
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
        return (
            "a rank has ended, and the controller does not answer: no rank trains until it is back. From "
            f"{until} on nodes with an ended rank end their part of the step with its exit status"
        )

    def _counts(self, status: structs.RankStatus) -> bool:
        """The rank has ended a while ago, and this node is to say so."""
        end = status.exit
        if status.state != "exited" or end is None or time.time() - end.at < AWAY_SECONDS:
            return False
        return self._speaks or default_classifier().exit(end.code, end.last_line).scope != "network"
