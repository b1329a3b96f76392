"""Answers about thousands of nodes: most of their words stand in them for each rank, so they are compressed.

A reader that cannot unpack them, as of release 0.2, gets plain ones. An answer that fits into no message becomes an
error that says how to ask for less.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from unicron_ctl.shared.protocol import wire

PLAIN_BYTES = 1 << 20  # longer answers are compressed
MOST_BYTES = 1 << 27  # of an answer: 935 for each node of 8 ranks
LEVEL = 1  # of compression: others make the controller wait, and save little


def encode(data: Any, unpacks: bool) -> bytes:
    """Return the message with an answer. unpacks: its reader can unpack it."""
    plain = msgspec.msgpack.encode(data)
    answer = wire.Answer(ok=True, data=msgspec.Raw(plain))
    if unpacks and len(plain) > PLAIN_BYTES:
        answer = wire.Answer(ok=True, packed=zlib.compress(plain, LEVEL))
    message = wire.encode(answer)
    if len(message) <= wire.MAX_BYTES and len(plain) <= MOST_BYTES:
        return message
    error = f"the answer is too long ({len(plain) / 1e6:.1f} MB): ask for a job, a user, a partition or some nodes"
    return wire.encode(wire.Answer(ok=False, error=error))


def data_of(answer: wire.Answer) -> Any:
    """Return what an answer says. Raises :class:`wire.BadMessage`."""
    if not answer.packed:
        return answer.data
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(answer.packed, MOST_BYTES)
        if not stream.eof:
            raise wire.BadMessage(f"an answer is cut off, or over the limit of {MOST_BYTES} bytes")
        return msgspec.msgpack.decode(plain)
    except (zlib.error, msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise wire.BadMessage(f"an answer cannot be unpacked: {error}") from None
