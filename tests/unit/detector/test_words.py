"""Counts in texts for people."""

from __future__ import annotations

from unicron_detector.words import all_of, number_spans, plural


def test_one_and_many() -> None:
    assert [plural(count, "node") for count in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]
    assert [all_of(count, "member", "run") for count in (1, 2)] == ["its only member runs", "all 2 members run"]


def test_numbers_in_a_row_are_one_span():
    assert number_spans("slot", [4]) == "slot 4" and number_spans("slot", [7, 5, 4, 6]) == "slots 4-7"
    assert number_spans("slot", [1, 4, 5]) == "slots 1, 4-5"
    assert number_spans("slot", range(0, 40, 2)) == "slots 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"
