"""Evaluations between two iterations: forward passes over other data, dealt among the replicas like micro-batches.

An evaluation changes no training state. So when a rank is lost, the survivors regroup and start the evaluation again at
the same iteration boundary. A rank that already has the mean loss may be in the next iteration by then; so the members
of a new generation first agree on who has the value of the last evaluation, and who still needs one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from unicron_transition.generations.layout import deal
from unicron_transition.iteration.accumulation import Accumulation, PeerLost
from unicron_transition.iteration.exchange import Exchange
from unicron_transition.iteration.ledger import Ledger

MOST = 1 << 10  # evaluations between the same two iterations
NONE = -1


class Evaluations:
    """The evaluations of one rank. A ticket numbers each of them: iteration boundary * MOST + part."""

    def __init__(self, exchange: Exchange, gradients: Accumulation, lost: Callable[[], bool], device: torch.device):
        self._exchange, self._gradients, self._lost, self._device = exchange, gradients, lost, device
        self.make_up: Callable[[int], None] | None = None
        """make_up(part) takes part in an evaluation that the others had begun before this rank joined: it calls
        `Session.evaluate` with that part. If it is None, as for a script that cannot do so, the evaluation is given
        up."""
        self._at_hand = NONE  # ticket of the evaluation that this rank is in
        self._known = NONE  # ticket of the last one whose value this rank has
        self._returned = NONE  # ticket of the last one whose value the script got
        self._value = math.nan  # of the evaluation `_known`
        self._due: int | None = None  # the part that this rank still has to take part in

    @property
    def running(self) -> bool:
        """Whether this rank is in an evaluation and has no value yet."""
        return self._at_hand > self._known

    def begin_part(self, boundary: int, part: int) -> None:
        """Begin an evaluation. Raises ValueError for a part that this boundary has had already."""
        ticket = boundary * MOST + part
        if not 0 <= part < MOST or ticket <= self._returned:
            raise ValueError(
                f"part {part} of the evaluations before iteration {boundary} is over, or out of 0 to {MOST - 1}: give "
                "each evaluation between the same two iterations a part of its own, in rising order"
            )
        self._at_hand = ticket

    def end(self) -> float | None:
        """End the evaluation, and return its value; None if it was given up."""
        ticket, self._at_hand = self._at_hand, NONE
        if ticket == NONE:
            return None
        self._returned = ticket
        return self._value

    def compute(
        self, fetch: Callable[[int, int], object], total: int, replicas: int, replica: int, lanes: int = 1
    ) -> None:
        """Compute this replica's share of `total` micro-batches, and the mean of all. Collective over the members.
        Raises RuntimeError or PeerLost if a peer is gone."""
        indices = deal(total, replicas, replica, lanes)
        proof = torch.zeros(3, total, dtype=torch.float64)
        losses, weights, counts = proof
        results = self._gradients.evaluate(self._at_hand // MOST, indices, fetch)
        for index in indices:
            counts[index] = 1
            if index in results:
                loss, weight = results[index]
                losses[index], weights[index] = loss.double().cpu(), float(weight)
        total_sum = self._exchange.begin_sum(proof.to(self._device))
        losses, weights, counts = total_sum.finish().cpu()
        total_sum.check()
        Ledger.check_counts(self._at_hand // MOST, counts.round().long().tolist())
        mean = float(losses.sum()) / max(float(weights.sum()), 1.0)
        value = self._exchange.from_last_stage(mean)
        if self._lost():
            raise PeerLost("the generation ended in an evaluation")
        self._known, self._value = self._at_hand, value

    def agree(self, boundary: int, came_new: bool) -> None:
        """Agree on the evaluations with the members of a generation that follows a loss; collective. boundary: the
        iteration that this rank is in or begins. came_new: this rank has no part of that iteration."""
        if came_new:
            self._returned = NONE
        if self._known // MOST > boundary:  # of a state that was given up
            self._known = NONE
        outsider = came_new and not self.running
        wanted = self._at_hand if self.running and self._at_hand // MOST == boundary else NONE
        if self.running and wanted == NONE:  # the job went back to an earlier state
            self._at_hand = NONE
        known, last, unable = self._exchange.most([self._known, wanted, float(outsider and self.make_up is None)])
        if known > NONE:
            self._take_value(int(known))
        if last <= known:
            return
        if unable:
            self._at_hand = NONE
        elif outsider and last // MOST == boundary:
            self._known, self._due = max(self._known, int(last) - 1), int(last) % MOST

    def _take_value(self, known: int) -> None:
        mine = self._value if self._known == known else 0.0
        finite = math.isfinite(mine) and self._known == known
        value, bad = self._exchange.most([mine if finite else -math.inf, float(not math.isfinite(mine))])
        if self._known < known:
            self._known, self._value = known, math.nan if bad else value

    def catch_up(self) -> None:
        """Take part in the evaluation that the others had begun before this rank joined."""
        while self._due is not None and self.make_up is not None:
            part, self._due = self._due, None
            self.make_up(part)
