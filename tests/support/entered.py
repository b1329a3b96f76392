"""Which files of the product a process enters: `sys.setprofile` in each of its Python threads.

A folder, named by the variable ENTERED, holds a byte that all processes see: in which window they are. At DUMP each
process writes what it has seen, a file a process, `ROLE.PID.json`: {window: [path, ...]}.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
from pathlib import Path
from types import FrameType

from tests.support.processes import ROOT, SOURCES

ENTERED = "ENTERED_FILES"
IDLE, BEFORE, HEALING, DUMP = range(4)
PRODUCT = tuple(name for name in SOURCES if name != "sbatch_templates")


def switch(folder: Path) -> mmap.mmap:
    """The byte, which is made where it is not there."""
    path = folder / "window"
    if not path.exists():
        path.write_bytes(bytes([IDLE]))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 1)


def watch(role: str) -> None:
    """Begin to watch this process, where the variable names a folder."""
    named = os.environ.get(ENTERED)
    if not named:
        return
    folder = Path(named)
    window, seen = switch(folder), {BEFORE: set[str](), HEALING: set[str]()}
    written = False

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal written
        now = window[0]
        if event == "call" and now in seen:
            seen[now].add(frame.f_code.co_filename)
        elif now == DUMP and not written:
            written = True
            found = {str(number): sorted(product(names)) for number, names in seen.items()}
            part = folder / f".{role}.{os.getpid()}"
            part.write_text(json.dumps(found))
            part.rename(folder / f"{role}.{os.getpid()}.json")

    threading.setprofile(profile)
    sys.setprofile(profile)


def product(names: set[str]) -> set[str]:
    """Those that lie in the product, as the paths by which they are imported."""
    found = set()
    for name in names:
        path = os.path.realpath(name)
        inside = os.path.relpath(path, ROOT)
        root, _, imported = inside.partition(os.sep)
        if root in PRODUCT:
            found.add(imported)
    return found
