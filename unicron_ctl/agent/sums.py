"""The checksum of an image's data without torch: an agent looks at what it hands on."""

from __future__ import annotations

import struct

import numpy

from transition.memory.images import SUMS, Found

_SUMS = struct.Struct("<QQ")
_PIECE = 1 << 18  # words at a time: their weights stay in the cache
assert _SUMS.size == SUMS


def sums(data: memoryview) -> bytes:
    """As :func:`transition.migrate.checksum`: the sum of the 64-bit words, and that of the words times the odd numbers,
    both modulo 2^64; bytes behind the last whole word count as words from the beginning."""
    whole = len(data) // 8 * 8
    words = numpy.frombuffer(data[:whole], dtype="<u8")
    rest = numpy.frombuffer(data[whole:], dtype=numpy.uint8).astype(numpy.uint64)
    weights = 2 * numpy.arange(max(1, min(_PIECE, len(words)), len(rest)), dtype=numpy.uint64) + numpy.uint64(1)
    plain = int(rest.sum())
    weighted = int((rest * weights[: len(rest)]).sum())
    for begin in range(0, len(words), _PIECE):
        part = words[begin : begin + _PIECE]
        total = int(part.sum(dtype=numpy.uint64))
        plain += total
        weighted += int((part * weights[: len(part)]).sum(dtype=numpy.uint64)) + 2 * begin * total
    return _SUMS.pack(plain & (1 << 64) - 1, weighted & (1 << 64) - 1)


def sound(found: Found) -> bool:
    """The image's data are what was written. Raises OSError, BadImage for what is none any more."""
    _, data = found.read()
    return sums(data) == found.sums
