"""The proof, from the ranks' step reports, that every iteration counted each micro-batch exactly once.

The cost of a report grows with its micro-batches alone, not with the job or the stated size of the iteration: counts
are kept per iteration, for reported micro-batches, and not recounted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import chain, islice

from unicron_ctl.shared.protocol.structs import StepTable

OPEN_ITERATIONS = 8  # per job; with more open, the oldest is reported incomplete
MOST_TOTAL = 1 << 22  # micro-batches of an iteration
PROBLEMS_KEPT = 1000
MOST_NAMED = 100  # of the micro-batches without a report


@dataclass(frozen=True)
class Account:
    """The account of one iteration, over all ranks."""

    iteration: int
    generation: int
    loss: float | None
    """None if unknown."""
    seconds: float
    """The ranks' median."""
    ranks: int
    total: int
    computed: int
    """Micro-batches, counted as often as they were computed."""
    unreported: list[int]
    """Micro-batches in gradients of ranks that ended before they reported; their reduce was complete, or no rank would
    have stepped."""
    problems: list[str]
    """The way in which the exactly-once rule is broken."""


@dataclass
class OpenIteration:
    """An iteration with reports outstanding."""

    total: int
    generation: int = 0
    loss: float | None = 0.0
    reporters: set[int] = field(default_factory=set)
    seconds: list[float] = field(default_factory=list)
    summed: dict[int, int] = field(default_factory=dict)
    """micro-batch -> the number of gradients that have it."""
    besides: dict[int, int] = field(default_factory=dict)
    """micro-batch -> how much more often ranks computed it than there are gradients of theirs with it."""
    summed_again: set[int] = field(default_factory=set)
    """Micro-batches in more than one gradient."""
    in_gradients: int = 0
    dropped: bool = False
    """A rank computed micro-batches that are not in its gradient: it had no copy to undo a reduce with."""
    missing: set[int] | None = None
    """The members of the last comparison that have not reported."""
    members: Collection[int] = ()

    def all_in(self, members: Collection[int]) -> bool:
        """Whether all members have reported. Callers pass the same collection until the members change."""
        if len(self.reporters) < len(members):
            return False
        if self.missing is None or self.members is not members:
            self.missing, self.members = set(members) - self.reporters, members
        return not self.missing

    def add(self, table: StepTable) -> None:
        if not self.reporters.isdisjoint(table.slots):  # a repeated report
            table = table.only(set(table.slots) - self.reporters)
            if not table.slots:
                return
        if not self.reporters:
            self.loss = table.losses[0]
        self.reporters.update(table.slots)
        if self.missing is not None:
            self.missing.difference_update(table.slots)
        self.seconds += table.seconds
        self.generation = max(self.generation, table.generation)
        self._count(list(chain.from_iterable(table.micro_batches)))
        for slot, computed in table.computed.items():
            batches = table.micro_batches[table.slots.index(slot)]
            self.dropped = self.dropped or len(computed) > len(batches)
            for indices, more in ((computed, 1), (batches, -1)):
                for index in indices:
                    self.besides[index] = self.besides.get(index, 0) + more

    def _count(self, indices: list[int]) -> None:
        """Counts the indices in gradients. Usually none of them is in another one."""
        counts = self.summed
        self.in_gradients += len(indices)
        new = dict.fromkeys(indices, 1)
        if len(new) == len(indices) and counts.keys().isdisjoint(new):
            counts.update(new)
            return
        for index in indices:
            if index in counts:
                counts[index] += 1
                self.summed_again.add(index)
            else:
                counts[index] = 1

    def _times(self, index: int) -> int:
        """The number of times that ranks computed the micro-batch."""
        return self.summed.get(index, 0) + self.besides.get(index, 0)

    def account(self, iteration: int, unsure: bool, again: bool = False) -> Account:
        """The iteration's account. unsure: reports on it may have been lost, with a rank or on their way. again:
        surviving ranks may have had to compute micro-batches again."""
        missing = []
        strangers = {index for counts in (self.summed, self.besides) for index in counts if not 0 <= index < self.total}
        if len(self.summed) < self.total + len(strangers):
            missing = list(islice((index for index in range(self.total) if index not in self.summed), MOST_NAMED))
        problems = [
            f"micro-batch {index} is in {self.summed[index]} gradients"
            for index in sorted(self.summed_again - strangers)
        ]
        problems += [
            f"micro-batch {index} was computed {self._times(index)} times by ranks that lived on"
            for index in sorted((self.summed_again | self.besides.keys()) - strangers)
            if self._times(index) > 1 and not again
        ]
        problems += [f"micro-batch {index} does not exist" for index in sorted(strangers)]
        if missing and not unsure:
            problems.append(f"micro-batches {missing} are in nobody's gradient")
        return Account(
            iteration=iteration,
            generation=self.generation,
            loss=self.loss,
            seconds=statistics.median(self.seconds),
            ranks=len(self.reporters),
            total=self.total,
            computed=self.in_gradients + sum(self.besides.values()),
            unreported=missing if unsure else [],
            problems=problems[:PROBLEMS_KEPT],
        )


