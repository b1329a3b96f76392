"""The proof that every iteration counted each micro-batch exactly once, from what the ranks report about their
steps.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from unicron_ctl.protocol.wire import Step

OPEN_ITERATIONS = 8  # per job: what is still incomplete when so many newer ones are open is reported as it is


@dataclass(frozen=True)
class Account:
    """One iteration. `problems` break the exactly-once rule. `unreported` micro-batches were in gradients of ranks that
    did not live to report; their reduce was complete, else nobody would have stepped."""

    iteration: int
    generation: int
    loss: float
    seconds: float
    ranks: int
    total: int
    computed: int
    unreported: list[int]
    problems: list[str]


@dataclass
class JobLedger:
    """Collects the Step messages of one job."""

    open: dict[int, dict[int, Step]] = field(default_factory=dict)
    closed: int = -1

    def add(self, step: Step, members: Collection[int], disturbed: Callable[[int], bool]) -> list[Account]:
        """Takes a report; returns the iterations that are complete with it, oldest first.

        members: who is in the job now. disturbed: whether ranks were lost around an iteration, so that reports on it
        may be missing.
        """
        if step.iteration <= self.closed:
            return []
        entries = self.open.setdefault(step.iteration, {})
        entries[step.slot] = step
        done = []
        for iteration in sorted(self.open):
            reports = self.open[iteration]
            complete = sum(len(report.micro_batches) for report in reports.values()) >= step.total
            newer = any(later > iteration and set(members) <= set(self.open[later]) for later in self.open)
            if (
                complete
                or (set(members) <= set(reports) and disturbed(iteration))
                or newer
                or len(self.open) > OPEN_ITERATIONS
            ):
                done.append(account(iteration, list(self.open.pop(iteration).values()), disturbed(iteration)))
                self.closed = max(self.closed, iteration)
            else:
                break
        return done


def account(iteration: int, reports: list[Step], disturbed: bool) -> Account:
    """The account of one iteration from its members' reports."""
    total = max(report.total for report in reports)
    summed = Counter(index for report in reports for index in report.micro_batches)
    computed = Counter(index for report in reports for index in report.computed)
    missing = [index for index in range(total) if index not in summed]
    problems = [f"micro-batch {index} is in {count} gradients" for index, count in sorted(summed.items()) if count > 1]
    problems += [
        f"micro-batch {index} was computed {count} times by ranks that lived on"
        for index, count in sorted(computed.items())
        if count > 1
    ]
    problems += [f"micro-batch {index} does not exist" for index in sorted(summed) if not 0 <= index < total]
    if missing and not disturbed:
        problems.append(f"micro-batches {missing} are in nobody's gradient")
    return Account(
        iteration=iteration,
        generation=max(report.generation for report in reports),
        loss=reports[0].loss,
        seconds=statistics.median(report.seconds for report in reports),
        ranks=len(reports),
        total=total,
        computed=sum(computed.values()),
        unreported=missing if disturbed else [],
        problems=problems,
    )
