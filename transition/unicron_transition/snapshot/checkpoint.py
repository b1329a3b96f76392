"""Checkpoints on disk: the last resort of the nearest principle, for a job of which no rank is left
(docs/design/micro-batch-reuse.md).

A checkpoint is a folder of files that ranks write each for itself, without a word to each other: the state of one place
of the layout, or a shard of it. A file's name includes the number of files, so the folder is whole when all are there;
each is written beside the training, from a copy in the host's memory, under another name until it is whole. It is an
image (`unicron_transition/snapshot/image_format.py`): raw bytes, with checksums that are checked before it is used.
A checkpoint with a damaged file is passed over for the one before. Ranks of any layout read from it what they need
(`unicron_transition/snapshot/parts.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from unicron_transition.iteration.rank_log import inform, warn
from unicron_transition.snapshot import contents, folders, foreign, parts
from unicron_transition.snapshot.checkpoint_file import DAMAGE_SUFFIX, folder_name, stem, writing
from unicron_transition.snapshot.folders import WholeCheckpoint
from unicron_transition.snapshot.formats import exports, names, opening
from unicron_transition.snapshot.formats.index import BadCheckpoint
from unicron_transition.snapshot.image_format import SUFFIX, BadImage, Key, read_page
from unicron_transition.snapshot.migrate import TrainingState
from unicron_transition.snapshot.model_facts import other_arithmetic, other_heads
from unicron_transition.snapshot.reading import LOST_ERRORS
from unicron_transition.snapshot.save_interval import Risk, SaveClock

# Of ranks that end without a plan and hold the same, the first saves it at once, the second after so long, and so on up
# to the RESCUERSth, unless one before it has done so.
RESCUE_SECONDS = 60.0
RESCUERS = 10
LOOK_SECONDS = 0.2
TURN_SECONDS = 5.0  # the same, where all of them are asked to save
OTHERS_SECONDS = 10.0  # at the end of a training, for the others' files: what is older goes when all are there
MINUTES = "UNICRON_CHECKPOINT_MINUTES"
AUTO = "auto"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used, or the last one cannot be written; one line that says what to do."""


@dataclass(frozen=True)
class Writer:
    """The part of the whole checkpoint that a rank's file is: its place in the layout, and with a distributed optimizer
    its shard. layout: as people write it, "TP2 PP2". loss: of the last iteration, the same number in all ranks: files
    of two runs that came by the same iteration are no whole together. shards: the mark of the set that it is one of,
    where agents make files of the others."""

    place: int = 0
    size: int = 1
    shard: int = 0
    count: int = 1
    layout: str = ""
    loss: float | None = None
    shards: str = ""

    @property
    def mark(self) -> str:
        """The mark that all files that belong together share."""
        if self.shards:
            return self.shards
        return hashlib.blake2b(repr((self.layout, self.loss)).encode(), digest_size=4).hexdigest()

    @property
    def name(self) -> str:
        """The name of the file."""
        return f"{stem(self.key(0))}{SUFFIX}"

    def key(self, iteration: int, kind: str = "state", slot: int = 0, base: int = 0) -> Key:
        """The key of its image."""
        return Key(kind, slot, iteration, self.place, self.size, self.shard, self.count, base, self.mark)


