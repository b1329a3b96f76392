"""What the ranks of one job say together about an iteration that was no step."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from unicron_transition.iteration.ledger import Ledger
from unicron_transition.session.checks import CorruptState
from unicron_transition.session.trials import OnBadBatch, Trials

TOTAL, SIZE = 4, 2  # micro-batches; ranks of a replica


class _Rank:
    """A rank of two replicas with shards. norm: of its part of the reduced gradient."""

    def __init__(self, slot: int):
        self.ledger = Ledger(7, TOTAL, [], done=[index for index in range(TOTAL) if index % 2 == slot // SIZE])
        self.norm = self.own = 1.0
        self.notes = []
        layout = SimpleNamespace(size=SIZE, lanes=1)
        self.member = SimpleNamespace(
            slot=slot, members=list(range(4)), replicas=2, replica=slot // SIZE, layout=layout, note=None, publish=print
        )
        gradients = SimpleNamespace(norm=lambda: self.norm, own_norm=lambda: self.own)
        self.heard = []
        exchange = SimpleNamespace(most=lambda numbers: self.heard)
        self.trials = Trials(self.member, exchange, gradients, None, OnBadBatch.END, False)  # type: ignore[arg-type]

    def tell(self):
        told = []
        self.trials._exchange.most = lambda numbers: told.extend(numbers) or 1 / 0
        with pytest.raises(ZeroDivisionError):
            self.trials.retry(self.ledger, self.trials.marks(self.ledger, True), 2.0)
        self.trials._exchange.most = lambda numbers: self.heard
        return told


@pytest.mark.parametrize("place", range(SIZE))
def test_a_number_that_only_one_shard_has_names_its_replica(place):
    ranks = [_Rank(slot) for slot in range(4)]
    for slot in (place, SIZE + place):  # the reduce spreads it to the ranks at the same place
        ranks[slot].norm = math.nan
    ranks[SIZE + place].own = math.nan
    for rank in ranks:
        rank.trials.note_reduced(2.0)
    assert try_again(ranks) == [("UnsoundRank", SIZE)]


def try_again(ranks):
    """All try again, and succeed; returns what they note."""
    heard = [max(row) for row in zip(*(rank.tell() for rank in ranks), strict=True)]
    for rank in ranks:
        rank.heard = heard
        rank.trials.retry(rank.ledger, rank.trials.marks(rank.ledger, True), 2.0)
        rank.norm = rank.own = 1.0
        rank.trials.note_reduced(2.0)
        rank.trials.settle_iteration(rank.ledger)
    return [(rank.member.note.type, rank.member.note.culprit) for rank in ranks if rank.member.note is not None]


def test_several_culprits_are_named_by_several_ranks():
    ranks = [_Rank(slot) for slot in range(4)]
    for rank in ranks:
        rank.norm = rank.own = math.nan
        rank.trials.note_reduced(2.0)
    assert sorted(try_again(ranks)) == [("UnsoundRank", 0), ("UnsoundRank", SIZE)]


def test_all_go_back_if_the_parameters_of_one_replica_are_not_finite():
    rank = _Rank(2)
    rank.norm = rank.own = math.nan
    parameters = [torch.ones(3), torch.tensor([1.0, math.inf])]
    rank.trials._state = SimpleNamespace(trees=[SimpleNamespace(parameters=parameters)])
    rank.trials._exchange.most = list  # nobody else says anything
    rank.trials.can_go_back = lambda: True
    rank.trials.note_reduced(2.0)
    with pytest.raises(CorruptState) as raised:
        rank.trials.retry(rank.ledger, rank.trials.marks(rank.ledger, True), 2.0)
    assert (raised.value.verdict.what, raised.value.verdict.culprits) == ("number", {1})


@pytest.mark.parametrize(("after", "told"), [(1.0, True), (9e8, False)], ids=["another gradient", "the same one"])
def test_a_sum_that_was_unsound_without_an_unsound_rank_is_told(after, told):
    norms = iter([*[1.0] * 20, 1e9, after])
    gradients = SimpleNamespace(norm=lambda: next(norms), own_norm=lambda: 1.0)
    member = SimpleNamespace(replicas=2, replica=0, slot=0, members=[0, 1], note=None, layout=SimpleNamespace(size=1))
    member.publish = lambda state: None
    exchange, state = SimpleNamespace(most=lambda numbers: numbers), SimpleNamespace(tensors=lambda: [], model=[])
    trials = Trials(member, exchange, gradients, state, OnBadBatch.END, False)  # type: ignore[arg-type]
    ledger = Ledger(5, 2, [0])
    for _ in range(20):
        trials.note_reduced(1.0)
        trials.settle_iteration(ledger)
    trials.note_reduced(1.0)
    assert trials.unsound
    trials.retry(ledger, trials.marks(ledger, kept=True), 1.0)
    trials.note_reduced(1.0)
    assert not trials.unsound and member.note is None
    trials.settle_iteration(ledger)
    assert (member.note is not None) == told
    if told:
        assert member.note.type == "SilentCorruption" and member.note.culprit is None
        assert "the sum of the gradients of iteration 5 was not sound" in member.note.text
