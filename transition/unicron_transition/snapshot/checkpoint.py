"""Checkpoints on disk: the last resort of the nearest principle, if no rank of a job is left
(docs/design/micro-batch-reuse.md).

A checkpoint is a folder of files that ranks write independently: each has the state of one place of the layout, or a
shard of it. A file's name includes the number of files, so it is known when the folder is whole. A file is an image
(`unicron_transition/snapshot/image_format.py`), written beside the training from a copy in the host's memory. Its
checksums are checked before use, and a checkpoint with a damaged file is passed over for the one before. Ranks of any
layout read what they need (`unicron_transition/snapshot/parts.py`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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
from unicron_transition.snapshot.formats.written import pieces_of
from unicron_transition.snapshot.image_format import SUFFIX, BadImage, Key, read_page
from unicron_transition.snapshot.migrate import TrainingState
from unicron_transition.snapshot.model_facts import other_arithmetic, other_heads
from unicron_transition.snapshot.reading import LOST_ERRORS
from unicron_transition.snapshot.save_interval import Risk, SaveClock

# Of ranks that hold the same state and end without a plan, the first saves it at once, the second after this time, and
# so on up to the RESCUERSth, unless one before it has begun to.
RESCUE_SECONDS = 60.0
RESCUERS = 10
LOOK_SECONDS = 0.2
TURN_SECONDS = 5.0  # the same, if all of them were asked to save
OTHERS_SECONDS = 10.0  # wait at the end of a training for other ranks' files, to remove older checkpoints
MINUTES = "UNICRON_CHECKPOINT_MINUTES"
AUTO = "auto"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used, or the last one cannot be written; one line says what to do."""


@dataclass(frozen=True)
class Writer:
    """The part of a checkpoint that a rank's file has."""

    place: int = 0
    """The rank's place among the `size` places of the layout."""
    size: int = 1
    shard: int = 0
    """Its shard among `count` shards of a distributed optimizer."""
    count: int = 1
    layout: str = ""
    """The layout as people write it, such as `TP2 PP2`."""
    loss: float | None = None
    """The loss of the last iteration: files of two runs at the same iteration do not belong together."""
    shards: str = ""
    """The mark of its set of shards, if agents write the files of the others."""

    @property
    def mark(self) -> str:
        """The mark that all files of the checkpoint share."""
        if self.shards:
            return self.shards
        return hashlib.blake2b(repr((self.layout, self.loss)).encode(), digest_size=4).hexdigest()

    @property
    def name(self) -> str:
        """The name of the file."""
        return f"{stem(self.key(0))}{SUFFIX}"

    def key(self, iteration: int, kind: str = "state", slot: int = 0, base: int = 0) -> Key:
        """Return the key of its image."""
        return Key(kind, slot, iteration, self.place, self.size, self.shard, self.count, base, self.mark)


