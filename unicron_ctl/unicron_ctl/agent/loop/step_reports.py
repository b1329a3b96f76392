"""Merges the step reports of a node's ranks into one report for each iteration, and sends several of them together.

The ranks of a node step together, within milliseconds, but the controller's work should grow with nodes, not with
ranks. Each message of an agent wakes the controller, which then works just when all ranks begin their next iteration.
So after a message, reports of the next few iterations wait for each other, and in a large job for the next status. No
report waits for long, and none is left out: one that cannot be merged in time is sent by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unicron_ctl.shared.protocol import structs
from unicron_ctl.shared.protocol.structs import MERGE_SECONDS
from unicron_detector.processes.rank_messages import Step

MOST_HELD = 4  # iterations that wait: the controller takes the oldest as it is if more than a few are open
Key = tuple[int, int, int]  # generation, iteration, total: what the reports of one message have in common


@dataclass
class _Group:
    """Ranks' steps that become one report."""

    key: Key
    since: float
    """The time of the first step."""
    steps: dict[int, Step] = field(default_factory=dict)
    """By slot."""


class StepReports:
    """Collects the steps of one agent's ranks. All times are seconds on a clock that does not jump."""

    def __init__(self) -> None:
        self._hold = MERGE_SECONDS  # for which a report may wait for later ones
        self._with_status = False
        self._open: dict[Key, _Group] = {}
        self._repeated: list[_Group] = []  # closed, since one of their ranks has reported the same iteration again
        self._last: tuple[int, int] = (-1, -1)  # generation and iteration of the last report ...
        self._reporters: set[int] = set()  # ... and the slots that have reported it
        self._newest: dict[int, Step] = {}  # slot -> its last step
        self._number = 0  # of the last report
        self.sent_at = float("-inf")
        """The time at which reports were last taken."""

    def configure(self, period: float, progress: float) -> None:
        """Set the seconds from one status to the next (period), and those that mere progress may wait."""
        self._with_status = structs.with_status(period, progress)
        self._hold = structs.hold_seconds(period, progress)

    def add(self, slot: int, step: Step, now: float) -> None:
        """Note a step of this slot's rank."""
        key = step.generation, step.iteration, step.total
        if key in self._open and slot in self._open[key].steps:
            self._repeated.append(self._open.pop(key))
        self._open.setdefault(key, _Group(key, now)).steps[slot] = step
        self._newest[slot] = step

    def repeat(self, now: float) -> None:
        """Report each slot's last step once more, to a controller that comes back and may have missed it."""
        waiting = {slot for group in self._open.values() for slot in group.steps}
        for slot, step in list(self._newest.items()):
            if slot not in waiting:
                self.add(slot, step, now)

    def due_reports(self, now: float, running: Mapping[int, int], hold: bool = False) -> list[structs.StepTable]:
        """Return the reports that are due, oldest iteration first. running: slot -> generation of each running rank.

        An iteration waits for the ranks of its generation, unless a rank has reported a later one, or a rank that has
        reported it no longer runs: the controller must get the proof before it learns of that end. hold: a complete
        iteration may wait, too, if something was sent just now or a status is about to include it.
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
        """Something will be sent soon."""
        return bool(self._open or self._repeated)

    def _may_wait(self, now: float, running: Mapping[int, int]) -> bool:
        """Say whether a status is about to include the reports, or others were sent just now; they must be few, and all
        their ranks still running."""
        wait = self._with_status or now - self.sent_at < self._hold
        ended = any(self._ended(group, running) for group in self._open.values())
        return wait and self.timeout(now) > 0.0 and not self._repeated and not ended

    @staticmethod
    def _ended(group: _Group, running: Mapping[int, int]) -> bool:
        """Say whether a rank that has reported it no longer runs in its generation."""
        return any(running.get(slot) != group.key[0] for slot in group.steps)

    def timeout(self, now: float) -> float:
        """Return the seconds until a report is due even if no step follows; infinity without one."""
        if len(self._open) >= MOST_HELD:
            return 0.0
        return min((group.since + self._hold - now for group in self._open.values()), default=float("inf"))

    def _complete(self, group: _Group, running: Mapping[int, int]) -> bool:
        generation, iteration, _ = group.key
        if self._ended(group, running):
            return True
        reporters = self._reporters if self._last == (generation, iteration) else set()
        members = {slot for slot, in_generation in running.items() if in_generation == generation}
        return members <= reporters | group.steps.keys()

    def _merge_group(self, group: _Group) -> structs.StepTable:
        generation, iteration, total = group.key
        if self._last != (generation, iteration):
            self._last, self._reporters = (generation, iteration), set()
        self._reporters |= group.steps.keys()
        self._number += 1
        latest = max(step.at for step in group.steps.values())
        ranks = [_rank_step(slot, step) for slot, step in group.steps.items()]
        return structs.step_table(generation, iteration, total, latest, ranks, self._number)


def _rank_step(slot: int, step: Step) -> structs.RankStep:
    """Return the rank's part of the report, without values that follow from others."""
    measured = all(name in step.phases for name in structs.PHASES)
    return structs.RankStep(
        slot=slot,
        micro_batches=step.micro_batches,
        seconds=step.seconds,
        loss=step.loss,
        computed=None if step.computed == step.micro_batches else step.computed,
        phases=[step.phases[name] for name in structs.PHASES] if measured else [],
    )
