"""Reads Megatron-LM's tracker file, which names its newest checkpoint.

It is written in place, so a node that dies meanwhile can leave it empty. Megatron-LM then prints a line and exits with
status 0.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path

from unicron_transition.snapshot.reading import open_plain

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
MOST_DIGITS = 16
MOST = 64  # bytes of the file that are read
SECONDS = 1.0  # to read it before a process starts; on a file system that hangs, the process would hang by itself


def read_tracker(folder: Path) -> str:
    """Return the text of the tracker file in a folder, "" without one. Raises OSError."""
    path = folder / TRACKER
    if not path.is_file():
        return ""
    with open_plain(path) as file:
        return file.read(MOST).decode(errors="replace").strip()


def is_number(text: str) -> bool:
    """Whether the text is an iteration."""
    return text.isascii() and text.isdecimal() and len(text) < MOST_DIGITS


def megatrons_iteration(folder: Path) -> int:
    """Return the iteration of Megatron-LM's newest checkpoint in a folder, -1 if there is none. Raises OSError."""
    text = read_tracker(folder)
    return int(text) if is_number(text) else -1


def problem(folder: Path) -> str:
    """Explain in one line why the tracker file in a folder is useless; "" if it is not, or is missing. Raises
    OSError."""
    text = read_tracker(folder)
    if is_number(text) or text == RELEASE or not (folder / TRACKER).is_file():
        return ""
    return f"{folder / TRACKER}: {text[:40]!r} is no iteration: write the number of one that is there"


def problem_of(command: Sequence[str]) -> str:
    """Do the same for the folder that a command loads from (--load FOLDER); "" if the file cannot be read in time."""
    folders = [word.removeprefix("--load=") for word in command if word.startswith("--load=")]
    folders += [after for word, after in itertools.pairwise(command) if word == "--load"]
    found: list[str] = []

    def look_at_tracker() -> None:
        try:
            found.append(problem(Path(folders[-1])))
        except (OSError, ValueError):
            found.append("")

    if folders:
        looking = threading.Thread(target=look_at_tracker, name="unicron-tracker", daemon=True)
        looking.start()
        looking.join(SECONDS)
    return found[0] if found else ""
