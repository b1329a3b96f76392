"""Shares by measured speed: a slow replica gets fewer micro-batches, so that all are finished at the same time
(docs/design/shares.md). Pure, and without torch.

Each rank tells with its commit how long its replica takes for a round, and every rank hears the same numbers. From
these alone all ranks compute the same shares, so no message deals them. Every number comes from exactly rounded
operations (no `log`, and no `sum`, which later Pythons round otherwise), so that different machines agree, too. Ranks
that do not agree all the same see that in the next commit, and deal equally from then on.

Times are seconds. A *round* is the micro-batches that the lanes of a replica compute at the same time. A *pace* is the
time that a replica takes for a unit of work, over the usual one.
"""

from __future__ import annotations

import enum
import heapq
import math
import os
import struct
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import NamedTuple

SETTING = "UNICRON_SHARES"
UNKNOWN = -math.inf  # less than any number of a rank that knows it
WARM_UP = 2  # iterations of a generation that are not measured: new ranks compile and allocate in them
RECENT = 5  # iterations in each of which a replica must be slow, or fast again
HISTORY = 25  # blocks of RECENT iterations, which show how much the times vary by themselves
BLOCKS = (1, 2, 4, 8)  # in all of which it must be so: more where the times vary too much for fewer
LEVELS = 3  # blocks before their variation is known
LEAST_GAIN = 0.05  # of the iteration's time; a smaller one is not worth a change
CAUTION = 25.0  # iterations: with as few remembered, the gain must be twice as large
ERRORS = 5.0  # standard errors that count as chance
LEAST_SECONDS = 0.005  # of gain: shorter times are the scheduler's
NEARLY = 0.05  # a pace that differs less is the usual one


class Mode(enum.StrEnum):
    """The rule by which micro-batches are dealt."""

    SPEED = "speed"
    EQUAL = "equal"


def chosen_mode(environment: Mapping[str, str] = os.environ) -> Mode:
    """Read the setting. Raises ValueError for an unknown word."""
    text = environment.get(SETTING) or Mode.SPEED.value
    try:
        return Mode(text)
    except ValueError:
        raise ValueError(f"{SETTING}={text!r}: write {', '.join(Mode)}") from None


class Measurement(NamedTuple):
    """The pace of a rank in an iteration."""

    seconds: float
    """The time for a round of its replica."""
    tokens: float = UNKNOWN
    """The tokens of a round, if the loss is per token and this rank knows them."""


