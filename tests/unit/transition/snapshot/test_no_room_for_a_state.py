"""A process that gets no memory for what it loads keeps what it cannot load."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path

import pytest

from tests.support.kept import WRITER, kept, training
from unicron_transition.snapshot import parts
from unicron_transition.snapshot.image_format import inventory
from unicron_transition.snapshot.whole_state import Beginnings


class Full(mmap.mmap):
    """As with `ulimit -v`, or where the kernel promises no more than it has: an image fits, a chunk does not."""

    def __new__(cls, descriptor: int, length: int, *about: int, **more: int) -> Full:
        if descriptor == -1:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return super().__new__(cls, descriptor, length, *about, **more)


def test_a_sound_image_outlives_a_process_that_gets_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: it was removed as damaged."""
    kept(tmp_path, training(), 4)
    fresh = training(1)
    fresh.optimizer.state.clear()
    beginnings = Beginnings(tmp_path, None, 0, WRITER)
    monkeypatch.setattr(parts.mmap, "mmap", Full)
    with pytest.raises(Exception):  # noqa: B017  what it is called is not the matter here
        beginnings.take_up(fresh, None)
    assert [found.key.iteration for found in inventory(tmp_path)] == [4]
