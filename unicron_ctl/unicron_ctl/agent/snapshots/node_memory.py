"""The node's shared memory for one job: training state that outlives a rank, its requeue and its agent
(docs/design/memory.md).

The agent makes the folder, and the ranks write images there (:mod:`snapshot.image_format`). Agents of the job on the
node hold it with a lock. A folder without a lock was left by an agent that was killed or asked to end. It stays for an
element that comes back, and after some time the next agent of another job of its user, or an epilog, removes it.

A job id does not identify a training: clusters count from 1, and a log could be lost. So the controller gives each
training a name (`run`), and without one there is no memory.
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
from unicron_detector.formats import IMAGE
from unicron_transition.snapshot.image_format import FOLDER, NEWEST
from unicron_transition.snapshot.shared_memory import AWAY

BASE = "UNICRON_MEMORY_DIR"
SHARED_MEMORY = "/dev/shm"
TOUCH_SECONDS = 10.0
# Job, run, node, uid; an epilog relies on this form. If another user has taken the name, a suffix is added to the run.
_NAME = re.compile(r"unicron\.\d+\.[0-9a-f]+(?:-[0-9a-f]+)?\.(.+)\.(\d+)")


class Memory:
    """The memory of one agent. Raises UserError for invalid settings."""

    def __init__(self, place: Place, environment: Mapping[str, str], complain: Callable[[str], None]):
        self.folder: Path | None = None  # None while there is none
        self._place, self._complain = place, complain
        self._base = Path(environment.get(BASE) or SHARED_MEMORY)
        self._places = [self._base, *map(Path, places(environment))]
        self._wanted, self._run = memory_every(environment) > 0, ""
        self._descriptor = -1
        self._touched = 0.0

    def open(self, run: str) -> None:
        """Make the folder for the training that the controller names; only the first call counts. If it cannot be made,
        that is reported, and the job goes on without."""
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
        """Remove unfinished files of the own folder, and folders that jobs have left long ago. Other files in the own
        folder stay, whatever their age.

        Freeing much memory takes many seconds, in which a silent agent would be taken for lost, so a thread does it.
        Ranks could need the room before it is free. Mostly they do not, since their imports take seconds too. Otherwise
        they wait a little (snapshot.shared_memory), and those that copy after each step try again later. If the agent
        ends meanwhile, the next one removes the rest.
        """
        arguments = self.folder, self._base, self._place.node, time.time(), self._places
        with contextlib.suppress(RuntimeError):  # no thread can be started: the next agent removes it
            threading.Thread(target=_remove_all, args=arguments, name="unicron-sweep", daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """The variables for ranks."""
        return {FOLDER: str(self.folder) if self.folder is not None else "", NEWEST: str(IMAGE.number)}

    def touch_folder(self, now: float) -> None:
        """Show from time to time that the folder is in use. If it was removed, make it again, since ranks try again."""
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
        """Release the folder. over: the job has ended, so remove it unless other agents of the job hold it."""
        if self.folder is None:
            return
        with contextlib.suppress(OSError):
            os.utime(self.folder)
            self.folder.rmdir()  # fails unless it is empty
        if over:
            remove_if_unheld(self.folder, self._descriptor)
        os.close(self._descriptor)
        self.folder = None


def within(seconds: float, what: Callable[[], None]) -> None:
    """Run `what` in a thread for at most `seconds`. If it hangs, as on a dead file system, it is left behind."""
    thread = threading.Thread(target=what, name="unicron-within", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be started
        what()
    else:
        thread.join(seconds)


def _remove_all(folder: Path | None, base: Path, node: str, now: float, places: Iterable[Path]) -> None:
    """Remove the files put away in `folder`, whose room ranks need first, and folders that other jobs have left."""
    with contextlib.suppress(OSError):
        for path in list(folder.glob(f"{AWAY}*")) if folder is not None else ():
            path.unlink(missing_ok=True)
    sweep(base, node, now, places)


def sweep(base: Path, node: str, now: float, places: Iterable[Path] = ()) -> list[Path]:
    """Remove leftovers of this user's agents on this node (:func:`held_folders.sweep`): training state in `base`, and
    folders for their ranks in `places`. Returns the removed folders."""

    def memory(name: str) -> bool:
        match = _NAME.fullmatch(name)
        return match is not None and (match[1], match[2]) == (node, str(os.getuid()))

    return [
        *held_folders.sweep([base], memory, now),
        *held_folders.sweep(places, lambda name: FOR_RANKS.fullmatch(name) is not None, now),
    ]


def _own_name(folder: Path, run: str) -> Path:
    """Return the name of this user's folder, or a free one. Any user could have taken the usual name, since the job's
    other nodes show it. Raises OSError."""
    if not _is_others(folder):
        return folder
    head, tail = folder.name.split(f".{run}.", 1)
    for path in sorted(folder.parent.glob(f"{glob.escape(head)}.{run}-*.{glob.escape(tail)}")):
        if _NAME.fullmatch(path.name) and not _is_others(path):
            return path
    return folder.parent / f"{head}.{run}-{secrets.token_hex(4)}.{tail}"


def _is_others(folder: Path) -> bool:
    """Whether the name is taken, but not by a folder of this user that only this user can enter."""
    try:
        os.close(open_own(folder))
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _put_unfinished_away(folder: Path, descriptor: int) -> int:
    """Rename unfinished files of ended processes, to be removed later, if this agent is the only one and has no ranks
    yet. Returns the descriptor that holds the folder from now on. Raises OSError.

    A lock that is converted is released for a moment (flock(2)), in which a process that removes old folders could take
    it. So the folder is first marked as in use. If the lock was taken all the same, the folder is held anew, without
    waiting for the other process.
    """
    with contextlib.suppress(OSError):
        os.utime(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in list(folder.glob("*.new")):
            if not path.name.startswith(AWAY):
                path.rename(folder / f"{AWAY}{path.name}")
    return descriptor if share_lock(folder, descriptor) else hold(folder)
