"""Figures beside their goals, and the commit at which they are taken."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.report import Figure, quartiles, relative_difference, turns


@pytest.mark.parametrize("missing", ["git", "checkout"])
def test_without_git_or_a_checkout_the_commit_is_unknown(missing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if missing == "git":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setattr(report, "ROOT", tmp_path)
    assert report.commit.__wrapped__() == "unknown"


@pytest.mark.parametrize(
    ("figure", "met", "goal"),
    [
        (Figure("a", 1.0, "s"), True, ""),
        (Figure("a", 1.0, "s", most=1.0), True, "goal: <= 1 s"),
        (Figure("a", 1.1, "s", most=1.0), False, "goal: <= 1 s"),
        (Figure("a", 0.5, "x", least=0.7), False, "goal: >= 0.7 x"),
        (Figure("a", math.nan, "s", most=1.0), False, "goal: <= 1 s"),
    ],
)
def test_a_figure_meets_its_goal_or_says_that_it_missed_it(figure: Figure, met: bool, goal: str):
    assert (figure.met, figure.goal) == (met, goal)
    assert figure.line().endswith("MISSED") is not met


@pytest.mark.parametrize(
    ("loss", "reference", "difference"), [(2.0, 2.0, 0.0), (3.0, 2.0, 0.5), (0.5, 0.0, 0.5), (math.nan, 2.0, math.inf)]
)
def test_a_loss_that_is_no_number_is_no_match(loss, reference, difference):
    assert relative_difference(loss, reference) == difference


def test_pairs_take_turns_and_their_ratios_are_those_of_neighbours():
    assert [turns(number, "a", "b") for number in range(3)] == [("a", "b"), ("b", "a"), ("a", "b")]
    assert quartiles([2.0, 6.0, 3.0], [1.0, 2.0, 3.0]) == (1.0, 2.0, 3.0)
