"""What the tests of the pure parts share."""

from __future__ import annotations

import pytest

from tests.support.replays import replays  # noqa: F401
from tests.support.suspects import Company


@pytest.fixture
def company() -> Company:
    return Company()