class Checkpoints:
    """The checkpoints of one job in `folder`, which all its nodes share.

    interval: iterations between two of them, minutes: minutes. minutes "auto", which it is where neither is given: as
    often as what a save costs, and how often one would be needed, call for (`save_interval`). With 0 of both there is
    one at the end only. keep: how many stay. A write that fails costs nothing but itself: it is reported, and the next
    one is tried when it is due. UNICRON_CHECKPOINT_MINUTES takes the place of `minutes`.

    begin_from: a checkpoint of another format, or of another job, with which the training begins while there is no
    checkpoint of its own: Megatron-LM's `torch_dist` or `torch`, torch DCP, safetensors. begin_names: the table of
    names, for a model that has other names there; it is found where it is one of ours, for Megatron. begin_with: "all",
    or "model" for the parameters alone, from iteration 0.

    export: a format in which a checkpoint that somebody asks for (SIGUSR2) is written as well, under
    FOLDER/FORMAT: torch_dist, dcp, safetensors. UNICRON_CHECKPOINT_EXPORT takes its place.

    Raises ValueError, one line, for what makes no sense.
    """

    needs_beginning = True  # a folder in `begin_from` without a checkpoint is an error

    def __init__(
        self,
        folder: str | os.PathLike[str],
        interval: int | None = None,
        keep: int = 2,
        minutes: float | Literal["auto"] | None = None,
        begin_from: str | os.PathLike[str] | None = None,
        begin_names: str = "",
        begin_with: str = "all",
        export: str = "",
    ):
        given = _minutes(minutes if minutes is not None else AUTO if interval is None else 0.0)
        self.folder, self.interval, self.keep = Path(folder), interval or 0, keep
        if self.interval < 0 or keep < 1:
            raise ValueError(f"interval {interval} must be at least 0 and keep {keep} at least 1")
        if begin_with not in ("all", "model"):
            raise ValueError(f'begin_with {begin_with!r} must be "all" or "model"')
        if begin_names and begin_from is None:
            raise ValueError("begin_names is about the names in begin_from: give begin_from, too")
        self.clock = SaveClock() if given == AUTO else None
        self.minutes: float = 0.0 if given == AUTO else float(given)
        self.begin_from = Path(begin_from) if begin_from is not None else None
        self.begin = foreign.Selection(begin_with == "all", begin_with == "all", begin_names)
        form = exports.form_of(export)
        self.exports = exports.Exports(self.folder, form, begin_names) if form else None
        self._last = time.monotonic()  # when one was due
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._written: tuple[int, str] | None = None  # the last one that this process wrote: its iteration and mark
        self.newest = 0  # that of the last one that it has read, or has on disk

    # ------------------------------------------------------------ reading
    def whole_ones(self) -> list[WholeCheckpoint]:
        """All whole ones, the newest first."""
        return folders.whole(self.folder)

    def load(self, state: TrainingState, iteration: int | None = None) -> int | None:
        """Puts the newest sound one into `state`, or that of `iteration`; returns the iteration to go on with, None
        where there is none. No other rank is waited for; the layout may be another than the one that wrote it.

        Raises :class:`CheckpointError` when there are some and none can be used: starting anew would hide that.
        """
        wanted = [each for each in self.whole_ones() if iteration in (None, each.iteration)]
        wanted = wanted or [each for each in self._beginning() if iteration in (None, each.iteration)]
        for each in wanted:
            if self.load_one(state, each):
                return each.iteration
        if wanted or self._damaged():  # of another folder, all that were there have been found damaged just now
            raise CheckpointError(self._nothing_sound())
        if iteration is not None:
            raise CheckpointError(f"{self.folder} has no whole checkpoint of iteration {iteration}")
        return None

    def load_one(self, state: TrainingState, found: WholeCheckpoint) -> bool:
        """Puts one into `state`; False for a damaged one, which is said. Raises :class:`CheckpointError` for one of
        another model."""
        if found.foreign:
            self._load_beginning(state, found.folder)
            return True
        try:
            _load(state, found)
        except (OSError, BadImage) as error:
            warn(f"checkpoint of iteration {found.iteration} passed over: {error}")
            return False
        self.newest = found.iteration
        return True

    def choices(self) -> list[WholeCheckpoint]:
        """The checkpoints to go on from, the newest first; they are not read. Raises :class:`CheckpointError` where all
        that there are have been found damaged."""
        found = self.whole_ones()
        if not found and self._damaged():
            raise CheckpointError(self._nothing_sound())
        found = found or self._beginning()
        self.newest = max([self.newest, *(each.iteration for each in found)])
        return found

    def _beginning(self) -> list[WholeCheckpoint]:
        """List what the script begins from, while there is no checkpoint of its own: those of another job, the newest
        first, or the one of another format. Raises :class:`CheckpointError`."""
        if self.begin_from is None:
            return []
        if self.begin.whole and not self.begin.renames:
            if found := folders.whole(self.begin_from):
                return found
            if _has_damaged(self.begin_from):
                raise CheckpointError(self._nothing_sound(self.begin_from))
        there = self._foreign(self.begin_from)
        return [] if there is None else [WholeCheckpoint(there.iteration, (there.folder,), True)]

    def _foreign(self, folder: Path) -> foreign.Foreign | None:
        try:
            found = foreign.found_in(folder, self.begin)
        except (BadCheckpoint, OSError) as error:
            raise CheckpointError(str(error)) from None
        if found is None and self.needs_beginning:
            raise CheckpointError(
                f"{folder} has no checkpoint to begin from: give another folder" + opening.hint(folder, "begin_from={}")
            )
        return found

    def _load_beginning(self, state: TrainingState, folder: Path) -> foreign.Foreign:
        if (found := self._foreign(folder)) is None:
            raise CheckpointError(f"the checkpoint in {folder} is gone")
        try:
            found.load(state)
        except (parts.Missing, KeyError, RuntimeError) as error:
            raise _other_model(found.folder, error) from None
        except (BadCheckpoint, OSError) as error:
            raise CheckpointError(f"{error}: the training cannot begin from it") from None
        self.newest = found.iteration
        return found

    def _damaged(self) -> bool:
        """Somebody has found a checkpoint damaged that is still there."""
        return _has_damaged(self.folder)

    def _nothing_sound(self, folder: Path | None = None) -> str:
        return f"no checkpoint can be read: move {folder or self.folder} away to start anew"

    @property
    def destination(self) -> Path | None:
        """The folder in which they are written, None where they are only read."""
        return self.folder

    # ------------------------------------------------------------ writing
    def is_due(self, iteration: int) -> bool:
        """Whether one is to be written when `iteration` iterations are done."""
        return bool(self.interval) and iteration % self.interval == 0

    @property
    def by_clock(self) -> bool:
        """Whether time decides, too."""
        return bool(self.minutes) or self.clock is not None

    def is_overdue(self, risk: Callable[[], Risk]) -> bool:
        """The time is over since the last one. Ranks' clocks differ, so they have to agree on one iteration."""
        if not self.by_clock:
            return False
        seconds = 60.0 * self.minutes if self.clock is None else self.clock.seconds(risk())
        return time.monotonic() - self._last >= seconds

    def restart_clock(self) -> None:
        """One is written now, by whomever: the time begins anew."""
        self._last = time.monotonic()
        if self.clock is not None:
            self.clock.note_saved()

    def save(self, state: TrainingState, iteration: int, writer: Writer | None = None) -> None:
        """Copies this rank's part of the state, and lets a thread write it; no other rank is waited for. Waits for the
        write before, if that still goes on. With a distributed optimizer every rank calls it, without one those of one
        replica do."""
        self.wait_written()
        writer = writer or Writer()
        head, data = _copy(state, iteration, writer)
        self._error, self._written = None, (iteration, writer.mark)
        copied = head, data, iteration, writer
        self._thread = threading.Thread(target=self._write, args=copied, name="unicron-checkpoint")
        self._thread.start()

    def wait_written(self) -> None:
        """Until the last write is over, however it ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def save_last(self, state: TrainingState, iteration: int, writer: Writer | None = None) -> None:
        """This rank's part of the final one, on disk when this returns. Raises :class:`CheckpointError` when it cannot
        be written."""
        writer = writer or Writer()
        self._save_now(state, iteration, writer)
        until = time.monotonic() + OTHERS_SECONDS
        while not self._pruned(iteration, writer) and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)

    def _save_now(self, state: TrainingState, iteration: int, writer: Writer) -> None:
        self.wait_written()
        if self._written != (iteration, writer.mark) or self._error is not None:
            self.save(state, iteration, writer)
            self.wait_written()
        if self._error is not None:
            raise CheckpointError(f"the last checkpoint was not written: {self._error}: make room in {self.folder}")

    def rescue(
        self,
        state: TrainingState,
        iteration: int,
        turn: int = 0,
        writer: Writer | None = None,
        why: str = "no plan came",
        apart: float | None = None,
    ) -> None:
        """The part of a rank that ends before its time, on disk when this returns. turn: how many other ranks hold the
        same and come first; a later one writes only what those before it have not begun to write in `apart` seconds
        (RESCUE_SECONDS) each. why: for people.

        Raises :class:`CheckpointError` when it cannot be written.
        """
        self.wait_written()
        writer = writer or Writer()
        part, patience = folders.part_of(writer.key(iteration)), RESCUE_SECONDS if apart is None else apart
        patience = max(2 * LOOK_SECONDS, patience * min(turn, RESCUERS)) if turn else 0.0
        waiting = folders.Turn({part: iteration}, patience, time.monotonic(), exactly=True, stall=RESCUE_SECONDS)
        while not any(each.iteration > iteration for each in self.whole_ones()):
            begun = [
                each
                for each in folders.files_in_progress(self.folder, iteration)
                if each.path.name.startswith(writer.mark)
            ]
            waiting.note_files(begun, time.monotonic())
            if not waiting.missing:
                return
            if time.monotonic() >= waiting.until:
                self._save_now(state, iteration, writer)
                inform(f"{why}: the state was saved in {self.folder} by this rank, to go on with iteration {iteration}")
                return
            time.sleep(LOOK_SECONDS)

    def _path(self, iteration: int, writer: Writer) -> Path:
        return self.folder / folder_name(iteration) / writer.name

    def _write(self, head: bytes, data: torch.Tensor, iteration: int, writer: Writer) -> None:
        path, begun = self._path(iteration, writer), time.monotonic()
        try:
            self._pruned(iteration, writer)  # the one before is whole by now
            with writing(path, writer.key(iteration), head, data.numel(), writer.mark) as write:
                write(data.numpy().data)
            if self.clock is not None:
                self.clock.note_written(time.monotonic() - begun)
            self.newest = iteration
            self._pruned(iteration, writer)
        except Exception as error:  # whatever it is, it must not count as written
            self._error = error
            warn(f"checkpoint of iteration {iteration} not written, the training goes on: {error}")

    def _pruned(self, iteration: int, writer: Writer) -> bool:
        """Remove what is older, if that is this rank's to do; False while the one of `iteration` is not whole."""
        if not folders.prunes(writer.key(iteration)):
            return True
        try:
            return folders.prune(self.folder, self.keep) >= iteration
        except OSError:
            return True  # this rank's part is written, whatever becomes of older ones


