"""An interrupt of `unicronctl pair-test`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hanging_sruns import Sruns
from unicron_ctl.shared.slurm import pairs
from unicron_ctl.shared.slurm.slurm_client import NodeInfo


def test_it_ends_all_sruns_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sruns = Sruns(tmp_path)
    nodes = [NodeInfo(f"n{i}", frozenset({"IDLE"}), "", "ip", 1, 0.0, 4) for i in range(6)]
    runner = pairs.Runner(nodes, pairs.Wish(python="p"), sruns.environment, lambda text: None)
    test = runner._test

    def one(number: int, group: pairs.Group) -> pairs.Test:
        sruns.interrupt_if(group == ("n0", "n1"))
        return test(number, group)

    monkeypatch.setattr(runner, "_test", one)
    sruns.all_end(lambda: runner.wave(1, [("n0", "n1"), ("n2", "n3"), ("n4", "n5")]))
