"""For all tests: Hypothesis tries the same cases on every machine, and a busy one is no failure. What shares a cluster
or a fixture of its module stays together when tests run side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("unicron", deadline=None, derandomize=True)
settings.load_profile("unicron")

TESTS = Path(__file__).resolve().parent
TIERS = ("slurm", "process", "unit")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Name each test's group for pytest-xdist, and put the longest groups first: all that runs on a Slurm, one after
    the other, then the modules of the processes' tier."""
    for item in items:
        path = item.path.relative_to(TESTS)
        item.add_marker(pytest.mark.xdist_group("slurm" if path.parts[0] == "slurm" else str(path)))
    items.sort(key=lambda item: TIERS.index(item.path.relative_to(TESTS).parts[0]))