class Checkpoints:
    """The checkpoints of one job. A failed write is reported, and the next one is tried when it is due.

    Parameters
    ----------
    folder
        Shared by all nodes of the job.
    interval
        Iterations between two checkpoints; 0 for none by iteration.
    keep
        The number of checkpoints that are kept.
    minutes
        Minutes between two checkpoints; 0 for none by the clock. "auto", the default without an interval, weighs
        the cost of a save against the risk of a loss (`save_interval`). UNICRON_CHECKPOINT_MINUTES overrides it. With
        0 here and in `interval` only the end of the training is saved.
    begin_from
        A checkpoint of another job or format to begin with while there is no checkpoint of this job:
        Megatron-LM's `torch_dist` or `torch`, torch DCP, safetensors.
    begin_names
        The table of names, if the model has other names there and none of ours fits.
    begin_with
        "all", or "model" for the parameters alone, from iteration 0.
    export
        Also write a requested checkpoint (SIGUSR2) in this format, under FOLDER/FORMAT: torch_dist, dcp,
        safetensors. UNICRON_CHECKPOINT_EXPORT overrides it.

    Raises
    ------
    ValueError
        A setting makes no sense.
    """

    needs_beginning = True  # no checkpoint in `begin_from` is an error

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
        self._last = time.monotonic()  # when one was due last
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._written: tuple[int, str] | None = None  # iteration and mark of the one that this process wrote last
        self.newest = 0  # the iteration of the last one that is known to be on disk

    # ------------------------------------------------------------ reading
    def whole_ones(self) -> list[WholeCheckpoint]:
        """List the whole checkpoints, the newest first."""
        return folders.whole(self.folder)

    def load(self, state: TrainingState, iteration: int | None = None) -> int | None:
        """Load the newest sound checkpoint, or that of `iteration`, into `state`, and return the iteration to go on
        with; None if there is none. Waits for no other rank. The checkpoint can be of any layout.

        Raises :class:`CheckpointError` if there are checkpoints and none can be used: a new start would hide that.
        """
        wanted = [each for each in self.whole_ones() if iteration in (None, each.iteration)]
        wanted = wanted or [each for each in self._beginning() if iteration in (None, each.iteration)]
        for each in wanted:
            if self.load_one(state, each):
                return each.iteration
        if wanted or _has_damaged(self.folder):  # those of another folder have all been found damaged just now
            raise CheckpointError(self._nothing_sound())
        if iteration is not None:
            raise CheckpointError(f"{self.folder} has no whole checkpoint of iteration {iteration}")
        return None

    def load_one(self, state: TrainingState, found: WholeCheckpoint) -> bool:
        """Load a checkpoint into `state`; False, with a line, if it is damaged. Raises :class:`CheckpointError` if it
        is of another model."""
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
        """List the checkpoints to go on from, the newest first, without reading them. Raises :class:`CheckpointError`
        if all have been found damaged."""
        found = self.whole_ones()
        if not found and _has_damaged(self.folder):
            raise CheckpointError(self._nothing_sound())
        found = found or self._beginning()
        self.newest = max([self.newest, *(each.iteration for each in found)])
        return found

    def _beginning(self) -> list[WholeCheckpoint]:
        """List the checkpoints in `begin_from`: of another job, the newest first, or one of another format. Raises
        :class:`CheckpointError`."""
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
            with memory_for(folder):
                found.load(state)
        except CheckpointError:
            raise
        except (parts.Missing, KeyError, RuntimeError) as error:
            raise _other_model(found.folder, error) from None
        except (BadCheckpoint, OSError) as error:
            raise CheckpointError(f"{error}: the training cannot begin from it") from None
        self.newest = found.iteration
        return found

    def _nothing_sound(self, folder: Path | None = None) -> str:
        return f"no checkpoint can be read: move {folder or self.folder} away to start anew"

    # ------------------------------------------------------------ what audits have found
    @property
    def verified(self) -> int:
        """The iteration of the newest checkpoint that an audit has found sound; -1 for none."""
        with contextlib.suppress(OSError):
            return next((each.iteration for each in self.whole_ones() if each.verified), -1)
        return -1

    def note_verified(self, iteration: int, mark: str) -> None:
        """Note that an audit has found the state in the checkpoint of `iteration` sound. Its files, of this mark, may
        not be complete yet."""
        try:
            if self.destination is not None:
                folders.note_verified(self.destination, iteration, mark)
        except OSError as error:
            warn(f"the checkpoint of iteration {iteration} is verified, but could not be marked so: {error}")

    def set_aside_after(self, iteration: int) -> None:
        """Set all checkpoints after `iteration` aside: their states are unsound."""
        self.wait_written()
        self._written, self.newest = None, min(self.newest, max(0, iteration))
        if self.destination is None:
            return
        try:
            moved = folders.set_aside_after(self.destination, iteration)
        except OSError as error:
            warn(f"unsound checkpoints after iteration {iteration} could not be renamed: {error}: move them away")
            return
        if moved:
            names = ", ".join(each.name for each in moved)
            inform(f"set aside, because the training state in them is unsound: {names} in {self.destination}")

    @property
    def destination(self) -> Path | None:
        """The folder for new checkpoints, None if they are only read."""
        return self.folder

    # ------------------------------------------------------------ writing
    def is_due(self, iteration: int) -> bool:
        """Whether a checkpoint is due after `iteration` iterations."""
        return bool(self.interval) and iteration % self.interval == 0

    @property
    def by_clock(self) -> bool:
        """Whether checkpoints are also due by the clock."""
        return bool(self.minutes) or self.clock is not None

    def is_overdue(self, risk: Callable[[], Risk]) -> bool:
        """Whether one is due by the clock. Ranks' clocks differ, so ranks must agree on an iteration."""
        if not self.by_clock:
            return False
        seconds = 60.0 * self.minutes if self.clock is None else self.clock.seconds(risk())
        return time.monotonic() - self._last >= seconds

    def restart_clock(self) -> None:
        """Restart the clock, because a checkpoint is written now, by this rank or another."""
        self._last = time.monotonic()
        if self.clock is not None:
            self.clock.note_saved()

    def save(self, state: TrainingState, iteration: int, writer: Writer | None = None) -> None:
        """Copy this rank's part of the state and write it in a thread, after the write before is over. Waits for no
        other rank. With a distributed optimizer every rank calls it, otherwise those of one replica."""
        self.wait_written()
        writer = writer or Writer()
        head, data = _copy(state, iteration, writer)
        self._error, self._written = None, (iteration, writer.mark)
        copied = head, data, iteration, writer
        self._thread = threading.Thread(target=self._write, args=copied, name="unicron-checkpoint")
        self._thread.start()

    def wait_written(self) -> None:
        """Wait until the last write is over, successful or not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def save_last(self, state: TrainingState, iteration: int, writer: Writer | None = None) -> None:
        """Write this rank's part of the final checkpoint. Raises :class:`CheckpointError` if that fails."""
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
        """Write the part of a rank that ends early. turn: the number of ranks with the same state that come first. A
        later rank writes only if those before it have not begun to in `apart` seconds (RESCUE_SECONDS) each. why: for
        people. Raises :class:`CheckpointError` if that fails.
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

    def _write(self, head: bytes, data: torch.Tensor, iteration: int, writer: Writer) -> None:
        path, begun = self.folder / folder_name(iteration) / writer.name, time.monotonic()
        try:
            self._pruned(iteration, writer)  # the checkpoint before is whole by now
            with writing(path, writer.key(iteration), head, data.numel()) as write:
                write(data.numpy().data)
            if self.clock is not None:
                self.clock.note_written(time.monotonic() - begun)
            self.newest = iteration
            self._pruned(iteration, writer)
        except Exception as error:  # after any error it must not count as written
            self._error = error
            warn(f"checkpoint of iteration {iteration} not written, the training goes on: {error}")

    def _pruned(self, iteration: int, writer: Writer) -> bool:
        """Remove older checkpoints, if this rank's part does; False while that of `iteration` is not whole."""
        if not folders.prunes(writer.key(iteration)):
            return True
        try:
            return folders.prune(self.folder, self.keep) >= iteration
        except OSError:
            return True  # this rank's part is written, and that is enough


