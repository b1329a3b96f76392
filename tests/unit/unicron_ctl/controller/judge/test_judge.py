"""Each kind of finding has a judge: one without would set its job aside."""

from __future__ import annotations

from unicron_ctl.controller.judge.judge import JUDGES
from unicron_ctl.controller.model.finding import What


def test_every_kind_of_finding_has_a_judge() -> None:
    assert set(JUDGES) == set(What)
