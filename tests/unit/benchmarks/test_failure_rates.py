"""The useful share of a job that fails often, from the times of one failure."""

from __future__ import annotations

import pytest

from benchmarks.cases import failure_rates
from benchmarks.cases.failure_rates import Recovery, share
from benchmarks.report import Report


@pytest.mark.parametrize(
    ("recovery", "seconds", "useful"),
    [
        (Recovery(2.0), 10.0, 8.0),
        (Recovery(2.0), 1.0, 0.0),
        (Recovery(2.0, 6.0, 0.5), 10.0, 6.0),
        (Recovery(2.0, 6.0, 0.5), 4.0, 1.0),
        (Recovery(2.0, again=3.0), 10.0, 5.0),
        (Recovery(2.0, again=3.0), 4.0, -1.0),
    ],
)
def test_a_spell_is_useful_but_for_the_pause_the_missing_ranks_and_what_is_repeated(recovery, seconds, useful) -> None:
    assert recovery.useful(seconds) == pytest.approx(useful)


def test_the_share_is_that_of_the_closed_form_and_falls_with_the_rate() -> None:
    """Of exponential spells of mean m, exp(-p/m) is after a pause p."""
    assert share(Recovery(0.0), 60.0, 100) == 1.0
    assert share(Recovery(30.0), 60.0, 100_000) == pytest.approx(0.6065, abs=0.01)
    assert share(Recovery(30.0), 60.0, 5000) < share(Recovery(30.0), 600.0, 5000)


def test_the_case_compares_a_session_with_a_restart() -> None:
    report = Report("failure_rates", failure_rates.SMALLEST)
    failure_rates.measure(failure_rates.Sizes(minutes=1.0, failures=5000), report)
    ours, ratio, lost, every = (figure.value for figure in report.figures)
    assert 0.98 < ours < 0.99 and 2.0 < ratio < 3.0 and lost > 20 and 0.2 < every < 1.0
