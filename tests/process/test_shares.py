"""A rank that becomes slow gets fewer micro-batches. Real ranks, ZeroMQ and gloo."""

from __future__ import annotations

import pytest

from tests.support import proof
from tests.support.processes import ROOT
from tests.support.rank_harness import Ranks
from tests.support.slowed import Slow, SlowedRanks

pytestmark = pytest.mark.process
SCRIPT = ROOT / "tests" / "support" / "tiny_plain.py"
SIZE, TOTAL, ITERATIONS = 4, 16, 60  # on a busy machine it takes many until the noise is known
SETTINGS = {
    "TINY_SCRIPT": str(SCRIPT),
    "TINY_ITERATIONS": str(ITERATIONS),
    "TINY_MICRO_BATCHES": str(TOTAL),
    "TINY_OPTIMIZER": "sgd",
    "TINY_SAVE": "0",
}
LOSSES = 1e-7  # relative


def test_a_slow_rank_gets_less_and_the_losses_stay(tmp_path):
    usual, slow = tmp_path / "usual", tmp_path / "slow"
    usual.mkdir()
    slow.mkdir()
    reference = Ranks(usual, SIZE, [], fork=True, UNICRON_SHARES="equal", **SETTINGS)
    reference.drive()
    ranks = SlowedRanks(slow, SIZE, [Slow(slot=1, after=3, factor=4.0)], TINY_SLOW="0.02", **SETTINGS)
    ranks.drive()
    proof.exactly_once(ranks, ITERATIONS, total=TOTAL)
    assert not ranks.breaks and {code for codes in ranks.exits.values() for code in codes} == {0}
    assert ranks.share(1, 3) == TOTAL // SIZE, "equal shares before"
    uneven = [at for at in range(ITERATIONS) if ranks.share(1, at) < TOTAL // SIZE < ranks.share(0, at)]
    assert uneven, "it got less, and the others more"
    last = ranks.share(1, ITERATIONS - 1) if ITERATIONS - 1 in uneven else 0
    assert not last or ranks.ranks[1].status.share == last, "the controller must know what it has"
    proof.same_losses(slow, usual, LOSSES)
