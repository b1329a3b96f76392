"""The table of `unicronctl pair-test` on a terminal."""

from __future__ import annotations

import pytest

from tests.support.listings import fits, on_a_terminal, printed
from unicron_ctl.shared.slurm.pairs import Findings, PairTest
from unicron_ctl.shared.system.columns import show
from unicron_ctl.tools import pair_test


def test_it_fits_80_columns_and_nothing_that_matters_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch)
    reason = "gpu-a-0117 did not answer in 15 s, " * 4
    test = PairTest(1, ("gpu-a-0117", "gpu-a-0118"), False, reason, "nccl", 123e9, 12e-6)
    shown = pair_test.table(Findings([test]))
    show([shown])
    fits([shown], printed(capsys))
