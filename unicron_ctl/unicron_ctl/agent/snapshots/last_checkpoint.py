"""Writes the checkpoint of a job that ends in the middle of its training from its nodes' memories
(docs/design/memory.md, "Ownership")."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from unicron_transition.snapshot import checkpoint_file, folders
from unicron_transition.snapshot.folders import Part
from unicron_transition.snapshot.image_format import SHARD, STATE, BadImage, ImagePage, Key, inventory

NEWEST = 2  # iterations of each part that are written
WRITERS = 3  # nodes with the same place: the first writes it, and each other one what those before it did not
TURN_SECONDS = 5.0  # without a sign of the node before; Slurm's KillWait is 30 s
Before = tuple[int, ...]  # the nodes with the same place that come first


class LastCheckpoint:
    """The last checkpoint of one node. If the script makes no checkpoints, nothing is written."""

    def __init__(
        self,
        folder: Path | None,  # the node's memory, if it has any
        turn: Callable[[Key], Before | None],  # the nodes that come first; None if this node does not write the image
        say: Callable[[str], None],  # writes one line into the job's log
        ends: threading.Event | None = None,  # set to stop waiting
        prunes: bool = True,  # remove older checkpoints
    ):
        self._memory, self._turn_of, self._say, self._prunes = folder, turn, say, prunes
        self._ends = ends or threading.Event()
        self._where = checkpoint_file.destination(folder) if folder is not None else None

    def write(self, cuts: Sequence[int] = ()) -> None:
        """Write the newest two states of each place, or of each shard. Ranks end in the middle of a copy, so the newest
        state can be whole in another node, and not in this one.

        cuts: iterations that the nodes' memories probably have in full, the surest first, in case a part of the newest
        ones was lost with a node. Each is written in full before the next, since there might be little time.
        """
        if self._memory is None or self._where is None:
            return
        images = [each for each in inventory(self._memory) if self._turn_of(each.key) is not None and _is_part(each)]
        for cut in cuts:
            self._write_in_turn(_newest((each for each in images if each.key.iteration == cut), 1), exactly=True)
        self._write_in_turn(_newest((each for each in images if each.key.iteration not in cuts), NEWEST))

    def _write_in_turn(self, parts: list[list[ImagePage]], exactly: bool = False) -> None:
        """Write the parts for which this node is first at once, and the others when the nodes before it have done
        nothing for TURN_SECONDS each, since they could be without memory. It first looks at the files, so that it sees
        afterwards what the others did meanwhile. exactly: files of later iterations do not replace these."""
        by_turn: dict[Before, dict[Part, list[ImagePage]]] = defaultdict(dict)
        for each in parts:
            before = self._turn_of(each[0].key)
            if before is not None and len(before) < WRITERS:
                by_turn[before][folders.part_of(each[0].key)] = each
        first, now = by_turn.pop((), {}), time.monotonic()
        waiting = [
            folders.Turn(
                {part: found[-1].key.iteration for part, found in due.items()}, len(before) * TURN_SECONDS, now, exactly
            )
            for before, due in by_turn.items()
        ]
        waiting = self._still_missing(waiting)
        self._write_files(list(itertools.chain(*first.values())))
        images = {part: found for due in by_turn.values() for part, found in due.items()}
        pause = TURN_SECONDS / 16
        while waiting:
            if self._ends.wait(max(0.0, min(pause, min(each.until for each in waiting) - time.monotonic()))):
                return
            waiting, now = self._still_missing(waiting), time.monotonic()
            due = [found for each in waiting if now >= each.until for part in each.missing for found in images[part]]
            waiting = [each for each in waiting if now < each.until]
            self._write_files(due, last_first=True)
            pause *= 2

    def _still_missing(self, turns: list[folders.Turn]) -> list[folders.Turn]:
        """Look at the checkpoints, and return the turns of which parts are missing."""
        assert self._where is not None
        begun: list[folders.FileInProgress] = []
        if oldest := [iteration for each in turns for iteration in each.missing.values()]:
            with contextlib.suppress(OSError):
                begun.extend(folders.files_in_progress(self._where.folder, min(oldest)))
        now = time.monotonic()
        for each in turns:
            each.note_files(begun, now)
        return [each for each in turns if each.missing]

    def _write_files(self, images: list[ImagePage], last_first: bool = False) -> None:
        """Write their files, the newest first. last_first: of each iteration the last part first. So a node that writes
        what another one writes after all, which it could not see, meets it in the middle: what is there stays."""
        assert self._where is not None
        images = sorted(images, reverse=last_first, key=lambda each: folders.part_of(each.key))
        for found in sorted(images, reverse=True, key=lambda each: _age(each.key)):
            try:
                path = checkpoint_file.persist(found, self._where.folder)
                self._say(f"the training state of iteration {found.key.iteration} was saved in {path.parent}")
            except Exception as error:  # after any error the others are still saved
                why = str(error) or type(error).__name__
                self._say(f"couldn't save the training state of iteration {found.key.iteration}: {why}")
        if self._prunes and any(folders.prunes(found.key) for found in images):
            with contextlib.suppress(OSError):
                folders.prune(self._where.folder, self._where.keep)


def _newest(images: Iterable[ImagePage], most: int) -> list[list[ImagePage]]:
    """Return the newest `most` images of each part of a checkpoint, the newest first."""
    states: dict[tuple[int, ...], dict[tuple[int, int], ImagePage]] = defaultdict(dict)
    for found in images:
        states[found.key.place, found.key.shard, found.key.count][_age(found.key)] = found
    return [[each[age] for age in sorted(each, reverse=True)[:most]] for each in states.values()]


def _age(key: Key) -> tuple[int, int]:
    return key.iteration, key.base


def _is_part(found: ImagePage) -> bool:
    """Whether an image can become a part of a checkpoint. A shard can if its head describes it."""
    if found.key.kind not in (STATE, SHARD):
        return False
    try:
        return bool(checkpoint_file.file_head(found.key, found.head()))
    except (OSError, BadImage, ValueError, TypeError):
        return False
