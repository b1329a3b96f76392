"""Checks whether a fork of this process is as good as a new process, and gives it random numbers of its own
(docs/design/warm-processes.md). The zygote loads this file by its path: standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

TRIAL_SECONDS = 10.0  # for a forked process to compute something
HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/shm/", "/dev/pts/")
CARDS = "/dev/nvidia[0-9]*"
LARGE_SEED = 1 << 32  # torch draws 64 bits; what people choose is smaller


class _AnsweredFromFiles:
    """Hooks into every import, so that torch counts the cards by their device files as soon as it is there."""

    def __init__(self) -> None:
        self.torch: Any = None
        self.counts: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        torch: Any = sys.modules.get("torch._C")
        if self.torch is None and hasattr(torch, "_cuda_getDeviceCount"):
            self.torch, self.counts = torch, torch._cuda_getDeviceCount
            torch._cuda_getDeviceCount = lambda: len(glob.glob(CARDS))

    def restore(self) -> None:
        if self.torch is not None:
            self.torch._cuda_getDeviceCount = self.counts


@contextlib.contextmanager
def without_driver() -> Iterator[None]:
    """Keep `torch.cuda.is_available` from asking the driver during imports. torch's compiler asks at its import, and a
    process that has opened CUDA cannot be forked."""
    finder = _AnsweredFromFiles()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        finder.restore()


def unsafe() -> str | None:
    """Return why a fork of this process is not as good as a new process; None if it is."""
    if (threads := threading.active_count()) > 1:
        return f"its imports start threads ({', '.join(t.name for t in threading.enumerate()[1:])}; {threads - 1})"
    native = len(os.listdir("/proc/self/task")) - 1 - blas_threads()
    if native > 0:
        return f"its imports start {native} native thread{'s' if native > 1 else ''}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "its imports open CUDA"
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return "its imports leave a child process behind"


def blas_threads() -> int:
    """Count OpenBLAS's threads, which it ends before a fork and restarts on demand (pthread_atfork(3))."""
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "openblas" in line and line.split()[-1].startswith("/")}
    count = 0
    for path in libraries:
        library = ctypes.CDLL(path)
        names = ("scipy_openblas_get_num_threads64_", "scipy_openblas_get_num_threads", "openblas_get_num_threads")
        counts = [getattr(library, name) for name in (*names, names[2] + "64_") if hasattr(library, name)]
        count += max(0, counts[0]() - 1) if counts else 0
    return count


def descriptors() -> dict[int, str]:
    """Return the open descriptors with their targets."""
    targets = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself
            targets[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return targets


def open_handles(known: set[int]) -> str | None:
    """Return what the imports have opened that processes must not share: devices, sockets, pipes, polls."""
    for number, target in sorted(descriptors().items()):
        if number in known:
            continue
        if target.startswith(("socket:", "pipe:", "anon_inode:")):
            return f"its imports open a {target.partition(':')[0]}"
        if target.startswith("/dev/") and not target.startswith(HARMLESS_DEVICES):
            return f"its imports open {target}"
    return None


def trial() -> str | None:
    """Fork a process and let it compute; return None if that works, otherwise the problem."""
    pid = os.fork()
    if pid == 0:
        signal.setitimer(signal.ITIMER_REAL, TRIAL_SECONDS)  # SIGALRM ends it
        sound = len(os.listdir("/proc/self/task")) == 1
        try:
            for name in ("numpy", "torch"):
                if sound and name in sys.modules:
                    ones = sys.modules[name].ones((256, 256))
                    sound = float((ones @ ones).sum()) == 256.0**3
        except BaseException:
            sound = False
        os._exit(int(not sound))
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return f"a trial fork of it ended with {code}" if code else None


# ---------------------------------------------------------------- random numbers
class Seeds:
    """The seeds that imports choose, for the forks. Python's own generator does not tell whether it was seeded, and is
    reseeded after each fork; so its calls are noted while the imports run."""

    def __init__(self) -> None:
        self._chosen = False
        self._state: tuple[Any, ...] | None = None

    @contextlib.contextmanager
    def note_choices(self) -> Iterator[None]:
        """Note whether an import chooses a seed while the imports run."""
        calls = {name: getattr(random, name) for name in ("seed", "setstate")}
        for name, call in calls.items():
            setattr(random, name, self._noting(call))
        try:
            yield
        finally:
            for name, call in calls.items():
                setattr(random, name, call)
            self._state = random.getstate() if self._chosen else None

    def _noting(self, call: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(call)
        def noting(*arguments: Any, **more: Any) -> None:
            call(*arguments, **more)
            seed = arguments[0] if arguments else more.get("a")
            self._chosen = seed is not None  # otherwise the system chooses

        return noting

    def renew(self) -> None:
        """Draw new random numbers in the fork, unless an import has chosen a seed."""
        if self._state is not None:
            random.setstate(self._state)
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy is not None and "numpy.random" in sys.modules:
            if getattr(numpy.random.mtrand._rand._bit_generator, "_seed_seq", None) is not None:
                numpy.random.seed()
        if torch is not None and torch.default_generator.initial_seed() >= LARGE_SEED:
            torch.default_generator.seed()
