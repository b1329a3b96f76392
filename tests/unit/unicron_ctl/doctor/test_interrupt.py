"""An interrupt of `unicronctl doctor --nodes`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.hanging_sruns import Sruns
from unicron_ctl.doctor import on_nodes
from unicron_ctl.doctor.facts import COMPUTE, Question


def test_it_ends_all_sruns_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sruns = Sruns(tmp_path)
    asking = on_nodes.Asking(Question(role=COMPUTE), on_nodes.Wish(("doctor",)), sruns.environment, None)
    ask = asking._step

    def step(partition: str, names: list[str], doors: ThreadPoolExecutor) -> None:
        sruns.interrupt_if(partition == "first")
        ask(partition, names, doors)

    monkeypatch.setattr(asking, "_step", step)
    sruns.all_end(lambda: asking.run([("first", []), ("gpu", ["n1"]), ("cpu", ["n2"])]))
