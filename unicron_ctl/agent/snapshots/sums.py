"""The checksum of an image's data without torch: an agent looks at what it hands on."""

from __future__ import annotations

import struct

import numpy

from unicron.transition.snapshot.images import SUMS, Found

_SUMS = struct.Struct("<QQ")
_PIECE = 1 << 18  # words at a time: their weights stay in the cache
assert _SUMS.size == SUMS


class Sums:
    """As :func:`migrate.checksum`: the sum of the 64-bit words, the upper half of each mixed into its lower
    one, and that of the words times the odd numbers, both modulo 2^64; bytes behind the last whole word count as words
    from the beginning. Taken piece by piece."""

    def __init__(self) -> None:
        self._plain = self._weighted = self._words = 0

    def add(self, data: memoryview) -> None:
        """The next piece; all but the last are whole words."""
        whole = len(data) // 8 * 8
        words = numpy.frombuffer(data[:whole], dtype="<i8")
        rest = numpy.frombuffer(data[whole:], dtype=numpy.uint8).astype(numpy.uint64)
        weights = 2 * numpy.arange(max(1, min(_PIECE, len(words)), len(rest)), dtype=numpy.uint64) + numpy.uint64(1)
        self._plain += int(rest.sum())
        self._weighted += int((rest * weights[: len(rest)]).sum())
        for begin in range(0, len(words), _PIECE):
            part = words[begin : begin + _PIECE]
            part = (part ^ (part >> 32)).view(numpy.uint64)
            total = int(part.sum(dtype=numpy.uint64))
            self._plain += total
            self._weighted += int((part * weights[: len(part)]).sum(dtype=numpy.uint64)) + 2 * self._words * total
            self._words += len(part)

    def digest(self) -> bytes:
        """Of all so far."""
        return _SUMS.pack(self._plain & (1 << 64) - 1, self._weighted & (1 << 64) - 1)


def sums(data: memoryview) -> bytes:
    """Of data that are all there."""
    found = Sums()
    found.add(data)
    return found.digest()


def sound(found: Found) -> bool:
    """The image's data are what was written. Raises OSError, BadImage for what is none any more."""
    _, data = found.read()
    return sums(data) == found.sums
