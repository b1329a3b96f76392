"""The rooms behind the fence, and the folders that go when one of them is removed."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from tests.support.processes import ROOT
from unicron_ctl.shared.commands.table import GROUP
from unicron_ctl.shared.system.release import DISTRIBUTION

LISTED = {room.name: room for room in metadata.distribution(DISTRIBUTION).entry_points.select(group=GROUP)}
ROOMS = {
    name: room for name, room in LISTED.items() if (ROOT / "unicron_ctl/unicron_ctl" / name / "__init__.py").is_file()
}


def homes(room: str) -> list[Path]:
    """Where its tests stand, in each tier."""
    return [ROOT / "tests/unit/unicron_ctl" / room, ROOT / "tests/process" / room, ROOT / "tests/slurm" / room]


def is_gone(path: str) -> bool:
    """Whether a file is a removed room's, or one of its tests: documents name it all the same."""
    return any(re.search(rf"(^|/){room}/", path) for room in LISTED.keys() - ROOMS)