def _has_damaged(folder: Path) -> bool:
    return any(folder.glob(f"iteration-*/*.{DAMAGE_SUFFIX}"))


def _minutes(given: float | str) -> float | str:
    text = os.environ.get(MINUTES) or str(given)
    if text == AUTO:
        return AUTO
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not 0.0 <= minutes < math.inf:
        raise ValueError(f"{MINUTES}={text!r}: write minutes between two checkpoints, auto, or 0 for none by the clock")
    return minutes


# ------------------------------------------------------------ what is in a file
def _copy(state: TrainingState, iteration: int, writer: Writer) -> tuple[bytes, torch.Tensor]:
    """Copy what the file of this rank is to hold out of the state, which goes on changing."""
    found, _ = contents.gather(state)
    data = torch.empty(found.size, dtype=torch.uint8)
    contents.fill(found.tensors, found.offsets, data)
    return contents.head_of(state, found.about, iteration, writer.layout), data


def _load(state: TrainingState, found: WholeCheckpoint) -> None:
    """Raises BadImage, OSError, or CheckpointError for what is sound and yet of no use."""
    first = found.paths[0]
    try:
        _assemble(state, [contents.open_image(read_page(path)) for path in found.paths], first.parent)
    except (BadImage, OSError) as error:
        if isinstance(error, OSError) and error.errno not in LOST_ERRORS:
            raise
        # So that ranks that read other files of it pass it over as well.
        with contextlib.suppress(OSError):
            first.with_name(f"{found.mark}.{DAMAGE_SUFFIX}").write_text(f"{error}\n")
        raise


