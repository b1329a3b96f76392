"""Texts for people before they are compared with those in tests/texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion


def masked(text: str, folder: Path) -> str:
    """The test's own folder has another name in each run, and a line's time is another one."""
    return re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", "TIME", text.replace(str(folder), "FOLDER"))


@contextmanager
def raises_text(
    error: type[BaseException], snapshot: SnapshotAssertion, folder: Path | None = None
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """The block raises this error, whose whole text is the one that is kept."""
    with pytest.raises(error) as caught:
        yield caught
    text = str(caught.value)
    assert (masked(text, folder) if folder else text) == snapshot