@dataclass
class JobLedger:
    """Collects the step reports of one job."""

    open: dict[int, OpenIteration] = field(default_factory=dict)
    closed: int = -1
    generation: int = 0
    """The newest of which a report came."""
    over: int = -1
    """Iterations of generations up to this one were made with an unsound state, and are made again."""

    def go_back(self, iteration: int) -> None:
        """Expects `iteration` and the later ones again, from a later generation."""
        self.closed, self.over = min(self.closed, iteration - 1), self.generation
        self.open.clear()

    def add(
        self, step: StepTable, members: Collection[int], disturbed: Callable[[int], bool], drops: bool = False
    ) -> list[Account]:
        """Takes an agent's report; returns the iterations that are complete with it, oldest first.

        members: the slots now in the job (a set or the keys of a dict). disturbed: whether reports on an iteration may
        be missing. drops: after a Break ranks may have to drop their gradients, in a replica composed anew or to repeat
        a step.
        """
        if step.iteration <= self.closed or step.generation <= self.over or not 0 < step.total <= MOST_TOTAL:
            return []
        self.generation = max(self.generation, step.generation)
        entry = self.open.get(step.iteration)
        if entry is None:
            entry = self.open[step.iteration] = OpenIteration(step.total)
        entry.add(step)
        done = []
        for iteration in sorted(self.open):
            if not self._complete(iteration, members, disturbed):
                break
            heard = self.open[iteration].all_in(members) or self._later(iteration, members)
            unsure = disturbed(iteration)
            entry = self.open.pop(iteration)
            done.append(entry.account(iteration, unsure or not heard, unsure and (drops or entry.dropped)))
            self.closed = max(self.closed, iteration)
        return done

    def _complete(self, iteration: int, members: Collection[int], disturbed: Callable[[int], bool]) -> bool:
        entry = self.open[iteration]
        if entry.in_gradients >= entry.total or len(self.open) > OPEN_ITERATIONS:
            return True
        if disturbed(iteration) and entry.all_in(members):
            return True
        return self._later(iteration, members)

    def _later(self, iteration: int, members: Collection[int]) -> bool:
        """Whether all members have reported a later iteration: their reports on this one have come or were lost."""
        return any(later > iteration and other.all_in(members) for later, other in self.open.items())


@dataclass
class PlainSteps:
    """Takes the place of the ledger for plain programs, which report their number of iterations and no contents.

    The job has made an iteration once each of its ranks has."""

    closed: int = -1
    last: dict[int, tuple[int, int, float]] = field(default_factory=dict)
    """slot -> generation, iteration and seconds of an iteration, of its last report."""

    def add(
        self, step: StepTable, members: Collection[int], disturbed: Callable[[int], bool], drops: bool = False
    ) -> list[Account]:
        """Takes an agent's report; returns the newest iteration that all members have made."""
        for slot, seconds in zip(step.slots, step.seconds, strict=True):
            self.last[slot] = step.generation, step.iteration, seconds
        present = [self.last[slot] for slot in members if slot in self.last]
        made = [iteration for generation, iteration, _ in present if generation == step.generation]
        if not made or len(made) < len(members) or min(made) <= self.closed:
            return []
        self.closed = min(made)
        seconds = statistics.median(each for _, _, each in present)
        return [Account(self.closed, step.generation, None, seconds, len(made), 0, 0, [], [])]
