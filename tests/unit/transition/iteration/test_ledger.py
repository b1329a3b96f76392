"""The ledger: each micro-batch in exactly one gradient, whatever is reassigned when."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unicron_transition.generations.layout import deal
from unicron_transition.iteration.ledger import Ledger, LedgerError, Loss, hear_parts, tell_parts


@given(st.integers(0, 60), st.integers(1, 9))
def test_dealing_is_a_partition_that_differs_by_one_at_most(total, replicas):
    dealt = [deal(total, replicas, replica) for replica in range(replicas)]
    assert sorted(index for indices in dealt for index in indices) == list(range(total))
    sizes = [len(indices) for indices in dealt]
    assert max(sizes) - min(sizes) <= 1


@given(st.data())
def test_any_history_of_losses_counts_every_micro_batch_once(data):
    """Ranks finish some of what they owe, one is lost, the rest is dealt again, until one has finished everything."""
    total = data.draw(st.integers(1, 20))
    members = list(range(data.draw(st.integers(1, 5))))
    ledgers = {slot: Ledger(0, total, deal(total, len(members), slot)) for slot in members}
    while True:
        for ledger in ledgers.values():
            for index in ledger.todo()[: data.draw(st.integers(0, total))]:
                ledger.finish(index)
        if len(ledgers) == 1:
            break
        del ledgers[data.draw(st.sampled_from(sorted(ledgers)))]
        kept = {index for ledger in ledgers.values() for index in ledger.done}
        rest = [index for index in range(total) if index not in kept]
        for place, ledger in enumerate(ledgers.values()):
            ledger.reassign([*ledger.done, *rest[place :: len(ledgers)]])
    (last,) = ledgers.values()
    for index in last.todo():
        last.finish(index)
    assert sorted(last.done) == list(range(total)) and last.computed == last.done and last.todo() == []
    Ledger.check_counts(0, [last.done.count(index) for index in range(total)])


@given(st.lists(st.integers(0, 3), max_size=8))
def test_counts_other_than_one_stop_the_step(counts):
    wrong = {index: count for index, count in enumerate(counts) if count != 1}
    if not wrong:
        Ledger.check_counts(7, counts)
        return
    with pytest.raises(LedgerError, match="iteration 7") as caught:
        Ledger.check_counts(7, counts)
    assert str(wrong) in str(caught.value)


def test_what_is_finished_is_never_owed_again():
    ledger = Ledger(3, 4, [0, 2])
    ledger.finish(2)
    assert ledger.todo() == [0]
    for index in (2, 1):  # again, and another rank's
        with pytest.raises(LedgerError, match="not owed"):
            ledger.finish(index)
    with pytest.raises(LedgerError, match=r"drops finished micro-batches \[2\]"):
        ledger.reassign([0, 1])
    assert ledger.assigned == [0, 2] and ledger.done == [2]
    ledger.reassign([2, 0, 1])
    assert ledger.todo() == [0, 1]


def test_a_signature_tells_sets_of_micro_batches_apart():
    assert Ledger.signature([3, 1]) == Ledger.signature([1, 3])
    assert len({Ledger.signature(done) for done in ([1, 3], [1], [13], [], None)}) == 5


def test_the_proof_has_only_what_is_in_the_gradient():
    ledger = Ledger(3, 4, [0, 2], done=[2], losses={0: torch.tensor(5.0), 2: torch.tensor(1.25)})
    assert ledger.proof(True) == ([0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 1.25, 0], [0, 0, 0, 0])
    ledger.done, ledger.tokens = [2, 0], {0: torch.tensor(7), 2: None}
    assert ledger.proof(False) == ([1, 0, 1, 0], [0, 0, 0, 0], [5, 0, 1.25, 0], [7, 0, 0, 0])
    ledger.drop()
    assert ledger.proof(False) == ([0] * 4, [0] * 4, [0.0] * 4, [0.0] * 4)


LOSSES = st.floats(-1e6, 1e6) | st.sampled_from([math.inf, -math.inf, math.nan])


@given(st.lists(st.tuples(LOSSES, st.integers(0, 9)), max_size=6), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_the_ranks_of_a_replica_tell_each_other_the_losses_of_their_lanes_and_parts(losses, lanes, parts, mean):
    """Each rank knows every lanes-th micro-batch, and of that a part of the sequence."""
    indices = list(range(len(losses)))

    def of(index: int, part: int) -> Loss:
        loss, tokens = losses[index]
        return Loss(loss + part, None if mean else tokens)

    told = [
        tell_parts({index: of(index, part) for index in indices[lane::lanes]}, indices, parts, part)
        for lane in range(lanes)
        for part in range(parts)
    ]
    heard = hear_parts([max(each) for each in zip(*told, strict=True)], indices, parts)
    for index in indices:
        every = [of(index, part) for part in range(parts)]
        loss = sum(each.loss for each in every) / (parts if mean else 1)
        assert heard[index].loss == pytest.approx(loss if math.isfinite(loss) else math.nan, nan_ok=True)
        assert heard[index].tokens == (None if mean else sum(each.tokens for each in every))


def test_a_loss_that_no_rank_of_the_replica_knows_is_an_error():
    with pytest.raises(LedgerError, match="no rank of the replica has computed micro-batch 3, or a part of it"):
        hear_parts(tell_parts({3: Loss(1.0, None)}, [3], 2, 0), [3], 2)
