"""The storms run to their end: the shortest row, and one change of leaders of a controller and its standby."""

from __future__ import annotations

import sys

import pytest

from tests.support.processes import call

LIMIT = 900.0
pytestmark = [pytest.mark.slurm, pytest.mark.wide, pytest.mark.timeout(LIMIT + 60)]


@pytest.mark.parametrize("words", [("storms", "--only", "head-3"), ("storms.standby", "--times", "1")], ids=" ".join)
def test_the_smallest_form_runs_to_its_end(words: tuple[str, ...]) -> None:
    """Times may be missed on a busy machine; the table is only at the end."""
    done = call(sys.executable, "-m", f"benchmarks.{words[0]}", *words[1:], limit=LIMIT)
    assert " passed" in done.stdout and "Error" not in done.stdout, f"{done.stdout}\n{done.stderr[-3000:]}"
