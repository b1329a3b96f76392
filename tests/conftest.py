"""For all tests: Hypothesis tries the same cases on every machine, and a busy one is no failure."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("unicron", deadline=None, derandomize=True)
settings.load_profile("unicron")


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pytest's own has the test's name in it: with that of a worker before it, too long for the path of a socket."""
    return tmp_path_factory.mktemp("t")