@dataclass(frozen=True)
class Schedule:
    """The time of a replica for a share of rounds."""

    stages: int = 1
    """Stages of its pipeline: as many rounds less one go by until the last stage is busy."""
    group: int = 1
    """Rounds that are computed together: a virtual pipeline fills its last group up."""

    def rounds(self, share: int) -> int:
        """Return the rounds in which a replica computes its share."""
        return -(-share // self.group) * self.group + self.stages - 1 if share else 0


def equal(rounds: int, replicas: int) -> list[int]:
    """Return the shares of an equal deal: the first replicas have one more."""
    return [rounds // replicas + (replica < rounds % replicas) for replica in range(replicas)]


def slowest(shares: Sequence[int], paces: Sequence[float], schedule: Schedule) -> float:
    """Return the time of the replica that is ready last, in usual rounds."""
    return max(pace * schedule.rounds(share) for share, pace in zip(shares, paces, strict=True))


def best(rounds: int, paces: Sequence[float], schedule: Schedule) -> list[int]:
    """Return the shares with which the last replica is ready first; each has one round at least, or its speed would
    never be known again. There must be as many rounds as replicas.

    A round always goes to the replica that would be ready first with it. As a replica's time never falls with its
    share, no other deal is ready earlier.
    """
    shares = [1] * len(paces)
    ready = [(pace * schedule.rounds(2), replica) for replica, pace in enumerate(paces)]
    heapq.heapify(ready)
    for _ in range(rounds - len(paces)):
        _, replica = ready[0]
        shares[replica] += 1
        heapq.heapreplace(ready, (paces[replica] * schedule.rounds(shares[replica] + 1), replica))
    return shares


class Block(NamedTuple):
    """RECENT iterations of all replicas."""

    levels: list[float]
    """Mean ratios, over that of the middle replica."""
    steps: list[float]
    """Sums of squares of the changes from one iteration to the next."""


class Series:
    """The times of all replicas for a unit of work, as ratios to their present pace."""

    def __init__(self, replicas: int):
        self.recent: deque[list[float]] = deque(maxlen=RECENT)
        self.blocks: deque[Block] = deque(maxlen=HISTORY)
        self.present = 0
        """Blocks with the present paces."""
        self._nothing = [0.0] * replicas
        self._open = 0
        self._sums, self._steps = self._nothing, self._nothing

    def add(self, times: Sequence[float], paces: Sequence[float]) -> float:
        """Add an iteration, and return the usual time in it."""
        own = [time / pace for time, pace in zip(times, paces, strict=True)]
        usual = median_low(own)  # one that was measured; of two replicas the faster one's
        row = [time / usual for time in own]
        before = self.recent[-1] if self.recent else row
        self.recent.append(row)
        self._open += 1
        self._sums = [sum_ + ratio for sum_, ratio in zip(self._sums, row, strict=True)]
        self._steps = [sum_ + (b - a) * (b - a) for sum_, a, b in zip(self._steps, before, row, strict=True)]
        if self._open == RECENT:
            self.blocks.append(Block(_over_middle(self._sums), self._steps))
            self.present += 1
            self._begin_block()
        return usual

    def begin_paces(self) -> None:
        """Note that other paces are the present ones. What came before says no more how fast a replica is, but
        still how much its times vary; except the block in which they changed."""
        self.recent.clear()
        if len(self.blocks) > 1:
            self.blocks.pop()
        self._begin_block()
        self.present = 0

    def _begin_block(self) -> None:
        self._open, self._sums, self._steps = 0, self._nothing, self._nothing

    @property
    def ready(self) -> bool:
        """Whether there is enough to compare."""
        return bool(self.blocks) and len(self.recent) == RECENT

    def outliers(self, blocks: int) -> dict[int, tuple[float, ...]]:
        """Return the replicas that were slow, or fast, in all of the last blocks, with their levels. Of a single block
        each of the last iterations counts."""
        rows = list(self.recent) if blocks == 1 else [each.levels for each in list(self.blocks)[-blocks:]]
        columns = enumerate(zip(*rows, strict=True))
        return {replica: of for replica, of in columns if min(of) > 1.0 + NEARLY or max(of) < 1.0 - NEARLY}

    def variances(self) -> list[float]:
        """Return the variance of each replica's ratio from one iteration to the next: a change of speed counts once."""
        count = 2 * RECENT * len(self.blocks)
        return [math.fsum(column) / count for column in zip(*(each.steps for each in self.blocks), strict=True)]

    def errors(self, blocks: int) -> list[float]:
        """Return the standard error of each replica's levels: by the replica's own variance or the common one,
        whichever is larger, and by the drift of levels before these blocks, since noise also comes in runs."""
        variances, count = self.variances(), blocks * RECENT
        common, drift = math.fsum(variances) / len(variances), self._drift(blocks)
        return [max(math.sqrt(max(own, common) / count), drift) for own in variances]

    def _drift(self, blocks: int) -> float:
        """Return the standard deviation of a typical replica's levels before the last blocks. 0 until enough is
        known."""
        past = list(self.blocks)[:-blocks]
        if len(past) < LEVELS:
            return 0.0
        return median(map(_deviation, zip(*(each.levels for each in past), strict=True)))


def _divide(numbers: Sequence[float], divisors: Sequence[float]) -> list[float]:
    return [number / divisor for number, divisor in zip(numbers, divisors, strict=True)]


def _over_middle(numbers: Sequence[float]) -> list[float]:
    middle = median_low(numbers)
    return [number / middle for number in numbers]


def _deviation(numbers: Sequence[float]) -> float:
    mean = math.fsum(numbers) / len(numbers)
    return math.sqrt(math.fsum((number - mean) * (number - mean) for number in numbers) / (len(numbers) - 1))


class Shares:
    """The shares of all replicas in the present generation. In each iteration: :meth:`begin_iteration`, :meth:`dealt`,
    then :meth:`statement` and :meth:`take_statements` with the commit."""

    def __init__(self, mode: Mode = Mode.SPEED, lanes: int = 1, schedule: Schedule | None = None):
        self.mode, self._lanes, self._schedule = mode, lanes, schedule or Schedule()
        self._at = (-1, 0)
        self._forget()

    def _forget(self) -> None:
        replicas = self._at[1]
        self._rounds, self._tokens = Series(replicas), Series(replicas)
        self._usual = 0.0  # seconds of a round
        self._paces = [1.0] * replicas
        self._heard = 0  # iterations of this generation
        self._mark = 0  # a checksum of all that was heard
        self._broken = False
        self.changes = 0
        """Changes of the shares in this generation."""

    def begin_iteration(self, generation: int, replicas: int) -> None:
        """Begin an iteration. A new generation begins with equal shares, since its newcomers have heard nothing."""
        if self._at != (generation, replicas):
            self._at = generation, replicas
            self._forget()

    @property
    def numbers(self) -> int:
        """The count of numbers that each rank tells."""
        return 2 + 2 * self._at[1]

    @property
    def paces(self) -> list[float]:
        """The pace of each replica: 1 for a usual one, 2 for one that takes twice as long."""
        return list(self._paces)

    def dealt(self, total: int) -> tuple[int, ...]:
        """Return the rounds of each replica in an iteration of `total` micro-batches; empty for an equal deal."""
        rounds = self._of(total)
        if rounds < len(self._paces) or all(pace == 1.0 for pace in self._paces):
            return ()
        return tuple(best(rounds, self._paces, self._schedule))

    def _of(self, total: int) -> int:
        return -(-total // self._lanes)

    # ------------------------------------------------------------ with the commit
    def statement(self, replica: int, measured: Measurement | None) -> list[float]:
        """Return what this rank tells: numbers whose maximum over all members :meth:`take_statements` gets. measured:
        nothing if the iteration was disturbed, or the replica had no share."""
        replicas = self._at[1]
        mark = float(self._mark) if self.mode is Mode.SPEED and not self._broken else -1.0
        numbers = [mark, -mark, *[UNKNOWN] * (2 * replicas)]
        if measured is not None:
            numbers[2 + replica], numbers[2 + replicas + replica] = measured
        return numbers

    def take_statements(self, numbers: Sequence[float], total: int) -> None:
        """Take in the maximum of what all members tell. total: micro-batches of the iteration."""
        replicas = self._at[1]
        if numbers[0] != -numbers[1] or numbers[0] < 0:  # not all by speed, or not all of one past
            self._paces, self._broken = [1.0] * replicas, True
            return
        self._mark = zlib.crc32(struct.pack(f"<{len(numbers)}d", *numbers), self._mark)
        self._heard += 1
        seconds, tokens = list(numbers[2 : 2 + replicas]), numbers[2 + replicas :]
        if replicas < 2 or self._heard <= WARM_UP or min(seconds) <= 0.0 or not max(seconds) < math.inf:
            return
        self._usual = self._rounds.add(seconds, self._paces)
        if min(tokens) > 0.0:
            self._tokens.add(_divide(seconds, tokens), self._paces)
        else:
            self._tokens = Series(replicas)
        rounds = self._of(total)
        if rounds >= replicas and self._worth_a_look():
            self._decide(rounds)

    def _worth_a_look(self) -> bool:
        """Whether a comparison with all that is remembered is worth its time."""
        both = [series for series in (self._rounds, self._tokens) if series.ready]
        return bool(both) and (self._heard % RECENT == 0 or any(series.outliers(1) for series in both))

    def _decide(self, rounds: int) -> None:
        series = self._steadier()
        sure, likely = self._compare(series)
        if sure == self._paces:
            return
        now, schedule = self._in_rounds(rounds), self._schedule
        before, after = (slowest(shares, sure, schedule) for shares in (now, best(rounds, sure, schedule)))
        least = LEAST_GAIN * (1.0 + CAUTION / (len(series.blocks) * RECENT))
        if before >= after * (1.0 + least) and (before - after) * self._usual >= LEAST_SECONDS:
            self._turn_to(likely, rounds)

    def _steadier(self) -> Series:
        """Return the series that varies less. Where lengths vary, that is mostly the time for a token; but
        micro-batches that are filled up to a length take the same time, however few of their tokens count."""
        if len(self._tokens.blocks) < len(self._rounds.blocks):
            return self._rounds
        return min(self._rounds, self._tokens, key=lambda series: math.fsum(series.variances()))

    def _compare(self, series: Series) -> tuple[list[float], list[float]]:
        """Return each replica's pace as far as it is sure, and its most likely one. One that may be usual again is."""
        furthest, sure, likely = [1.0] * len(self._paces), list(self._paces), list(self._paces)
        for blocks in (each for each in BLOCKS if each <= max(1, series.present)):
            moved = series.outliers(blocks)
            errors = series.errors(blocks) if moved else []
            for replica, levels in moved.items():
                chance = ERRORS * errors[replica]
                ratio = _sure(min(levels), max(levels), chance)
                if abs(ratio - 1.0) > abs(furthest[replica] - 1.0):
                    pace, furthest[replica] = self._paces[replica] * median(levels), ratio
                    usual = abs(pace - 1.0) <= max(NEARLY, chance)
                    sure[replica] = 1.0 if usual else self._paces[replica] * ratio
                    likely[replica] = 1.0 if usual else pace
        return sure, likely

    def _in_rounds(self, rounds: int) -> list[int]:
        """Return the present shares of so many rounds."""
        return list(self.dealt(rounds * self._lanes) or equal(rounds, len(self._paces)))

    def _turn_to(self, likely: list[float], rounds: int) -> None:
        before, old = self._in_rounds(rounds), self._paces
        self._paces = _over_middle(likely)
        if self._in_rounds(rounds) == before:
            self._paces = old
            return
        self.changes += 1
        for series in (self._rounds, self._tokens):
            series.begin_paces()


def _sure(least: float, most: float, chance: float) -> float:
    """Return the part of a ratio's deviation from 1 that is no chance: it was there all the time."""
    if least > 1.0:
        return max(1.0, least - chance)
    return min(1.0, most + chance) if most < 1.0 else 1.0