def _has_damaged(folder: Path) -> bool:
    """Whether a checkpoint is there that was found damaged."""
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
    """Copy this rank's part out of the state, which the training changes."""
    found, _ = contents.gather(state)
    data = torch.empty(found.size, dtype=torch.uint8)
    contents.fill(found.tensors, found.offsets, data)
    return contents.head_of(state, found.about, iteration, writer.layout), data


def _load(state: TrainingState, found: WholeCheckpoint) -> None:
    """Load a checkpoint. Raises BadImage, OSError, or CheckpointError if it is sound but of another model."""
    first = found.paths[0]
    try:
        with memory_for(first.parent):
            _assemble(state, [contents.open_image(read_page(path)) for path in found.paths], first.parent)
    except (BadImage, OSError) as error:
        if isinstance(error, OSError) and error.errno not in LOST_ERRORS:
            raise
        # Ranks that read its other files pass it over as well then.
        with contextlib.suppress(OSError):
            first.with_name(f"{found.mark}.{DAMAGE_SUFFIX}").write_text(f"{error}\n")
        raise


def load_image(state: TrainingState, path: Path) -> None:
    """Load an image of this rank's own place into `state`. Raises OSError, BadImage if it is damaged, and
    :class:`CheckpointError` if it is of another model."""
    with memory_for(path):
        _assemble(state, [contents.open_image(read_page(path))], path)


