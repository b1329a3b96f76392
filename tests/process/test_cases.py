"""The cases of benchmarks that need real agents and ranks run at their smallest size: none has rotted."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.report import Report
from tests.support.processes import call

pytestmark = [pytest.mark.process, pytest.mark.wide]
NAMES = ("cost", "detection", "exactness", "memory", "recovery", "scale", "spares", "trace", "warm")


@pytest.mark.parametrize("name", NAMES)
def test_the_smallest_size_runs_to_its_end(name: str, tmp_path: Path) -> None:
    """Goals may be missed at this size; figures there are only at the end."""
    file = tmp_path / "figures.json"
    done = call(sys.executable, "-m", "benchmarks.cases", name, "--smallest", "--json", str(file), limit=1200)
    assert file.exists(), done.stderr[-3000:]
    assert msgspec.json.decode(file.read_bytes(), type=Report).figures
