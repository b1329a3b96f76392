"""One rank's part in the shares by speed: it measures its pace, tells it with the commit, and takes its share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from unicron_transition.generations.layout import deal
from unicron_transition.iteration.ledger import Ledger
from unicron_transition.iteration.rank_log import inform
from unicron_transition.iteration.shares import UNKNOWN, Measurement, Schedule, Shares, chosen_mode
from unicron_transition.session.member import Member

MOST_REPLICAS = 1024  # whose paces are told: those of 16,384 are 262 KB for each of 14 messages in every iteration


class Stopwatch:
    """Measures a piece of work: where there is a CUDA device by its stream, since calls return before it is done."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._events = [self._mark()] if torch.cuda.is_initialized() else []
        self._seconds = math.nan

    @staticmethod
    def _mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> None:
        """Note the end of the work, which the device may not have reached."""
        self._seconds = time.perf_counter() - self._began
        if self._events:
            self._events.append(self._mark())

    @property
    def seconds(self) -> float:
        """The time that it took. Waits for the device."""
        if not self._events:
            return self._seconds
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


class Pacing:
    """The pace and the share of one rank."""

    def __init__(self, member: Member, group: int):
        """group: rounds that a virtual pipeline computes together."""
        self._member, self._lanes = member, member.layout.lanes
        self._schedule = Schedule(member.layout.pipeline, group)
        self._shares = Shares(chosen_mode(), self._lanes, self._schedule)
        self._watch: Stopwatch | None = None
        self._rounds = 0  # that it measures
        self._at = (-1, 0)  # generation and micro-batches of the last share by speed

    def _begin_iteration(self) -> None:
        self._shares.begin_iteration(self._member.generation, self._member.replicas)

    def deal(self, total: int) -> list[int]:
        """Return this rank's micro-batches of an iteration that no plan has dealt."""
        self._begin_iteration()
        shares = self._shares.dealt(total)
        dealt = deal(total, self._member.replicas, self._member.replica, self._lanes, shares)
        self._at = (self._member.generation, len(dealt)) if shares else (-1, 0)
        return dealt

    @property
    def share(self) -> int:
        """The micro-batches that this rank's replica gets by its speed; 0 in an equal deal."""
        generation, share = self._at
        return share if generation == self._member.generation else 0

    def compute(self, ledger: Ledger, compute: Callable[[Ledger], None]) -> None:
        """Measure the computing of all that the ledger owes."""
        self._watch, self._rounds = None, -(-len(ledger.todo()) // self._lanes)
        watch = Stopwatch()
        compute(ledger)
        watch.stop()
        self._watch = watch

    @property
    def _tells(self) -> bool:
        return 1 < self._member.replicas <= MOST_REPLICAS

    def statement(self, ledger: Ledger) -> list[float]:
        """Return what this rank tells with the commit: as many numbers in all members."""
        self._begin_iteration()
        if not self._tells:
            return []
        watch, self._watch = self._watch, None
        measured = None
        if watch is not None and self._rounds:
            measured = Measurement(watch.seconds / self._schedule.rounds(self._rounds), self._tokens(ledger))
        return self._shares.statement(self._member.replica, measured)

    def _tokens(self, ledger: Ledger) -> float:
        """Return the tokens of a round, if the loss is per token and this rank knows them."""
        known = {index: loss.tokens for index, loss in ledger.shared.items()} or ledger.tokens
        counts = [count for index in ledger.done if (count := known.get(index)) is not None]
        rounds = -(-len(ledger.done) // self._lanes)
        return math.fsum(map(float, counts)) / rounds if counts and len(counts) == len(ledger.done) else UNKNOWN

    def take_statements(self, numbers: tuple[float, ...], total: int) -> tuple[float, ...]:
        """Take in what all members have told, and return the rest of it. total: micro-batches of the iteration."""
        if not numbers or not self._tells:
            return numbers
        count = self._shares.numbers
        changes = self._shares.changes
        self._shares.take_statements(numbers[:count], total)
        if self._shares.changes != changes and self._member.replica == 0 and self._is_head:
            inform(self._text(total))
        return numbers[count:]

    @property
    def _is_head(self) -> bool:
        return self._member.slot == self._member.members[0]

    def _text(self, total: int) -> str:
        size, members = self._member.layout.size, self._member.members
        unusual = [(pace, replica) for replica, pace in enumerate(self._shares.paces) if pace != 1.0]
        shares = self._shares.dealt(total)
        if not shares or not unusual:
            return "all replicas are about as fast again: equal shares"
        most = sorted(unusual, reverse=True)[:8]
        named = ", ".join(f"slot {members[replica * size]} {pace:.2f}x ({shares[replica]})" for pace, replica in most)
        others = f"{min(shares)} to {max(shares)} rounds each"
        return f"shares by speed, time of a round over the usual one (rounds from now on): {named}; all: {others}"
