"""The rooms behind the fence: each has a table of commands and is an entry point of the distribution (setup.cfg).

The core names no room. If a room's folder is removed, its commands are gone, and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

from unicron_ctl.shared.system.release import DISTRIBUTION

GROUP = "unicronctl.rooms"  # of entry points; each names a package with COMMANDS and perhaps SCHEMAS


class Command(NamedTuple):
    """A command of `unicronctl`. Its module is imported when the command is called."""

    target: str
    """`module:attribute` of the click command."""
    line: str
    """One line for `unicronctl --help`."""


def rooms() -> Iterator[ModuleType]:
    """Yield the packages of all installed rooms."""
    from importlib import metadata  # slow to import, and not needed for the core's commands

    try:
        entries = metadata.distribution(DISTRIBUTION).entry_points
    except metadata.PackageNotFoundError:  # a copy that is not installed
        return
    for entry in entries.select(group=GROUP):
        try:
            room = entry.load()
        except ModuleNotFoundError as error:
            if error.name != entry.module:
                raise
        else:
            yield room
