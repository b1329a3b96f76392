"""Says briefly what the controller knows already: while ranks do nothing but train, a heartbeat holds their progress
alone.

It adds to the agent's last whole status, and never to another brief one, so any of them may be lost. A whole one
follows after a few heartbeats, at every change, and after each message of the controller.
"""

from __future__ import annotations

import copy

import msgspec

from unicron_ctl.shared.protocol import structs, wire

WHOLE_EVERY = 10.0  # heartbeats
IDLE_SECONDS = 2.0  # a process that has been idle for longer may hang: its vitals are said
STOPPED_BY_SIGNAL = "T"
_ALIKE = [
    name
    for name in wire.Status.__struct_fields__
    if name not in ("v", "term", "sent", "number", "moved", "ranks", "steps", "tables")
]


class Heartbeats:
    """Chooses the form of each status. Times are seconds on a clock that does not jump."""

    def __init__(self) -> None:
        self.period = 0.0
        """Seconds from one heartbeat to the next; 0: the controller reads whole statuses only."""
        self._whole: wire.Status | None = None
        self._since = 0.0

    def doubt(self) -> None:
        """Send the next status whole: the controller may need more than progress."""
        self._whole = None

    def form(self, status: wire.Status, now: float) -> wire.Status | wire.Going:
        """Return the message for this status. The ranks' statuses in it may change afterwards."""
        whole = self._whole
        if whole is not None and now < self._since + WHOLE_EVERY * self.period and _goes_on(whole, status):
            return wire.Going(
                job=status.job,
                element=status.element,
                agent=status.agent,
                sent=status.sent,
                number=status.number,
                on=whole.number,
                progress=progress(status.ranks),
                moved=status.moved,
                tables=status.tables,
            )
        self._since = now
        self._whole = copy.copy(status)
        self._whole.ranks = {slot: copy.copy(rank) for slot, rank in status.ranks.items()}
        return status


def _goes_on(whole: wire.Status, status: wire.Status) -> bool:
    """Say whether the status is like the whole one but for the progress of ranks in training."""
    if status.answer or not status.ranks or status.ranks.keys() != whole.ranks.keys():
        return False
    if any(getattr(status, name) != getattr(whole, name) for name in _ALIKE):
        return False
    return all(_trains_on(whole.ranks[slot], rank) for slot, rank in status.ranks.items())


def _trains_on(before: structs.RankStatus, rank: structs.RankStatus) -> bool:
    if (
        rank.state != "running"
        or max(rank.idle, before.idle) > IDLE_SECONDS
        or STOPPED_BY_SIGNAL in (rank.process, before.process)
    ):
        return False
    return rank == msgspec.structs.replace(
        before,
        changed=rank.changed,
        iteration=rank.iteration,
        phase=rank.phase,
        done=rank.done,
        iteration_seconds=rank.iteration_seconds,
        loss=rank.loss,
        process=rank.process,
        idle=rank.idle,
        waits=rank.waits,
    )


def progress(ranks: dict[int, structs.RankStatus]) -> list[structs.Progress]:
    """Return the points that the ranks have reached, that of the most ranks first."""
    groups: dict[tuple[int, str], list[int]] = {}
    for slot, rank in ranks.items():
        groups.setdefault((rank.iteration, rank.phase), []).append(slot)
    rows = [
        structs.Progress(iteration, phase, slots)
        for (iteration, phase), slots in sorted(groups.items(), key=lambda group: -len(group[1]))
    ]
    rows[0].slots = []
    return rows
