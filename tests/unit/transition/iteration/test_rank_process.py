"""The start of a rank's process."""

from __future__ import annotations

import unicron
from tests.support.texts import raises_text
from unicron_transition.seams.table import UnsupportedLayout


def test_a_script_with_another_layout_than_the_job_runs_in_ends_with_one_line(monkeypatch, snapshot):
    monkeypatch.setenv("UNICRON_LAYOUT", "TP2 PP2")
    with raises_text(UnsupportedLayout, snapshot):
        unicron.init_process_group("gloo", unicron.Layout(tensor=2))
