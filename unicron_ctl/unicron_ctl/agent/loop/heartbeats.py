"""Says briefly what the controller knows already: a status holds what is new since the agent's last whole one. While
ranks do nothing but train, that is their progress alone; when they stop, or enter a generation, it is also where they
stand, once for all that stand alike.

It adds to a whole status, and never to another brief one, so any of them may be lost. A whole one follows after a few
heartbeats, at every other change, and after each message of the controller but a Break and a plan.
"""

from __future__ import annotations

import copy

import msgspec

from unicron_ctl.shared.protocol import structs, wire

WHOLE_EVERY = 10.0  # heartbeats
IDLE_SECONDS = 2.0  # a process that has been idle for longer may hang: its vitals are said
STOPPED_BY_SIGNAL = "T"
STANDS = frozenset({"waiting", "entering", "running", "stopped", "standby"})  # states that the brief form can say
ORDINARY = wire.Break, wire.PlanShare, wire.Pong  # a controller that sends them knows the agent
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
        self._stood: dict[int, tuple[object, ...]] = {}
        """The standing of the ranks by the last brief form since then; empty if it said nothing of that."""
        self._points: dict[int, tuple[int, str, list[int]]] = {}
        """The iteration, the phase and the micro-batches of the ranks when the last status was made."""

    def doubt(self) -> None:
        """Send the next status whole: the controller may need more than progress."""
        self._whole = None

    def on_message(self, message: wire.Message) -> None:
        """Take in a message of the controller."""
        if not isinstance(message, ORDINARY):
            self.doubt()

    def form(self, status: wire.Status, now: float) -> wire.Status | wire.Going:
        """Return the message for this status. The ranks' statuses in it may change afterwards."""
        whole, worked = self._whole, self._note_points(status.ranks)
        if whole is not None and now < self._since + WHOLE_EVERY * self.period and _goes_on(whole, status):
            ranks = status.ranks
            stand = {slot: _standing(rank) for slot, rank in ranks.items()}
            rests = any(rank.state != "running" for rank in ranks.values())
            moved = any(_standing(whole.ranks[slot]) != where for slot, where in stand.items())
            news = rests or moved or bool(self._stood)
            if not news or ((rests or stand != self._stood) and all(map(_can_be_said, ranks.values()))):
                self._stood = stand if news else {}
                return wire.Going(
                    job=status.job,
                    element=status.element,
                    agent=status.agent,
                    sent=status.sent,
                    number=status.number,
                    on=whole.number,
                    progress=progress(ranks, news),
                    moved=status.moved,
                    tables=status.tables,
                    done={slot: rank.done for slot, rank in ranks.items() if rank.done} if news else worked,
                )
        self._since, self._stood = now, {}
        self._whole = copy.copy(status)
        self._whole.ranks = {slot: copy.copy(rank) for slot, rank in status.ranks.items()}
        return status

    def _note_points(self, ranks: dict[int, structs.RankStatus]) -> dict[int, list[int]]:
        """Note where the ranks are. Return the micro-batches of those that have finished one, and are otherwise where
        they were: nothing else shows that such a rank does not hang."""
        before = self._points
        self._points = {slot: (rank.iteration, rank.phase, list(rank.done)) for slot, rank in ranks.items()}
        return {
            slot: point[2]
            for slot, point in self._points.items()
            if slot in before and before[slot] != point and before[slot][:2] == point[:2]
        }


def _standing(rank: structs.RankStatus) -> tuple[object, ...]:
    """Return where the rank stands, which a brief form says of all ranks or of none."""
    return rank.state, rank.generation, rank.entering, rank.broken, tuple(rank.kept)


def _can_be_said(rank: structs.RankStatus) -> bool:
    """Say whether a brief form can say where the rank stands (:attr:`structs.Progress.states`)."""
    return rank.state != "running" or rank.generation > 0


def _goes_on(whole: wire.Status, status: wire.Status) -> bool:
    """Say whether the status is like the whole one but for what a brief form can say."""
    if status.answer or not status.ranks or status.ranks.keys() != whole.ranks.keys():
        return False
    if any(getattr(status, name) != getattr(whole, name) for name in _ALIKE):
        return False
    return all(_is_same(whole.ranks[slot], rank) for slot, rank in status.ranks.items())


def _is_same(before: structs.RankStatus, rank: structs.RankStatus) -> bool:
    if (
        rank.state not in STANDS
        or before.state not in STANDS
        or max(rank.idle, before.idle) > IDLE_SECONDS
        or STOPPED_BY_SIGNAL in (rank.process, before.process)
    ):
        return False
    return rank == msgspec.structs.replace(
        before.with_vitals_of(rank),
        state=rank.state,
        generation=rank.generation,
        entering=rank.entering,
        broken=rank.broken,
        kept=rank.kept,
        iteration=rank.iteration,
        phase=rank.phase,
        done=rank.done,
    )


def progress(ranks: dict[int, structs.RankStatus], stand: bool) -> list[structs.Progress]:
    """Return the points that the ranks have reached, that of the most ranks first. stand: also where they stand."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for slot, rank in ranks.items():
        groups.setdefault((rank.iteration, rank.phase, *(_standing(rank) if stand else ())), []).append(slot)
    rows = []
    for slots in sorted(groups.values(), key=len, reverse=True):
        rank = ranks[slots[0]]
        where = (rank.state, rank.generation, rank.entering, rank.broken, rank.kept) if stand else ()
        rows.append(structs.Progress(rank.iteration, rank.phase, slots, *where))
    rows[0].slots = []
    return rows
