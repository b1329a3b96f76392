"""Files of the repository, and the walks in the architecture's document."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.processes import ROOT

WALK_HEAD = "| file | read there | what happens |"


def walks() -> Iterator[list[tuple[str, list[str]]]]:
    """(file, names in it) in the order of each walk."""
    for part in (ROOT / "docs" / "architecture.md").read_text().split(WALK_HEAD)[1:]:
        rows = [line for line in part.split("\n\n", 1)[0].splitlines() if line.startswith("| `")]
        yield [(re.findall(r"`([^`]+)`", row)[0], re.findall(r"`([^`]+)`", row.split("|")[2])) for row in rows]


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository; of a copy that is no checkout, or without git, all that lies in no hidden folder."""
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
        command = ["git", "ls-files", "-z", *patterns]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    found = [ROOT / name for name in names if name]
    for pattern in patterns if not found else ():
        found += [path for path in ROOT.rglob(pattern) if not path.relative_to(ROOT).as_posix().startswith(".")]
    return [path for path in found if path.is_file()]
