"""The walks in the architecture's document."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.support.processes import ROOT

WALK_HEAD = "| file | read there | what happens |"


def walks() -> Iterator[list[tuple[str, list[str]]]]:
    """(file, names in it) in the order of each walk."""
    for part in (ROOT / "docs" / "architecture.md").read_text().split(WALK_HEAD)[1:]:
        rows = [line for line in part.split("\n\n", 1)[0].splitlines() if line.startswith("| `")]
        yield [(re.findall(r"`([^`]+)`", row)[0], re.findall(r"`([^`]+)`", row.split("|")[2])) for row in rows]
