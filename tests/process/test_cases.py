"""Each case of benchmarks runs at its smallest size: none has rotted."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.cases.__main__ import NAMES
from benchmarks.report import Report
from tests.support.processes import call

LIMIT = 1200.0
pytestmark = [pytest.mark.process, pytest.mark.timeout(LIMIT + 60)]
SHORT = {
    "checkpoint_interval",
    "checkpoints",
    "detector",
    "failure_rates",
    "log_growth",
    "planner",
    "scale",
    "scrape",
    "slices",
}
"""Those that take some seconds; the others are for `make test-wide`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.wide) for name in NAMES]
)
def test_the_smallest_size_runs_to_its_end(name: str, tmp_path: Path) -> None:
    """Goals may be missed at this size; figures there are only at the end."""
    file = tmp_path / "figures.json"
    done = call(sys.executable, "-m", "benchmarks.cases", name, "--smallest", "--json", str(file), limit=LIMIT)
    assert file.exists(), f"{done.stdout}\n{done.stderr[-3000:]}"
    assert msgspec.json.decode(file.read_bytes(), type=Report).figures
