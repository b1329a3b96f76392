"""Checks whether a fork of this process is as good as a new process. The zygote loads this file by its path: standard
library only."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

TRIAL_SECONDS = 10.0  # for a forked process to compute something
HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/shm/", "/dev/pts/")

CARDS = "/dev/nvidia[0-9]*"


class _AnsweredFromFiles:
    """Sees every import, and has torch count the cards by their device files as soon as torch is there."""

    def __init__(self) -> None:
        self.torch: ModuleType | None = None
        self.counts: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        found = sys.modules.get("torch._C")
        if self.torch is None and hasattr(found, "_cuda_getDeviceCount"):
            self.torch, self.counts = found, found._cuda_getDeviceCount  # type: ignore[union-attr]
            found._cuda_getDeviceCount = lambda: len(glob.glob(CARDS))  # type: ignore[union-attr]

    def restore(self) -> None:
        if self.torch is not None:
            self.torch._cuda_getDeviceCount = self.counts  # type: ignore[attr-defined]


@contextlib.contextmanager
def without_driver() -> Iterator[None]:
    """While modules are imported, `torch.cuda.is_available` does not ask the driver. torch's compiler asks at its
    import, and a process that has opened CUDA cannot be forked."""
    finder = _AnsweredFromFiles()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        finder.restore()


def unsafe() -> str | None:
    """Say why a fork of this process is not as good as a new process; None where it is."""
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
    """OpenBLAS's own, which it ends before a fork and starts again when they are needed (pthread_atfork(3))."""
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "openblas" in line and line.split()[-1].startswith("/")}
    count = 0
    for path in libraries:
        library = ctypes.CDLL(path)
        names = ("scipy_openblas_get_num_threads64_", "scipy_openblas_get_num_threads", "openblas_get_num_threads")
        asked = next((getattr(library, name) for name in (*names, names[2] + "64_") if hasattr(library, name)), None)
        count += max(0, asked() - 1) if asked is not None else 0
    return count


def descriptors() -> dict[int, str]:
    """The open descriptors, and what each is of."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def open_handles(known: set[int]) -> str | None:
    """Describe what the imports have opened and processes must not share: devices, sockets, pipes, polls."""
    for number, target in sorted(descriptors().items()):
        if number in known:
            continue
        if target.startswith(("socket:", "pipe:", "anon_inode:")):
            return f"its imports open a {target.partition(':')[0]}"
        if target.startswith("/dev/") and not target.startswith(HARMLESS_DEVICES):
            return f"its imports open {target}"
    return None


def trial() -> str | None:
    """Fork a process and let it compute; None where that works, else what went wrong."""
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