def load_image(state: TrainingState, path: Path) -> None:
    """Puts an image of this rank's own place into `state`. Raises OSError, BadImage for a damaged one, and
    :class:`CheckpointError` for one of another model."""
    _assemble(state, [contents.open_image(read_page(path))], path)


def _other_model(path: Path, why: object) -> CheckpointError:
    return CheckpointError(
        f"{path} is of another model ({why}): give the options that it was written with, or another folder"
    )


def _name_as_here(
    model: Sequence[Any], sources: dict[str, list[parts.Source]], saved: dict[str, list[parts.SavedState]]
) -> None:
    """A file that was imported has the names of where it came from. Raises parts.Missing, BadCheckpoint."""
    mine = parts.plain_names(model)
    found = names.match({name: any(each.keys for each in saved[name]) for name in sources}, mine) if mine else None
    if found is None:
        return
    if found.left:
        raise parts.Missing(f"it has {found.left[0]}, and the model here has not")
    for one, other in found.twins:
        values = [parts.assemble(sources[name][0].box, parts.PARAMETER, sources[name]) for name in (one, other)]
        if not torch.equal(*values):
            raise parts.Missing(f"{one} and {other} are one tensor here and two there")
    for fresh, old in found.chosen.items():
        sources[fresh] = [each._replace(box=each.box._replace(name=fresh)) for each in sources[old]]
        saved[fresh] = saved[old]


def _assemble(state: TrainingState, files: list[contents.ImageContent], folder: Path) -> None:
    there, mine = files[0].head.facts, state.facts
    if why := other_heads(there, mine):
        raise _other_model(folder, why)
    for difference in other_arithmetic(there.get("arguments") or {}, mine.get("arguments") or {}):
        warn(f"{folder} is of another model: {difference}")
    sources: dict[str, list[parts.Source]] = defaultdict(list)
    saved: dict[str, list[parts.SavedState]] = defaultdict(list)
    for file in files:
        for name, whole, offset, extent, begin, end, keys, others in file.index():

            def read(key: str, file: contents.ImageContent = file, keys: dict[str, int] = keys) -> torch.Tensor:
                return file.tensor(keys[key])

            box = parts.Box(name, tuple(whole), tuple(offset), tuple(extent))
            sources[name].append(parts.Source(box, begin, end, read))
            saved[name].append(parts.SavedState(box, [key for key in keys if key != parts.PARAMETER], others))
    try:
        _name_as_here(state.model, sources, saved)
        parts.restore(state.model, state.optimizer, parts.AssembledBlocks(sources, saved))
    except (parts.Missing, BadCheckpoint, KeyError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _other_model(folder, error) from None
    head = files[0].head
    state.seed, state.loss = head.seed, head.loss
    state.adopt_progress(head.groups, head.scheduler, head.scales)
