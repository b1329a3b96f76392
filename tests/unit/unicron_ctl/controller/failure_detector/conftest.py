"""What the tests of the pure parts share."""

from __future__ import annotations

import pytest

from tests.support.suspects import Company


@pytest.fixture
def company() -> Company:
    return Company()
