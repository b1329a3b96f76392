"""Finds the newest whole checkpoint below a folder that is not one itself, and why newer ones are not whole.

The search begins with the newest part of a folder, by the step in a name or, without one, in a file. Each checkpoint on
the way is opened, so each that is not whole has a reason. Limits bound the search.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from unicron_transition.snapshot.formats import beside, dcp, format_table
from unicron_transition.snapshot.formats.index import BadCheckpoint, Index
from unicron_transition.snapshot.formats.pickles import archive

LEVELS, MOST_ENTRIES = 4, 20_000  # levels below a folder, and names in all of them
MOST_TRIES, MOST_STEP_FILES = 4, 8  # bad checkpoints that are opened; files that are opened for their step
SECONDS = 2.0  # after which no other file is opened; the folder of a killed training takes milliseconds
STEP = re.compile(r"(?<![a-z])(?:step|iter|iteration|checkpoint|ba)[=_-]?(\d{1,15})(?!\d|\.\d)", re.IGNORECASE)
NUMBER = re.compile(r"(?<![\d.])\d{1,15}(?!\d|\.\d)")  # a number with a decimal point is a loss
# Names of files and folders that are being written (docs/behaviour/checkpoint-layouts.md).
TEMPORARY = re.compile(r"tmp[-_.].*|.*[-_.](?:tmp|partial|incomplete)", re.IGNORECASE)
MARKER = "-unfinished"  # NeMo's marker beside a checkpoint, after the same name
NOT_DONE = "its saving was not finished"
OPTIMIZER = "optim"  # the start of the name of a folder without a model
FILE = ".ckpt"  # Lightning's files
Find = Callable[[Path], Index | None]


def named_unfinished(path: Path) -> str:
    """Explain by its name, or one beside it, why a checkpoint is not whole; "" if no name shows that."""
    if TEMPORARY.fullmatch(path.name):
        return f"by its name {NOT_DONE}"
    marker = path.name.removesuffix(FILE).removesuffix("-EMA") + MARKER
    return f"{marker} is beside it: {NOT_DONE}" if os.path.exists(path.parent / marker) else ""


def without_metadata(folder: Path, names: list[str]) -> str:
    """Explain why a folder with files of torch DCP is not whole: the last file is missing; "" if it is not."""
    some = any(name.endswith(dcp.SUFFIX) for name in names)
    return f"no {dcp.METADATA}: {NOT_DONE}" if some and not dcp.is_one(folder) else ""


@dataclass
class Below:
    """The checkpoints below a folder."""

    find: Find
    """Opens a checkpoint."""
    newest: Path | None = None
    """The newest whole checkpoint."""
    why_not: dict[Path, str] = field(default_factory=dict)
    """Newer checkpoints that are not whole, with the reason."""
    cut: bool = False
    """A limit ended the search."""
    _entries: int = MOST_ENTRIES
    _tries: int = MOST_TRIES
    _step_files: int = MOST_STEP_FILES
    _until: float = field(default_factory=lambda: time.monotonic() + SECONDS)

    def look_below(self, folder: Path, levels: int = LEVELS) -> bool:
        """Search `folder` and so many levels below it; returns whether the search is over."""
        names, inner = self._list(folder)
        files = {name for name in names if name.endswith(FILE) and name.isprintable()}.difference(inner)
        for path in self._newest_first(folder, inner if levels else [], files):
            if path.name in files:
                self._note(path, self._reason(path))
            elif self._look_at(path, levels - 1):
                return True
            if self._over():
                return True
        return False

    def _look_at(self, path: Path, levels: int) -> bool:
        """Look at a folder that might be a checkpoint, or have some; returns whether the search is over."""
        names, inner = self._list(path)
        if _is_one(path, names, inner):
            self._note(path, named_unfinished(path) or without_metadata(path, names) or self._reason(path))
        elif why := named_unfinished(path) if names else "":
            if not TEMPORARY.fullmatch(path.name) or STEP.search(path.name):
                self.why_not[path] = why
            return False
        if self._over() or self.look_below(path, levels):
            return True
        if path in self.why_not:  # its reason holds for the checkpoints in it, too
            self.why_not = {each: why for each, why in self.why_not.items() if path not in each.parents}
        return False

    def _list(self, folder: Path) -> tuple[list[str], list[str]]:
        """Return the names in a folder, and those of the folders among them."""
        names, inner = [], []
        try:
            with os.scandir(folder) as entries:
                for each in itertools.islice(entries, self._entries):
                    names.append(each.name)
                    if each.name.isprintable() and each.is_dir(follow_symlinks=False):
                        inner.append(each.name)
        except OSError:
            pass
        self._entries -= len(names)
        return names, inner

    def _over(self) -> bool:
        self.cut = self.newest is None and (self._entries <= 0 or self._tries <= 0 or time.monotonic() > self._until)
        return self.cut or self.newest is not None

    def _note(self, path: Path, why: str) -> None:
        if why and not path.name.startswith(OPTIMIZER):
            self.why_not[path] = why
        elif not why:
            self.newest = path
            self.why_not = {each: why for each, why in self.why_not.items() if each not in path.parents}

    def _reason(self, path: Path) -> str:
        """Explain why a checkpoint cannot be read, without its path in front; "" if it can."""
        try:
            if why := named_unfinished(path):
                return why
            if self.find(path) is not None:
                return ""
            return beside.hint(path).removeprefix("; ") or "of no format that is known"
        except BadCheckpoint as error:
            why = str(error)
        except OSError as error:
            why = f"{error.filename or path}: {error.strerror or error}"
        self._tries -= 1
        return re.sub(rf"^{re.escape(str(path))}(/|: | )", "", why)

    def _newest_first(self, folder: Path, inner: list[str], files: set[str]) -> list[Path]:
        """Sort by the step in a name, or else in a file. One without a step counts as newest or oldest, by its time."""
        times = {name: _time(folder / name) for name in [*inner, *files]}
        steps: dict[str, int] = {}
        for name in sorted(times, key=lambda name: -times[name]):
            if found := STEP.findall(name):
                steps[name] = int(found[-1])
            elif (step := self._find_step(folder / name, name in files)) is not None:
                steps[name] = step
        last, most = max((times[name] for name in steps), default=0.0), max(steps.values(), default=0)

        def rank(name: str) -> tuple[bool, int, list[int], float, str]:
            step = steps.get(name, most + 1 if times[name] > last else -1)
            numbers = [int(number) for number in NUMBER.findall(name)]
            return not name.startswith(OPTIMIZER), step, numbers, times[name], name

        return [folder / name for name in sorted(times, key=rank, reverse=True)]

    def _find_step(self, path: Path, is_file: bool) -> int | None:
        """Read the step in the files of one checkpoint; None if they have none, or enough files were opened."""
        try:
            if is_file and self._step_files > 0 and time.monotonic() < self._until:
                self._step_files -= 1
                return beside.lightnings_step(archive(path))
            return None if is_file else beside.trainers_step_in(path)
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None


def _is_one(folder: Path, names: list[str], inner: list[str]) -> bool:
    """Whether a folder holds a checkpoint, whole or not, judging by the names in it."""
    return any(each.is_there(folder, names, inner) for each in format_table.FORMATS) or beside.is_unread(names)


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
