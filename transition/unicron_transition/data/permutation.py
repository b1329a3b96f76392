"""A permutation of any number of samples that needs no table: each place is computed from its number.

A Feistel network of ROUNDS rounds over the smallest even number of bits that holds the size, and cycle walking: a
result that is no sample is put in again, until it is one. See J. Black and P. Rogaway, "Ciphers with arbitrary finite
domains", CT-RSA 2002. It shuffles; it keeps nothing secret.
"""

from __future__ import annotations

import hashlib
import struct

ROUNDS = 6
MASK = (1 << 64) - 1


class Permutation:
    """A bijection of 0 to size - 1, another one for each key. Raises ValueError for a size below 1."""

    def __init__(self, size: int, *key: int):
        if size < 1:
            raise ValueError(f"a permutation of {size} samples: there must be one at least")
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._low = (1 << self._half) - 1
        seed = hashlib.blake2b(repr((size, *key)).encode(), digest_size=8 * ROUNDS).digest()
        self._keys = struct.unpack(f"<{ROUNDS}Q", seed)

    def __call__(self, number: int) -> int:
        """Where sample `number` goes. Raises IndexError for a number outside."""
        if not 0 <= number < self.size:
            raise IndexError(f"{number} is not one of {self.size} samples")
        place = self._walk(number)
        while place >= self.size:
            place = self._walk(place)
        return place

    def _walk(self, number: int) -> int:
        left, right = number >> self._half, number & self._low
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & self._low)
        return left << self._half | right


def _mixed(value: int) -> int:
    """The finalizer of SplitMix64 (G. L. Steele, D. Lea and C. H. Flood, OOPSLA 2014)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31
