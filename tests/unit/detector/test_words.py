"""Counts in texts for people."""

from __future__ import annotations

from unicron_detector.words import all_of, plural


def test_one_and_many() -> None:
    assert [plural(count, "node") for count in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]
    assert [all_of(count, "member", "run") for count in (1, 2)] == ["its only member runs", "all 2 members run"]
