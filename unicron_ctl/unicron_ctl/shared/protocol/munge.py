"""Makes munge credentials, and reads their makers and payloads (docs/design/trust.md). It calls libmunge, because one
process for each of a thousand agents that come back together would take too long."""

from __future__ import annotations

import ctypes
import functools
import os
import pwd
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from unicron_ctl.shared.system.time_limit import TimeLimit

TIME_LIMIT = 3.0  # seconds for one call: libmunge itself waits longer for a munged that was stopped
HANGING = 8  # calls that hang at once
NAME_SECONDS, NAMES_HANGING = 1.0, 4  # for the name service to tell a user's name; its calls that hang at once
LIBRARY = "libmunge.so.2"
MOST_BYTES = 4096  # of a credential: one of ours has some 300
# munge.h: munge_err_t, munge_opt_t
_SUCCESS, _NO_SOCKET, _EXPIRED, _REWOUND, _REPLAYED = 0, 6, 15, 16, 17
_NOT_THE_CREDENTIAL = frozenset((1, 4, 5, 6, 7))  # snafu, overflow, no memory, socket, time-out: munged's own trouble
_OPTION_SOCKET = 8
_AUTH_INFO = re.compile(r"^[ \t]*AuthInfo=(?:[^#\n]*,)?socket=([^,\s]+)", re.IGNORECASE | re.MULTILINE)
T = TypeVar("T")
_calls = TimeLimit(TIME_LIMIT, HANGING, "unicron-munge")
_names = TimeLimit(NAME_SECONDS, NAMES_HANGING, "unicron-names")


@dataclass(frozen=True)
class Credential:
    """A valid credential."""

    uid: int  # its maker's
    payload: bytes
    replayed: bool = False  # it was read before on this host


class MungeError(Exception):
    """There is no valid credential; the text says why."""

    def __init__(self, reason: str, outage: bool) -> None:
        super().__init__(reason)
        self.outage = outage  # munge gave no verdict, so another try may succeed


def make_credential(payload: str) -> str:
    """Make a credential of this process's user with this payload. Raises MungeError."""
    return _within(lambda: _encode(payload.encode()))


def unmunge(credential: str) -> Credential:
    """Read a credential; that it was read before on this host is no error. Raises MungeError."""
    if not credential:
        raise MungeError("there is no munge credential", outage=False)
    if len(credential) > MOST_BYTES:
        raise MungeError(f"{len(credential)} characters are no munge credential", outage=False)
    return _within(lambda: _decode(credential.encode()))


def user_name(uid: int) -> str:
    """Return the user's name; "" if the name service is away or does not know it."""
    try:
        return _names.run(lambda: pwd.getpwuid(uid).pw_name)
    except (KeyError, TimeoutError):
        return ""


def _within(work: Callable[[], T]) -> T:
    try:
        return _calls.run(work)
    except TimeoutError:
        raise MungeError(f"munged has not answered within {TIME_LIMIT:g} s", outage=True) from None


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        raise MungeError(f"{LIBRARY} is not installed", outage=True) from None
    library.munge_strerror.restype = ctypes.c_char_p
    library.munge_ctx_create.restype = ctypes.c_void_p
    return library


def _socket() -> str:
    """Return the path of munged's socket from the environment or slurm.conf(5) (AuthInfo); "" for munge's default."""
    if path := os.environ.get("MUNGE_SOCKET", ""):
        return path
    try:
        text = Path(os.environ.get("SLURM_CONF", "/etc/slurm/slurm.conf")).read_text(errors="replace")
    except OSError:
        return ""
    match = _AUTH_INFO.search(text)
    return match.group(1) if match else ""


def _context(library: ctypes.CDLL) -> ctypes.c_void_p | None:
    """Make a munge context for a socket other than the default; None for the default."""
    if not (path := _socket()):
        return None
    context = ctypes.c_void_p(library.munge_ctx_create())
    library.munge_ctx_set(context, ctypes.c_int(_OPTION_SOCKET), ctypes.c_char_p(path.encode()))
    return context


def _encode(payload: bytes) -> str:
    library, credential = _library(), ctypes.c_void_p()
    context = _context(library)
    try:
        error = library.munge_encode(ctypes.byref(credential), context, payload, ctypes.c_int(len(payload)))
        if error != _SUCCESS:
            raise _problem(library, error)
        return ctypes.string_at(credential).decode()
    finally:
        _free(credential)
        if context is not None:
            library.munge_ctx_destroy(context)


def _decode(credential: bytes) -> Credential:
    library, buffer, length = _library(), ctypes.c_void_p(), ctypes.c_int()
    uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
    context = _context(library)
    try:
        error = library.munge_decode(
            credential, context, ctypes.byref(buffer), ctypes.byref(length), ctypes.byref(uid), ctypes.byref(gid)
        )
        if error not in (_SUCCESS, _REPLAYED):
            raise _problem(library, error)
        payload = ctypes.string_at(buffer, length.value) if buffer else b""
        return Credential(uid.value, payload, error == _REPLAYED)
    finally:
        _free(buffer)
        if context is not None:
            library.munge_ctx_destroy(context)


def _problem(library: ctypes.CDLL, error: int) -> MungeError:
    text = (library.munge_strerror(error) or b"unknown error").decode(errors="replace")
    if error in (_EXPIRED, _REWOUND):
        text += ": compare the clocks of the two nodes"
    if error == _NO_SOCKET:
        where = _socket() or "at its usual socket"
        text += f" ({where}): does munged run, and is its socket in this container, if it is one?"
    return MungeError(f"munge: {text}", outage=error in _NOT_THE_CREDENTIAL or error in (_EXPIRED, _REWOUND))


def _free(buffer: ctypes.c_void_p) -> None:
    if buffer:
        ctypes.CDLL(None).free(buffer)
