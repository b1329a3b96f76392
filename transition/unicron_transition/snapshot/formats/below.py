"""The checkpoints below a folder that is none itself: which is the newest whole one, and why newer ones are not whole.

A folder is looked through from its newest part on, by the step in a name, or in a file where the name has none. Each
checkpoint that is met is opened, so each that is not whole has its reason. No more is looked at than the limits say.
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

LEVELS, MOST_ENTRIES = 4, 20_000  # how far below a folder is looked, and at how many names in all
MOST_TRIES, MOST_ASKED = 4, 8  # checkpoints that are no good and are opened; files that are asked for their step
SECONDS = 2.0  # after which no other file is opened; what a killed training leaves takes milliseconds
STEP = re.compile(r"(?<![a-z])(?:step|iter|iteration|checkpoint|ba)[=_-]?(\d{1,15})(?!\d|\.\d)", re.IGNORECASE)
NUMBER = re.compile(r"(?<![\d.])\d{1,15}(?!\d|\.\d)")  # others are a loss
# Names of what is being written (docs/behaviour/checkpoint-layouts.md).
TEMPORARY = re.compile(r"tmp[-_.].*|.*[-_.](?:tmp|partial|incomplete)", re.IGNORECASE)
MARKER = "-unfinished"  # NeMo's: a file beside its checkpoint, of the same name
NOT_DONE = "its saving was not finished"
OPTIMIZER = "optim"  # begins the name of a folder that has no model
FILE = ".ckpt"  # how the names of Lightning's files end
Find = Callable[[Path], Index | None]


def named_unfinished(path: Path) -> str:
    """Why its name, or one beside it, says that a checkpoint is not whole; "" where none does."""
    if TEMPORARY.fullmatch(path.name):
        return f"by its name {NOT_DONE}"
    marker = path.name.removesuffix(FILE).removesuffix("-EMA") + MARKER
    return f"{marker} is beside it: {NOT_DONE}" if os.path.exists(path.parent / marker) else ""


def without_metadata(folder: Path, names: list[str]) -> str:
    """That a folder with these names has files of torch DCP, and not what is written when all of them are there."""
    some = any(name.endswith(dcp.SUFFIX) for name in names)
    return f"no {dcp.METADATA}: {NOT_DONE}" if some and not dcp.is_one(folder) else ""


@dataclass
class Below:
    """The checkpoints below a folder. newest: the newest whole checkpoint, None for none. why_not: newer ones that are
    not whole, with the reason. cut: there may be more than what was looked at. find: opens a checkpoint."""

    find: Find
    newest: Path | None = None
    why_not: dict[Path, str] = field(default_factory=dict)
    cut: bool = False
    _entries: int = MOST_ENTRIES
    _tries: int = MOST_TRIES
    _asked: int = MOST_ASKED
    _until: float = field(default_factory=lambda: time.monotonic() + SECONDS)

    def look_below(self, folder: Path, levels: int = LEVELS) -> bool:
        """Whether nothing more is to be looked at after all that is in `folder`, and so many levels below it."""
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
        """A folder that may be a checkpoint, or have some."""
        names, inner = self._list(path)
        if _is_one(path, names, inner):
            self._note(path, named_unfinished(path) or without_metadata(path, names) or self._reason(path))
        elif why := named_unfinished(path) if names else "":
            if not TEMPORARY.fullmatch(path.name) or STEP.search(path.name):
                self.why_not[path] = why
            return False
        if self._over() or self.look_below(path, levels):
            return True
        if path in self.why_not:  # which says it for what is in it, too
            self.why_not = {each: why for each, why in self.why_not.items() if path not in each.parents}
        return False

    def _list(self, folder: Path) -> tuple[list[str], list[str]]:
        """The names in a folder, and those of folders among them."""
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
        """Why a checkpoint cannot be read, without the path in front; "" where it can."""
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
        """By the step in a name, or that its files tell. What tells none is the newest or the oldest, by its time."""
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
        """The step in the files of one checkpoint; None where they tell none, or enough were asked."""
        try:
            if is_file and self._asked > 0 and time.monotonic() < self._until:
                self._asked -= 1
                return beside.lightnings_step(archive(path))
            return None if is_file else beside.trainers_step_in(path)
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None


def _is_one(folder: Path, names: list[str], inner: list[str]) -> bool:
    """Whether a folder is a checkpoint, or was to be one, by the names in it."""
    return any(each.is_there(folder, names, inner) for each in format_table.FORMATS) or beside.is_unread(names)


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
