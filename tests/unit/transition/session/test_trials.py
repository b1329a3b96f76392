"""What a rank tells when an iteration is sound after another try."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from unicron_transition.iteration.ledger import Ledger
from unicron_transition.session.trials import OnBadBatch, Trials


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
        trials.settle(ledger)
    trials.note_reduced(1.0)
    assert trials.unsound
    trials.retry(ledger, trials.marks(ledger, kept=True), 1.0)
    trials.note_reduced(1.0)
    assert not trials.unsound and member.note is None
    trials.settle(ledger)
    assert (member.note is not None) == told
    if told:
        assert member.note.type == "SilentCorruption" and member.note.culprit is None
        assert "the sum of the gradients of iteration 5 was not sound" in member.note.text
