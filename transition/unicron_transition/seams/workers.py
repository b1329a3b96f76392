"""Processes of multiprocessing, such as torch's data loader workers. If SIGTERM does nothing to the process that starts
them, it does nothing to them either, until they are told to end."""

from __future__ import annotations

import multiprocessing.popen_fork
import multiprocessing.popen_forkserver
import multiprocessing.popen_spawn_posix
import multiprocessing.resource_tracker
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

ENDS = signal.SIGRTMIN + 9  # ends such a process in the place of SIGTERM
END_SECONDS = 1.0  # for the process to act on it
_END_BIT = 1 << ENDS - 1  # in a mask of proc(5)
_BLOCKED_SIGNALS = (signal.SIGTERM, ENDS)  # while such a process starts
_POPEN: Any = multiprocessing.popen_fork.Popen
_LATER: tuple[Any, ...] = (multiprocessing.popen_spawn_posix.Popen, multiprocessing.popen_forkserver.Popen)
_handler: Callable[..., None]  # the handler of SIGTERM that does nothing
_of_torch = False  # this process is a worker of torch's


def outlive_sigterm() -> None:
    """Let :data:`ENDS` end this process, whose handler of SIGTERM does nothing."""
    signal.signal(ENDS, _end)


def unblock_signals() -> None:
    """Unblock the signals that this process blocked during its start."""
    if ENDS in signal.pthread_sigmask(signal.SIG_BLOCK, []):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED_SIGNALS)


def _end(*_: object) -> None:
    signal.signal(ENDS, signal.SIG_IGN)  # tells the sender that the signal has arrived
    if signal.getsignal(signal.SIGTERM) is _handler:
        if _of_torch:
            os._exit(0)  # as torch's own handler does
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)  # runs the user's handler, if there is one


def keep_handler(handler: Callable[..., None], settle: Callable[[bool], None]) -> None:
    """Give this handler of SIGTERM, while it is set here, to each process that multiprocessing starts. The process
    blocks both signals until it calls :func:`unblock_signals`: a fork at once, any other (`spawn`, `forkserver`) in
    `settle`, before anything else. `terminate` still ends all of them."""
    global _handler
    _handler = handler
    _keep_in_torch()
    _POPEN.terminate = _ending(_POPEN.terminate)
    for kind in (_POPEN, *_LATER):
        kind._launch = _deaf(kind._launch, settle if kind in _LATER else None)


def _outlives() -> bool:
    return signal.getsignal(signal.SIGTERM) is _handler


def _keep_in_torch() -> None:
    """Keep the handler in torch's workers, which set their own. They exit by themselves: torch takes a kill for a
    failure."""
    torch: Any = sys.modules.get("torch.utils.data._utils.signal_handling")
    if torch is None:
        return
    own = torch._set_worker_signal_handlers

    def set_handlers(*arguments: Any) -> None:
        global _of_torch
        _of_torch = _outlives()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # torch's handler would end the process
        try:
            own(*arguments)
            if _of_torch:
                signal.signal(signal.SIGTERM, _handler)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    torch._set_worker_signal_handlers = set_handlers


def _ending(terminate: Callable[..., None]) -> Any:
    def terminate_or_kill(self: Any) -> None:
        blocked, caught = _masks(self.pid) if self.returncode is None else (0, 0)  # in one read: the process goes on
        if blocked & _END_BIT:  # it is starting
            self.kill()
        elif caught & _END_BIT:
            self._send_signal(ENDS)
            self.wait(END_SECONDS)
            if _masks(self.pid)[1] & _END_BIT:
                self.kill()
        else:
            terminate(self)

    return terminate_or_kill


def _deaf(launch: Callable[..., None], settle: Callable[[bool], None] | None) -> Any:
    def launch_deaf(self: Any, process: Any) -> None:
        outlives = _outlives()
        if settle is not None:
            process.unicron_settling = _Settling(settle, outlives)  # unpickled last, after its target
            # Starting it unblocks SIGTERM in some releases of Python (docs/behaviour/python-signals.md).
            multiprocessing.resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS if outlives else ())
        try:
            launch(self, process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return launch_deaf


class _Settling:
    """Calls a function when it is unpickled."""

    def __init__(self, settle: Callable[[bool], None], outlives: bool) -> None:
        self._call = (settle, (outlives,))

    def __reduce__(self) -> tuple[Callable[[bool], None], tuple[bool]]:
        return self._call


def _masks(pid: int) -> tuple[int, int]:
    """Return the masks of the signals that a child blocks and handles (SigBlk and SigCgt of proc(5))."""
    try:
        with open(f"/proc/{pid}/status") as file:
            masks = re.findall(r"^Sig(?:Blk|Cgt):\s*([0-9a-f]+)", file.read(), re.MULTILINE)
    except OSError:
        return 0, 0
    blocked, caught = (int(mask, 16) for mask in masks)
    return blocked, caught
