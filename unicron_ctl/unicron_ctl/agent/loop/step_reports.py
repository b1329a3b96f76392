"""The step reports of a node's ranks, merged into one report for each iteration; those of several iterations leave in
one message.

The ranks of a node step together, within milliseconds, and each of them says so; the controller's work is to grow with
nodes, not with ranks. Each time that an agent sends something it wakes the controller, which then works just when all
ranks begin their next iteration. So it sends nothing more for a while: a few iterations wait for each other, and in a
large job for the next status. No report waits for long, and none is left out: what cannot be merged in time is a report
of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unicron_ctl.shared.protocol import structs
from unicron_ctl.shared.protocol.structs import MERGE_SECONDS
from unicron_detector.processes.rank_messages import Step

MOST_HELD = 4  # iterations that wait: of more than a few that are open the controller takes the oldest as it is


Key = tuple[int, int, int]  # generation, iteration, total: what the reports of one message have in common


@dataclass
class _Group:
    """The ranks' steps that become one report."""

    key: Key
    since: float
    """The time at which the first of them came"""
    steps: dict[int, Step] = field(default_factory=dict)
    """By slot"""


class StepReports:
    """Collects what the ranks of one agent report. `now`: seconds on any clock that does not jump.

    sent_at: when reports were taken last.
    """

    def __init__(self) -> None:
        self._hold = MERGE_SECONDS  # that a report may wait for later ones
        self._with_status = False
        self._open: dict[Key, _Group] = {}
        self._repeated: list[_Group] = []  # closed, since one of their ranks has reported the same iteration again
        self._last: tuple[int, int] = (-1, -1)  # generation and iteration of the last report ...
        self._told: set[int] = set()  # ... and the slots that have reported it
        self._newest: dict[int, Step] = {}  # slot -> its last step
        self._number = 0  # of the last report
        self.sent_at = float("-inf")

    def configure(self, period: float, progress: float) -> None:
        """period: seconds from one status to the next; progress: that news of nothing but progress may wait."""
        self._with_status = structs.with_status(period, progress)
        self._hold = structs.hold_seconds(period, progress)

    def add(self, slot: int, step: Step, now: float) -> None:
        """Take in that this slot's rank has stepped."""
        key = step.generation, step.iteration, step.total
        if key in self._open and slot in self._open[key].steps:
            self._repeated.append(self._open.pop(key))
        self._open.setdefault(key, _Group(key, now)).steps[slot] = step
        self._newest[slot] = step

    def repeat(self, now: float) -> None:
        """Report each slot's last step once more: a controller that comes back has not heard it."""
        waiting = {slot for group in self._open.values() for slot in group.steps}
        for slot, step in list(self._newest.items()):
            if slot not in waiting:
                self.add(slot, step, now)

    def due_reports(self, now: float, running: Mapping[int, int], hold: bool = False) -> list[structs.StepReport]:
        """The reports that are due, oldest iteration first.

        running: slot -> generation, for each rank that runs in one. An iteration waits for the ranks of its generation,
        unless a rank has reported a later one, or a rank that has reported it runs no more: the controller is to have
        the proof before it learns of that end. hold: what is complete may wait, too, if something was sent just now or
        a status is about to take it along.
        """
        if hold and self._may_wait(now, running):
            return []
        reports = [self._merge_group(group) for group in self._repeated]
        self._repeated = []
        newest = max(self._open, default=None)
        for key in sorted(self._open):
            group = self._open[key]
            if key != newest or now - group.since >= MERGE_SECONDS or self._complete(group, running):
                reports.append(self._merge_group(self._open.pop(key)))
        if reports:
            self.sent_at = now
        return reports

    @property
    def held(self) -> bool:
        """Something is going to be sent soon."""
        return bool(self._open or self._repeated)

    def _may_wait(self, now: float, running: Mapping[int, int]) -> bool:
        """A status is about to take them along, or others left just now; they are few, and all who have reported run
        on."""
        wait = self._with_status or now - self.sent_at < self._hold
        ended = any(self._ended(group, running) for group in self._open.values())
        return wait and self.timeout(now) > 0.0 and not self._repeated and not ended

    @staticmethod
    def _ended(group: _Group, running: Mapping[int, int]) -> bool:
        """A rank that has reported it runs no more in its generation."""
        return any(running.get(slot) != group.key[0] for slot in group.steps)

    def timeout(self, now: float) -> float:
        """Seconds until a report is due even if nothing more is reported; infinity when there is none."""
        if len(self._open) >= MOST_HELD:
            return 0.0
        return min((group.since + self._hold - now for group in self._open.values()), default=float("inf"))

    def _complete(self, group: _Group, running: Mapping[int, int]) -> bool:
        generation, iteration, _ = group.key
        if self._ended(group, running):
            return True
        told = self._told if self._last == (generation, iteration) else set()
        members = {slot for slot, in_generation in running.items() if in_generation == generation}
        return members <= told | group.steps.keys()

    def _merge_group(self, group: _Group) -> structs.StepReport:
        generation, iteration, total = group.key
        if self._last != (generation, iteration):
            self._last, self._told = (generation, iteration), set()
        self._told |= group.steps.keys()
        self._number += 1
        return structs.StepReport(
            generation=generation,
            iteration=iteration,
            total=total,
            at=max(step.at for step in group.steps.values()),
            ranks=[_rank_step(slot, group.steps[slot]) for slot in sorted(group.steps)],
            number=self._number,
        )


def _rank_step(slot: int, step: Step) -> structs.RankStep:
    """The rank's part of the report, without what goes without saying."""
    measured = all(name in step.phases for name in structs.PHASES)
    return structs.RankStep(
        slot=slot,
        micro_batches=step.micro_batches,
        seconds=step.seconds,
        loss=step.loss,
        computed=None if step.computed == step.micro_batches else step.computed,
        phases=[step.phases[name] for name in structs.PHASES] if measured else [],
    )
