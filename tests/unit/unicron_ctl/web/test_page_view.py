"""What the page shows of a node."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from unicron_ctl.web import page_view


@pytest.mark.parametrize("words", ["IDLE DRAIN", "MIXED FAIL", "DOWN", "IDLE BLOCKED"])
def test_the_pages_map_draws_nodes_by_the_table(words: str) -> None:
    look = page_view._look_of(SimpleNamespace(states=words.split(), healthy=False), [], set())
    assert look == ("drained" if words in ("IDLE DRAIN", "MIXED FAIL") else "down")
