"""The two-round paired test finds exactly the bad nodes and never condemns without proof."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from unicron_detector.health.pair_test import Outcome, first_round, judge, second_round, suspects


def test_runs(groups, bad, slow=()):
    failed = Outcome(False)
    return {
        group: failed if set(group) & set(bad) else Outcome(True, 3.0 if set(group) & set(slow) else 1.0)
        for group in groups
    }


test_runs.__test__ = False


def play(nodes, bad, slow=()):
    first = test_runs(first_round(nodes), bad, slow)
    waves = second_round(first)
    for wave in waves:
        used = [node for group in wave for node in group]
        assert len(used) == len(set(used))
    second = test_runs([group for wave in waves for group in wave], bad, slow)
    return judge(first, second)


@pytest.mark.parametrize(
    ("nodes", "broken", "bad", "good", "unknown"),
    [
        pytest.param("abcd", "", "", "abcd", "", id="all are good"),
        pytest.param("abcd", "b", "b", "acd", "", id="the partner is cleared"),
        pytest.param("ab", "b", "", "", "ab", id="two that fail together prove nothing"),
    ],
)
def test_the_bad_one_is_isolated_if_there_is_proof(nodes, broken, bad, good, unknown):
    found = play(list(nodes), bad=broken)
    assert ("".join(found.bad), "".join(found.good), "".join(found.unknown)) == (bad, good, unknown)
    assert all("beside" in reason for reason in found.bad.values())


def test_an_odd_node_becomes_a_third():
    assert first_round(["a", "b", "c"]) == [("a", "b", "c")]
    assert first_round(["a"]) == []


def test_without_a_good_pair_innocents_can_clear_each_other():
    found = play(["a", "b", "c", "d"], bad=["b", "d"])
    assert not found.bad or set(found.bad) <= {"b", "d"}
    assert not set(found.unknown) & set(found.good)


def test_a_slow_node_is_named_but_not_bad():
    nodes = [f"n{i}" for i in range(8)]
    found = play(nodes, bad=[], slow=["n5"])
    assert list(found.slow) == ["n5"] and not found.bad
    assert suspects(test_runs(first_round(nodes), [], ["n5"])) == ["n4", "n5"]


def test_a_node_named_twice_is_refused():
    with pytest.raises(ValueError, match="twice"):
        first_round(["a", "a"])


@settings(max_examples=cases(200), deadline=None)
@given(st.integers(2, 20), st.sets(st.integers(0, 19), max_size=8))
def test_only_bad_nodes_are_condemned_and_all_when_a_pair_passed(count, bad):
    nodes = [f"n{i:02}" for i in range(count)]
    bad = {f"n{i:02}" for i in bad if i < count}
    found = play(nodes, bad)
    assert set(found.bad) <= bad
    assert not set(found.good) & bad
    assert set(found.bad) | set(found.good) | set(found.unknown) >= set(nodes)
    if any(not set(group) & bad for group in first_round(nodes)):
        assert set(found.bad) == bad
        assert not found.unknown
