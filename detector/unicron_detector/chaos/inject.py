"""Fault injection inside a rank: the faults of `unicronctl inject`, and the rank's side of them. Standard library only.

Faults are ordered over the rank's channel and strike in the main thread at the next micro-batch, or at once in the
channel's thread. Nothing here acts unless an agent orders it, which a controller refuses to request without
`[controller] allow_inject = true`.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    "flip": ("rank", 60.0, "flip:WHERE[:BIT][:once] flips one bit of a number, silently"),
    "nan": ("rank", 0.0, "nan:WHERE makes one number NaN, once"),
}
# Silent faults: a defective unit strikes in each micro-batch or sum for as long as it lasts, memory forgets once.
UNITS = ("forward", "gradient", "wire")
MEMORIES = ("weight", "moment", "memory", "file")
PLACES = {
    "forward": "the output of a module in the middle of the model",
    "gradient": "the rank's sum of gradients, after a backward pass",
    "wire": "what the rank sends into the sum over all replicas",
    "weight": "a parameter, between two iterations",
    "moment": "the optimizer's state, between two iterations",
    "memory": "the newest copy of the state in the node's memory",
    "file": "the newest whole checkpoint",
}
ONCE, WIDEST = "once", 64  # bits of the widest number
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


@dataclass(frozen=True)
class Flip:
    """A silent fault: a bit that flips in one number, or a number that becomes NaN."""

    where: str  # one of PLACES
    bit: int | None = None  # 0 is the lowest; None for a random one
    once: bool = False
    nan: bool = False
    draw: float = 0.0  # in [0, 1): stands for the random bit, the same in each strike

    def bit_of(self, width: int) -> int | None:
        """Return the bit in a number of `width` bits; None if that has no such bit."""
        if self.bit is None:
            return int(self.draw * width)
        return self.bit if self.bit < width else None


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
    if name in ("flip", "nan"):
        flip_of(name, detail)
    elif detail and name not in ("exception", "slow"):
        raise InjectError(f"{name} takes no {detail!r}: write {name}")
    return name, detail


def flip_of(name: str, detail: str) -> Flip:
    """Return the silent fault that `flip:WHERE[:BIT][:once]` or `nan:WHERE` means. Raises InjectError."""
    where, *rest = detail.split(":")
    places = PLACES if name == "flip" else [each for each in PLACES if each not in ("memory", "file")]
    if where not in places:
        raise InjectError(f"{name}:{where or '?'}: use one of {', '.join(f'{name}:{each}' for each in places)}")
    once = name == "nan" or where in MEMORIES
    if name == "flip" and rest[-1:] == [ONCE]:
        rest, once = rest[:-1], True
    if not rest:
        return Flip(where, None, once, name == "nan", random.SystemRandom().random())
    number = rest[0]
    if name == "nan" or rest[1:] or not (number.isascii() and number.isdigit()) or int(number) >= WIDEST:
        right = f"nan:{where}" if name == "nan" else f"flip:{where}:BIT with a bit from 0 (the lowest) to {WIDEST - 1}"
        raise InjectError(f"{name}:{detail}: write {right}")
    return Flip(where, int(number), once)


def duration(fault: str, seconds: float) -> float:
    """Return how long a fault lasts that was ordered for `seconds`, or with 0 for its default. Raises InjectError."""
    name, detail = parse(fault)
    if name in ("flip", "nan") and flip_of(name, detail).once:
        return 0.0
    return seconds or FAULTS[name][1]


class Injector:
    """The faults of one rank. `on_order` is called in the channel's thread, the other methods in the main one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep):
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._pending: list[tuple[str, str]] = []
        self._factor, self._slow_until = 1.0, 0.0
        self._spoils = 0
        self._flips: dict[str, tuple[Flip, float]] = {}  # place -> (fault, when it is over)
        self.break_connections: Callable[[], Any] = lambda: None  # set by the owner of the generation's sockets

    def on_order(self, message: Mapping[str, Any]) -> None:
        """Carry out an order of the agent: keys fault and seconds. Raises InjectError for an unknown fault."""
        name, detail = parse(str(message["fault"]))
        seconds = float(message.get("seconds") or FAULTS[name][1])
        if name == "hang-gil":
            hold_gil(seconds)
        elif name == "slow":
            self._factor, self._slow_until = float(detail), self._clock() + seconds
        elif name in ("flip", "nan"):
            flip = flip_of(name, detail)
            with self._lock:
                self._flips[flip.where] = flip, float("inf") if flip.once else self._clock() + seconds
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

    def flip_due(self, where: str) -> Flip | None:
        """Return the silent fault that strikes at this place now, if there is one. Costs one look at a dictionary."""
        if not self._flips:
            return None
        with self._lock:
            flip, until = self._flips.get(where, (None, 0.0))
            if flip is not None and self._clock() >= until:
                del self._flips[where]
                return None
            return flip

    def flip_done(self, flip: Flip) -> None:
        """Note that this fault has struck; one that strikes once is over. Until then it waits for its chance."""
        with self._lock:
            if flip.once and self._flips.get(flip.where, (None, 0.0))[0] is flip:
                del self._flips[flip.where]

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
