"""The begin of a rank's process."""

from __future__ import annotations

import pytest

import unicron
from unicron_transition.seams.table import UnsupportedLayout


def test_a_script_with_another_layout_than_the_job_runs_in_ends_with_one_line(monkeypatch, snapshot):
    monkeypatch.setenv("UNICRON_LAYOUT", "TP2 PP2")
    with pytest.raises(UnsupportedLayout) as error:
        unicron.init_process_group("gloo", unicron.Layout(tensor=2))
    assert str(error.value) == snapshot
