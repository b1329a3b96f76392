"""Which state is to stay in a node's memory until it lies in enough nodes (docs/design/memory.md): the agent's note for
scripts without a session, whom it cannot tell otherwise. Without torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgpack

from unicron.transition.snapshot.images import write_note

NOTE = "cut.msgpack"  # beside the images
CUT_PREFIX = "cut-"  # names of images that the next ones do not overwrite
COPY_PREFIX = "copy-"  # names of images that came from another node


class Wanted(NamedTuple):
    """at: the first state that is saved from this iteration on is to stay. good: that of the iteration which lies in
    enough nodes. -1: none."""

    at: int = -1
    good: int = -1


def note(folder: Path, wanted: Wanted) -> None:
    """Leave the note. Raises OSError."""
    write_note(folder / NOTE, msgpack.packb(list(wanted)))


def noted(folder: Path) -> Wanted:
    """What the note says; nothing is wanted without one."""
    try:
        at, good = msgpack.unpackb((folder / NOTE).read_bytes())
        return Wanted(int(at), int(good))
    except (OSError, ValueError, TypeError):
        return Wanted()
