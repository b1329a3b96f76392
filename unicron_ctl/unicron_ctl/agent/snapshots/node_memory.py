"""The node's shared memory for one job: training state that outlives a rank, its requeue and its agent
(docs/design/memory.md).

The agent makes the folder and says where it is; the ranks write images there (:mod:`snapshot.image_format`). It is
held by a lock as long as an agent of the job lives on the node. What nobody holds was left by an agent that was killed
or told to end: it stays for an element that comes back, and is removed when it has been forgotten for long enough, by
the next agent of another job of its user or by an epilog.

A job id does not name a training: clusters count from 1, and a log may be lost. So the controller gives each training a
name of its own (`run`), and without one there is no memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from unicron_ctl.agent.connections import held_folders
from unicron_ctl.agent.connections.held_folders import hold, open_own, remove_if_unheld, share_lock
from unicron_ctl.agent.connections.job_environment import Place, memory_every
from unicron_ctl.agent.connections.rank_socket import FOR_RANKS, places
from unicron_transition.snapshot.image_format import FOLDER
from unicron_transition.snapshot.shared_memory import AWAY

BASE = "UNICRON_MEMORY_DIR"
SHARED_MEMORY = "/dev/shm"
TOUCH_SECONDS = 10.0
# Job, run, node, uid; an epilog knows the form. Where somebody else has taken the name, something is added to the run.
_NAME = re.compile(r"unicron\.\d+\.[0-9a-f]+(?:-[0-9a-f]+)?\.(.+)\.(\d+)")


class Memory:
    """The memory of one agent. folder: None while there is none. Raises UserError for settings that make no sense."""

    def __init__(self, place: Place, environment: Mapping[str, str], complain: Callable[[str], None]):
        self.folder: Path | None = None
        self._place, self._complain = place, complain
        self._base = Path(environment.get(BASE) or SHARED_MEMORY)
        self._places = [self._base, *map(Path, places(environment))]
        self._wanted, self._run = memory_every(environment) > 0, ""
        self._descriptor = -1
        self._touched = 0.0

    def open(self, run: str) -> None:
        """The controller's word which training this is; the first one counts. Where no folder can be made, that is
        said, and the job goes on without."""
        if not run or self._run:
            return
        self._run = run
        if self._wanted:
            self._make(run)
        self._free()

    def _make(self, run: str) -> None:
        folder = self._base / f"unicron.{self._place.job}.{run}.{self._place.node}.{os.getuid()}"
        try:
            folder = _own_name(folder, run)
            self._descriptor = _put_unfinished_away(folder, hold(folder))
            self.folder = folder
        except OSError as error:
            why = f"{error.strerror or error}: see {BASE}, or set UNICRON_MEMORY_EVERY=0"
            self._complain(f"no training state is kept in memory: couldn't make {folder} ({why})")

    def _free(self) -> None:
        """Remove unfinished files of the own folder, and files that jobs have left long ago. All else in the own one
        stays, however long ago that was left: it is held by now.

        To give back much memory takes many seconds, and an agent that is silent for so long is taken for lost: so a
        thread does it. Ranks may want that room before it is free. Mostly they do not, since their imports take
        seconds, too. Else they wait a little while (snapshot.shared_memory), and those that copy after each step try
        again later. Where the agent ends meanwhile, the next one removes the rest.
        """
        arguments = self.folder, self._base, self._place.node, time.time(), self._places
        with contextlib.suppress(RuntimeError):  # no thread is to be had: the next agent removes it
            threading.Thread(target=_remove_all, args=arguments, name="unicron-sweep", daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """The variables of ranks."""
        return {FOLDER: str(self.folder) if self.folder is not None else ""}

    def touch_folder(self, now: float) -> None:
        """Show now and then that the folder is in use. One that somebody has removed is made again: ranks try theirs
        again and again."""
        if self.folder is None or now - self._touched < TOUCH_SECONDS:
            return
        self._touched = now
        try:
            os.utime(self.folder)
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                again = hold(self.folder)
                os.close(self._descriptor)
                self._descriptor = again
                self._complain(f"somebody has removed {self.folder}, and the training state in it; it is made again")
        except OSError:
            pass

    def close(self, over: bool) -> None:
        """Let go of it. over: the job has ended, nobody will want it; unless other agents of it still live here."""
        if self.folder is None:
            return
        with contextlib.suppress(OSError):
            os.utime(self.folder)
            self.folder.rmdir()  # where nothing was kept
        if over:
            remove_if_unheld(self.folder, self._descriptor)
        os.close(self._descriptor)
        self.folder = None


def within(seconds: float, what: Callable[[], None]) -> None:
    """Run `what` in a thread; what hangs, as on a file system that is away, is left behind."""
    thread = threading.Thread(target=what, name="unicron-within", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread is to be had
        what()
    else:
        thread.join(seconds)


def _remove_all(folder: Path | None, base: Path, node: str, now: float, places: Iterable[Path]) -> None:
    """Remove the files that were put away in `folder`, which ranks want first, and those that other jobs have left."""
    with contextlib.suppress(OSError):
        for path in list(folder.glob(f"{AWAY}*")) if folder is not None else ():
            path.unlink(missing_ok=True)
    sweep(base, node, now, places)


def sweep(base: Path, node: str, now: float, places: Iterable[Path] = ()) -> list[Path]:
    """Removes what agents of this user have left on this node (:func:`held_folders.sweep`): training state in `base`,
    and folders for their ranks in `places`."""

    def memory(name: str) -> bool:
        match = _NAME.fullmatch(name)
        return match is not None and (match[1], match[2]) == (node, str(os.getuid()))

    return [
        *held_folders.sweep([base], memory, now),
        *held_folders.sweep(places, lambda name: FOR_RANKS.fullmatch(name) is not None, now),
    ]


def _own_name(folder: Path, run: str) -> Path:
    """The name under which this user's folder is, or can be made: anybody may have made one of the usual name before,
    for it shows on each node of the job. Raises OSError."""
    if not _is_others(folder):
        return folder
    head, tail = folder.name.split(f".{run}.", 1)
    for path in sorted(folder.parent.glob(f"{glob.escape(head)}.{run}-*.{glob.escape(tail)}")):
        if _NAME.fullmatch(path.name) and not _is_others(path):
            return path
    return folder.parent / f"{head}.{run}-{secrets.token_hex(4)}.{tail}"


def _is_others(folder: Path) -> bool:
    """Something is there, and it is no folder of this user's that nobody else can enter."""
    try:
        os.close(open_own(folder))
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _put_unfinished_away(folder: Path, descriptor: int) -> int:
    """Rename unfinished files of processes that have ended, so that they are removed; nobody makes any while this
    agent alone is there, without ranks. Returns the descriptor that holds the folder from now on. Raises OSError.

    A lock that becomes another one is given up for a moment (flock(2)), in which somebody may take it who has found the
    folder forgotten. So it is shown first that it is in use; and where it was taken all the same, the folder is held
    anew, without a wait for who has it.
    """
    with contextlib.suppress(OSError):
        os.utime(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in list(folder.glob("*.new")):
            if not path.name.startswith(AWAY):
                path.rename(folder / f"{AWAY}{path.name}")
    return descriptor if share_lock(folder, descriptor) else hold(folder)
