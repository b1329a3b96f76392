"""CURVE's boxes (CurveCP, ZeroMQ RFC 26), from the libsodium that libzmq has loaded already."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
from pathlib import Path

import zmq

from unicron_ctl.shared.system.errors import UserError

KEY_BYTES = 32
MAC_BYTES = 16
SCRATCH_BYTES = 65536  # what is shorter needs no room of its own
_MAPS = Path("/proc/self/maps")


@functools.cache
def _library() -> ctypes.PyDLL:
    """The library. Calls keep the interpreter's lock: each takes some microseconds. Raises UserError."""
    zmq.curve_keypair()  # libzmq is loaded, and its libsodium is initialized
    try:
        loaded = next((line.split()[-1] for line in _MAPS.read_text().splitlines() if "libsodium" in line), "")
        library = ctypes.PyDLL(loaded or ctypes.util.find_library("sodium") or "libsodium.so")
    except OSError:
        raise UserError(
            "libsodium is not installed, so nothing can be encrypted: `pip install pyzmq` brings it"
        ) from None
    size, text = ctypes.c_ulonglong, ctypes.c_char_p
    library.crypto_box_beforenm.argtypes = [text, text, text]
    for function in (library.crypto_box_easy_afternm, library.crypto_box_open_easy_afternm):
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, size, text, text]
    return library


def key_pair() -> tuple[bytes, bytes]:
    """A fresh key pair: public, secret."""
    public, secret = ctypes.create_string_buffer(KEY_BYTES), ctypes.create_string_buffer(KEY_BYTES)
    _library().crypto_box_keypair(public, secret)
    return public.raw, secret.raw


class Box:
    """Encryption between two keys. A nonce of 24 bytes must be used once in each direction. One thread may use a
    box."""

    _scratch = ctypes.create_string_buffer(SCRATCH_BYTES)

    def __init__(self, public: bytes, secret: bytes) -> None:
        """Raises ValueError for a wrong public key."""
        library, shared = _library(), ctypes.create_string_buffer(KEY_BYTES)
        if len(public) != KEY_BYTES or library.crypto_box_beforenm(shared, public, secret):
            raise ValueError("no public key")
        self._shared = shared.raw
        self._seal, self._open = library.crypto_box_easy_afternm, library.crypto_box_open_easy_afternm

    def seal(self, data: bytes, nonce: bytes) -> bytes:
        """The data encrypted, MAC_BYTES longer."""
        size = len(data)
        room = self._room(size + MAC_BYTES)
        self._seal(room, data, size, nonce, self._shared)
        return ctypes.string_at(room, size + MAC_BYTES)

    def open(self, sealed: bytes, nonce: bytes) -> bytes:
        """The decrypted data. Raises ValueError when somebody else wrote it."""
        size = len(sealed)
        room = self._room(size)
        if size < MAC_BYTES or self._open(room, sealed, size, nonce, self._shared):
            raise ValueError("not sealed with this key")
        return ctypes.string_at(room, size - MAC_BYTES)

    def _room(self, size: int) -> ctypes.Array[ctypes.c_char]:
        return self._scratch if size <= SCRATCH_BYTES else ctypes.create_string_buffer(size)
