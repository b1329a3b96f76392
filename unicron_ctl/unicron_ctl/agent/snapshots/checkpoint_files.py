"""Writes the images that ranks have set aside in memory to files of checkpoints, beside the training
(docs/design/checkpoints.md).

A thread of the agent looks for them, so it needs no message of a rank: images of a dead rank are written too, and the
next agent finishes the work of a dead one. A rate can be set.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from unicron_ctl.agent.snapshots.file_slices import OpenSlices
from unicron_ctl.agent.snapshots.last_checkpoint import Before, LastCheckpoint
from unicron_ctl.agent.snapshots.node_memory import Memory
from unicron_ctl.shared.system.mailbox import Mailbox
from unicron_transition.snapshot import checkpoint_file, folders
from unicron_transition.snapshot.checkpoint_file import Slice, slice_in
from unicron_transition.snapshot.image_format import BadImage, ImagePage, Key, read_page

FILE_LOOK_SECONDS = 0.5
MOST_LOOK_SECONDS = 60.0  # between two looks whether a checkpoint is whole; the pause doubles up to this
LEAST_PRIORITY = 19  # of the thread: computation comes first
UNFINISHED_SECONDS = 5.0  # for the thread to abandon a file


class _AgentEnds(OSError):
    """The agent ends."""


class Files:
    """Writes checkpoint files in a thread of its own."""

    def __init__(self, memory: Memory, turn: Callable[[Key], Before | None], rate: float, say: Callable[[str], None]):
        self._memory = memory
        self._turn_of = turn  # this node's turn to write a state that no rank trains (:class:`LastCheckpoint`)
        self._rate = rate  # the most bytes a second; 0 for no limit
        self._say = say  # writes one line into the job's log
        self.results: Mailbox[int] = Mailbox()  # iterations of which files were made
        self._asked = self._all = self._failing = False
        self._cuts: Sequence[int] = ()
        self._reported: set[str] = set()  # errors of looks
        self._slices = OpenSlices()
        self._first = -1  # the iteration of which the first part is complete, until older ones are removed
        self._prune_at = self._pause = 0.0
        self._ends, self._last_look = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="unicron-files", daemon=True)
        self._thread.start()

    def request_checkpoint(self, rests: bool, cuts: Sequence[int] = ()) -> None:
        """Report the next checkpoint. rests: no rank of this node trains, so none will set an image aside, and the
        images in memory are written instead, the cuts of these iterations first."""
        self._cuts = cuts
        self._asked, self._all = not rests, rests

    def close(self, seconds: float = 0.0) -> None:
        """Write the images that are set aside, within `seconds`, and end the thread."""
        self._last_look.set()
        self._thread.join(seconds)
        self._ends.set()
        self._thread.join(UNFINISHED_SECONDS)
        self.results.close()

    # ------------------------------------------------------------ the thread
    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)
        last = False
        while not last or (self._slices and not self._ends.wait(FILE_LOOK_SECONDS)):
            last = last or self._last_look.wait(FILE_LOOK_SECONDS)
            try:
                self._check_folders()
            except Exception as error:  # the thread must go on, or ranks could set nothing aside any more
                text = _text_of(error)
                if text not in self._reported:
                    self._say(f"couldn't look for what is to be saved: {text}: the training goes on; it is tried again")
                self._reported.add(text)

    def _check_folders(self) -> None:
        """Write the images that are set aside, and remove older checkpoints."""
        if self._all:
            self._all = False
            LastCheckpoint(self._memory.folder, self._turn_of, self._say, self._ends).write(self._cuts)
        self._write_asides(self._memory.folder)

    def _write_asides(self, memory: Path | None) -> None:
        where = checkpoint_file.destination(memory) if memory is not None else None
        if memory is None or where is None:
            if self._asked and memory is not None:
                self._say("no checkpoint is written: the script gives its session no `checkpoints`")
                self._asked = False
            return
        text = "no checkpoint is made of what was set aside: {}: the training goes on"
        asides = checkpoint_file.asides(memory, lambda error: self._log_change(text.format(error), True))
        self._slices.forget_others(asides)
        for found in asides:
            if not self._ends.is_set() and found not in self._slices:
                self._write_own(found, where)
        self._finish_slices(where)
        self._prune(where)

    def _write_own(self, found: ImagePage, where: checkpoint_file.Destination) -> None:
        """Write the file of an image, or this node's slice of it."""
        cut = slice_in(found.path)
        path = self._write(found, where, cut)
        if path is None:
            return
        if cut.of > 1:
            self._slices.add(found, path)
        else:
            self._finish(found, where)

    def _finish_slices(self, where: checkpoint_file.Destination) -> None:
        """Release the images whose files are complete, and write slices in place of nodes that do not."""
        seen = self._slices.look_at_files(time.monotonic(), partial(folders.files_in_progress, where.folder))
        for path, others in seen.differing:
            self._say(_difference(path, others))
        for found in seen.complete:
            self._finish(found, where)
        for found in seen.due:
            count = slice_in(found.path).of
            for number in range(count):
                if self._write(found, where, Slice(number, count)) is None:
                    break

    def _write(self, found: ImagePage, where: checkpoint_file.Destination, cut: Slice) -> Path | None:
        """Write the file of an image, or a slice of it. None after an error, of which this tells."""
        try:
            return checkpoint_file.persist(found, where.folder, self._pace(), cut)
        except _AgentEnds:
            return None  # the image stays for the next agent
        except Exception as error:  # the image must go after any error, or its rank could set no other one aside
            again = "the training goes on; it is tried again with the next one"
            what = f"couldn't save the training state of iteration {found.key.iteration}"
            self._log_change(f"{what}: {_text_of(error)}: {again}", True)
            self._release(found)
            return None

    def _finish(self, found: ImagePage, where: checkpoint_file.Destination) -> None:
        """Note that the file of an image is complete."""
        iteration = found.key.iteration
        folder = where.folder / checkpoint_file.folder_name(iteration)
        self._log_change(f"the training state of iteration {iteration} was saved in {folder}", False)
        self.results.put(iteration)
        self._release(found)
        if folders.prunes(found.key):
            self._first, self._prune_at, self._pause = iteration, 0.0, FILE_LOOK_SECONDS

    def _release(self, found: ImagePage) -> None:
        with contextlib.suppress(OSError, BadImage):
            if read_page(found.path) == found:  # otherwise a rank has set another one aside meanwhile
                checkpoint_file.release_aside(found.path)

    def _prune(self, where: checkpoint_file.Destination) -> None:
        """Remove older checkpoints when this one is whole. If this agent ends before, the next checkpoint does it."""
        now = time.monotonic()
        if self._first < 0 or (now < self._prune_at and not self._last_look.is_set()):
            return
        self._prune_at, self._pause = now + self._pause, min(2 * self._pause, MOST_LOOK_SECONDS)
        with contextlib.suppress(OSError):
            if folders.prune(where.folder, where.keep) >= self._first:
                self._first = -1

    def _log_change(self, text: str, failing: bool) -> None:
        """Log requested checkpoints, and changes between success and failure."""
        if failing != self._failing or (self._asked and not failing):
            self._say(text)
        self._failing, self._asked = failing, self._asked and failing

    def _pace(self) -> Callable[[int], None]:
        began, written = time.monotonic(), 0

        def wrote(size: int) -> None:
            nonlocal written
            written += size
            ahead = written / self._rate - (time.monotonic() - began) if self._rate else 0.0
            if self._ends.wait(max(0.0, ahead)):
                raise _AgentEnds("the agent ends")

        return wrote


def _difference(path: Path, others: Sequence[int]) -> str:
    """Return the line about slices of states that differ. path: of this node's slice."""
    cut, numbers = slice_in(path), ", ".join(map(str, others))
    return (
        f"the replicas differ, or computed this iteration twice: in {path.parent} slice {cut.number} of {cut.of}, of "
        f"this node, and slice {numbers} are of different states; the checkpoint will be of one of them: check the "
        "nodes' memory and GPUs, and that the training computes the same in all replicas"
    )


def _text_of(error: Exception) -> str:
    """Return the text of an error, with its kind if it is an unexpected one."""
    return str(error) if isinstance(error, (OSError, BadImage)) else f"{type(error).__name__}: {error}"
