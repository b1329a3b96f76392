"""Fault injection inside a rank: the faults of `unicronctl inject`, and the rank's side of them. Standard library only.

Faults are ordered over the rank's channel and strike in the main thread at the next micro-batch, or at once in the
channel's thread. Nothing here acts unless an agent orders it, which a controller refuses to request without
`[controller] allow_inject = true`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from unicron_detector.chaos import blackhole, memory_cage

# fault -> (who carries it out, seconds it lasts by default, one line for people)
FAULTS: dict[str, tuple[str, float, str]] = {
    "rank-kill": ("agent", 0.0, "SIGKILL the rank's process"),
    "exception": ("rank", 0.0, "exception:CLASS raises a real error text at the rank's next micro-batch"),
    "hang-stop": ("agent", 0.0, "SIGSTOP the rank's process"),
    "hang-gil": ("rank", 600.0, "hold the interpreter's lock in a busy thread"),
    "slow": ("rank", 60.0, "slow:FACTOR makes the rank's micro-batches take so many times as long"),
    "oom": ("rank", 0.0, "allocate until the rank's own limit, so that only the rank runs out of memory"),
    "oom-kill": ("agent", 0.0, "the kernel's OOM killer ends the rank, in a memory cgroup of its own (takes root)"),
    "full-disk": ("rank", 0.0, "the rank writes to a full device at its next micro-batch"),
    "lost-network": ("agent", 10.0, "the agent falls silent and its ranks' connections break"),
    "black-hole": ("agent", 10.0, "packets to the agent and its ranks vanish, no connection breaks"),
    "lost-node": ("command", 20.0, "power a node of the local cluster off"),
    "corrupt-message": ("agent", 0.0, "the agent sends garbage to the controller"),
    "corrupt-checkpoint": ("rank", 0.0, "bytes flip in the next training state that the rank sends to a newcomer"),
}
FULL_DEVICE = "/dev/full"  # every write fails with the kernel's own ENOSPC, see full(4)
# class -> (exception type, text as the libraries print it)
EXCEPTIONS: dict[str, tuple[type[Exception], str]] = {
    "python": (ValueError, "shapes (4, 8) and (3, 8) cannot be multiplied [injected]"),
    "cuda": (RuntimeError, "CUDA error: an illegal memory access was encountered [injected]"),
    "cuda-oom": (RuntimeError, "CUDA out of memory. Tried to allocate 2.00 GiB [injected]"),
    "ecc": (RuntimeError, "CUDA error: uncorrectable ECC error encountered [injected]"),
    "nccl": (
        RuntimeError,
        "NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or there was a network error [injected]",
    ),
    "connection-reset": (ConnectionResetError, "[Errno 104] Connection reset by peer [injected]"),
    "file-system": (OSError, "[Errno 116] Stale file handle: '/data/train.bin' [injected]"),
    "disk-full": (OSError, "[Errno 28] No space left on device: '/data/checkpoint.pt' [injected]"),
}
OOM_MARGIN = 64 << 20  # bytes above what the process has
OOM_CHUNK = 8 << 20


class InjectError(ValueError):
    """A fault that does not exist; the text says which do."""


def parse(fault: str) -> tuple[str, str]:
    """Split a fault into its name and detail: `slow:2.5` -> ("slow", "2.5"). Raises InjectError."""
    name, _, detail = fault.partition(":")
    if name not in FAULTS:
        raise InjectError(f"no fault is called {name!r}: use one of {', '.join(FAULTS)}")
    if name == "exception" and detail not in EXCEPTIONS:
        raise InjectError(
            f"exception:{detail or '?'}: use one of {', '.join(f'exception:{kind}' for kind in EXCEPTIONS)}"
        )
    if name == "slow":
        try:
            factor = float(detail)
        except ValueError:
            factor = 0.0
        if not 1.0 < factor <= 1000.0:
            raise InjectError(f"slow:{detail or '?'}: write a factor above 1 and up to 1000, for example slow:1.5")
    if detail and name not in ("exception", "slow"):
        raise InjectError(f"{name} takes no {detail!r}: write {name}")
    return name, detail


class Injector:
    """The faults of one rank. `take` is called in the channel's thread, `point` and `slow_down` in the main one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep):
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._pending: list[tuple[str, str]] = []
        self._factor, self._slow_until = 1.0, 0.0
        self._spoils = 0
        self.break_connections: Callable[[], Any] = lambda: None  # set by the owner of the generation's sockets

    def on_order(self, message: Mapping[str, Any]) -> None:
        """Carry out an order of the agent: keys fault and seconds. Raises InjectError for an unknown fault."""
        name, detail = parse(str(message["fault"]))
        seconds = float(message.get("seconds") or FAULTS[name][1])
        if name == "hang-gil":
            hold_gil(seconds)
        elif name == "slow":
            self._factor, self._slow_until = float(detail), self._clock() + seconds
        elif name == "lost-network":
            self.break_connections()
        elif name == "black-hole":
            dug = blackhole.dig()
            later = threading.Timer(seconds, blackhole.fill, (dug,))
            later.daemon = True
            later.start()
        elif name in ("exception", "oom", "oom-kill", "full-disk", "corrupt-checkpoint"):
            with self._lock:
                if name == "corrupt-checkpoint":
                    self._spoils += 1
                else:
                    self._pending.append((name, detail))

    def point(self) -> None:
        """Let a pending fault strike before a micro-batch. Costs one look at a list."""
        if not self._pending:
            return
        with self._lock:
            name, detail = self._pending.pop(0)
        if name == "oom":
            exhaust_memory()
        elif name == "oom-kill":
            memory_cage.fill()
        elif name == "full-disk":
            write_to_full_device()
        kind, text = EXCEPTIONS[detail]
        raise kind(text)

    def spoils_transfer(self) -> bool:
        """Whether the next training state should be sent corrupted. True once for every order."""
        with self._lock:
            spoils, self._spoils = self._spoils > 0, max(0, self._spoils - 1)
            return spoils

    def slow_down(self, seconds: float) -> None:
        """Slow down after a micro-batch that took `seconds`."""
        if self._factor > 1.0:
            if self._clock() < self._slow_until:
                self._sleep((self._factor - 1.0) * seconds)
            else:
                self._factor = 1.0


injector = Injector()  # of this process


def hold_gil(seconds: float) -> None:
    """Let no other Python thread of the process run: PyDLL calls keep the lock."""
    libc = ctypes.PyDLL(None)
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:  # a signal's handler ends a sleep early
        libc.usleep(int(min(left, 0.9) * 1e6))


def write_to_full_device() -> None:
    """Raise the OSError that a full disk raises."""
    with open(FULL_DEVICE, "wb", buffering=0) as file:
        file.write(bytes(4096))


def exhaust_memory() -> None:
    """Allocate up to a limit just above what the process has, and raise MemoryError; the machine never notices."""
    import resource

    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = size + OOM_MARGIN
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    chunks: list[bytearray] = []
    try:
        for _ in range(4 * OOM_MARGIN // OOM_CHUNK):
            chunks.append(bytearray(OOM_CHUNK))
    except MemoryError:
        pass
    finally:
        chunks.clear()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))  # the report of the error needs memory
    raise MemoryError(f"the rank reached its limit of {limit >> 20} MB [injected]")