@contextlib.contextmanager
def memory_for(path: Path) -> Iterator[None]:
    """Raises :class:`CheckpointError` in place of errors for a lack of memory: the file is sound, and no other one
    would need less."""
    try:
        yield
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        raise CheckpointError(
            f"no memory to load {path}, which stays as it is ({error}): give each rank more (--mem, ulimit -v)"
        ) from None


def _other_model(path: Path, why: object) -> CheckpointError:
    return CheckpointError(
        f"{path} is of another model ({why}): give the options that it was written with, or another folder"
    )


def _name_as_here(
    model: Sequence[Any], sources: dict[str, list[parts.Source]], saved: dict[str, list[parts.SavedState]]
) -> None:
    """Give the parts of an imported checkpoint the names of this model. Raises parts.Missing, BadCheckpoint."""
    mine = parts.plain_names(model)
    found = names.match({name: any(each.keys for each in saved[name]) for name in sources}, mine) if mine else None
    if found is None:
        return

    def is_same(one: str, other: str) -> bool:
        whole = sources[one][0].box.whole
        if sources[other][0].box.whole != whole:
            return False

        def values(name: str, part: tuple[tuple[int, ...], tuple[int, ...]]) -> torch.Tensor:
            return parts.assemble(parts.Box(name, whole, *part), parts.PARAMETER, sources[name])

        return all(
            torch.equal(values(one, part), values(other, part)) for part in pieces_of(((0,) * len(whole), whole))
        )

    foreign.check_match(found, is_same)
    for fresh, old in found.chosen.items():
        sources[fresh] = [each._replace(box=each.box._replace(name=fresh)) for each in sources[old]]
        saved[fresh] = saved[old]


def _assemble(state: TrainingState, files: list[contents.ImageContent], folder: Path) -> None:
    there, mine = files[0].head.facts, state.facts
    if why := other_heads(there, mine):
        raise _other_model(folder, why)
    for difference in other_arithmetic(there.arguments, mine.arguments):
        warn(f"{folder} is of another model: {difference}")
    sources: dict[str, list[parts.Source]] = defaultdict(list)
    saved: dict[str, list[parts.SavedState]] = defaultdict(list)
    for file in files:
        for name, whole, offset, extent, begin, end, keys, others in file.index():

            def read(
                key: str, first: int, last: int, file: contents.ImageContent = file, keys: dict[str, int] = keys
            ) -> torch.Tensor:
                return file.tensor(keys[key], first, last)

            def lend(
                key: str, room: parts.Room, file: contents.ImageContent = file, keys: dict[str, int] = keys
            ) -> torch.Tensor | None:
                return file.lend(keys[key], room)

            box = parts.Box(name, tuple(whole), tuple(offset), tuple(extent))
            sources[name].append(parts.Source(box, begin, end, read, lend))
            saved[name].append(parts.SavedState(box, [key for key in keys if key != parts.PARAMETER], others))

    def fill() -> None:
        for file in files:
            file.fill()

    try:
        _name_as_here(state.model, sources, saved)
        parts.restore(state.model, state.optimizer, parts.AssembledBlocks(sources, saved, fill))
    except (parts.Missing, BadCheckpoint, KeyError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _other_model(folder, error) from None
    head = files[0].head
    state.seed, state.loss = head.seed, head.loss
    state.adopt_progress(head.groups, head.scheduler, head.scales)
