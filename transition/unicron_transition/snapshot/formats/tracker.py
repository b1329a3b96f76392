"""The file in which Megatron-LM says which of its checkpoints is the newest. It is written in place, so a node that
dies meanwhile can leave an empty one; Megatron-LM then prints a line and ends with status 0."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path

from unicron_transition.snapshot.reading import open_plain

TRACKER = "latest_checkpointed_iteration.txt"  # in a folder of Megatron-LM's checkpoints
RELEASE = "release"
MOST_DIGITS = 16
MOST = 64  # bytes that are read of it
SECONDS = 1.0  # to read it before a process starts; a file system that hangs is the process's own matter


def read_tracker(folder: Path) -> str:
    """Read the file; "" for no file. Raises OSError."""
    path = folder / TRACKER
    if not path.is_file():
        return ""
    with open_plain(path) as file:
        return file.read(MOST).decode(errors="replace").strip()


def is_number(text: str) -> bool:
    """Whether it is an iteration."""
    return text.isascii() and text.isdecimal() and len(text) < MOST_DIGITS


def megatrons_iteration(folder: Path) -> int:
    """Return the iteration of the newest checkpoint that Megatron-LM has in a folder, -1 where the file names none.
    Raises OSError."""
    text = read_tracker(folder)
    return int(text) if is_number(text) else -1


def problem(folder: Path) -> str:
    """Why the file in a folder is of no use, in one line; "" where it is, or is not there. Raises OSError."""
    text = read_tracker(folder)
    if is_number(text) or text == RELEASE or not (folder / TRACKER).is_file():
        return ""
    return f"{folder / TRACKER}: {text[:40]!r} is no iteration: write the number of one that is there"


def problem_of(command: Sequence[str]) -> str:
    """Why the file in the folder that a command loads from (--load FOLDER) is of no use, if that can be said soon."""
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
