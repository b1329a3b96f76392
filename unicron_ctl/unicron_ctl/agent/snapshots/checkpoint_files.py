"""The agent makes checkpoints' files of what its ranks have set aside in memory, beside the training
(docs/design/checkpoints.md).

A thread of its own looks for them, so it needs no word of a rank: what one that died has set aside is written, too, and
what an agent that died has not finished its next one does. It writes no faster than it may.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from unicron_ctl.agent.snapshots.last_checkpoint import Before, LastCheckpoint
from unicron_ctl.agent.snapshots.node_memory import Memory
from unicron_ctl.shared.system.mailbox import Mailbox
from unicron_transition.snapshot import checkpoint_file, folders
from unicron_transition.snapshot.image_format import BadImage, ImagePage, Key, read_page

FILE_LOOK_SECONDS = 0.5
MOST_LOOK_SECONDS = 60.0  # between two looks whether a checkpoint is whole, each twice as long after the last one
LEAST_PRIORITY = 19  # of the thread: what computes comes first
UNFINISHED_SECONDS = 5.0  # for the thread to leave a file unfinished


class _AgentEnds(OSError):
    """The agent ends."""


class Files:
    """Writes checkpoint files in a thread of its own.

    memory: the node's. turn(key): after whom this node writes what nobody trains (:class:`LastCheckpoint`).
    rate: most bytes a second, 0 for no limit. say: one line for the job's log."""

    def __init__(self, memory: Memory, turn: Callable[[Key], Before | None], rate: float, say: Callable[[str], None]):
        self._memory, self._turn_of, self._rate, self._say = memory, turn, rate, say
        self.results: Mailbox[int] = Mailbox()  # iterations of which files were made
        self._asked = self._all = self._failing = False
        self._cuts: Sequence[int] = ()
        self._stumbled: set[str] = set()  # over what looks came to nothing
        self._first = -1  # the iteration of which this agent wrote the first file, until older ones are removed
        self._prune_at = self._pause = 0.0
        self._ends, self._last_look = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="unicron-files", daemon=True)
        self._thread.start()

    def request_checkpoint(self, rests: bool, cuts: Sequence[int] = ()) -> None:
        """Somebody wants a checkpoint: say where the next one is. rests: no rank of this node trains, so none will set
        anything aside; what their memory has is written, the cuts of these iterations first."""
        self._cuts = cuts
        self._asked, self._all = not rests, rests

    def close(self, seconds: float = 0.0) -> None:
        """Nothing is written any more; what is set aside is, before, within `seconds`."""
        self._last_look.set()
        self._thread.join(seconds)
        self._ends.set()
        self._thread.join(UNFINISHED_SECONDS)
        self.results.close()

    # ------------------------------------------------------------ the thread
    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)
        last = False
        while not last:
            last = self._last_look.wait(FILE_LOOK_SECONDS)
            try:
                self._check_folders()
            except Exception as error:  # without this thread ranks would set nothing aside any more
                text = _words(error)
                if text not in self._stumbled:
                    self._say(f"couldn't look for what is to be saved: {text}: the training goes on; it is tried again")
                self._stumbled.add(text)

    def _check_folders(self) -> None:
        """Writes what the ranks have set aside, and removes what is older."""
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
        for found in checkpoint_file.asides(memory, self._report_bad_image):
            if not self._ends.is_set():
                self._write(found, where)
        self._prune(where)

    def _write(self, found: ImagePage, where: checkpoint_file.Destination) -> None:
        try:
            path = checkpoint_file.persist(found, where.folder, self._pace())
            self._log_change(f"the training state of iteration {found.key.iteration} was saved in {path.parent}", False)
            self.results.put(found.key.iteration)
        except _AgentEnds:
            return  # it stays for the next agent
        except Exception as error:  # whatever it is: as long as the image stays its rank sets no other one aside
            again = "the training goes on; it is tried again with the next one"
            what = f"couldn't save the training state of iteration {found.key.iteration}"
            self._log_change(f"{what}: {_words(error)}: {again}", True)
        with contextlib.suppress(OSError, BadImage):
            if read_page(found.path) == found:  # else a rank has set aside another one meanwhile
                checkpoint_file.release_aside(found.path)
        if folders.prunes(found.key):
            self._first, self._prune_at, self._pause = found.key.iteration, 0.0, FILE_LOOK_SECONDS

    def _prune(self, where: checkpoint_file.Destination) -> None:
        """Remove what is older, when the others have written their files, too. Where this agent ends before, that is
        done with the next checkpoint."""
        now = time.monotonic()
        if self._first < 0 or (now < self._prune_at and not self._last_look.is_set()):
            return
        self._prune_at, self._pause = now + self._pause, min(2 * self._pause, MOST_LOOK_SECONDS)
        with contextlib.suppress(OSError):
            if folders.prune(where.folder, where.keep) >= self._first:
                self._first = -1

    def _report_bad_image(self, error: BadImage) -> None:
        self._log_change(f"no checkpoint is made of what was set aside: {error}: the training goes on", True)

    def _log_change(self, text: str, failing: bool) -> None:
        """Log the checkpoints that were asked for, and changes since the last time."""
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


def _words(error: Exception) -> str:
    """Return the text of an error; that of an expected one is for people."""
    return str(error) if isinstance(error, (OSError, BadImage)) else f"{type(error).__name__}: {error}"
