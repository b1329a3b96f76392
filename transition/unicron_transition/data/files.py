"""The common part of datasets in shards: reading parts of files, and finding samples."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

Sample = dict[str, Any]  # column, or part of a name -> value
OPEN = 64  # files at once


class OpenFiles:
    """Keeps the most recently read files open. Safe after a fork and in threads, since no file position is shared."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()

    def read(self, path: str, begin: int, size: int) -> bytes:
        """Read `size` bytes at offset `begin`. Raises OSError, also for a file that is too short."""
        descriptor = self._open.pop(path, None)
        if descriptor is None:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if len(self._open) >= OPEN:
                os.close(self._open.popitem(last=False)[1])
        self._open[path] = descriptor
        parts, left = [], size
        while left:
            part = os.pread(descriptor, left, begin + size - left)
            if not part:
                raise OSError(f"{path} ends before byte {begin + size}: it is not whole")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def __getstate__(self) -> dict[str, object]:
        return {"_open": OrderedDict()}

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


class Shards:
    """The shards of a dataset. `counts` has the number of samples of each."""

    def __init__(self, counts: Iterable[int]):
        self._ends = list(accumulate(counts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def find(self, number: int) -> tuple[int, int]:
        """Return (shard, number in it) of a sample. Raises IndexError if there is no such sample."""
        if not 0 <= number < len(self):
            raise IndexError(f"{number} is not one of {len(self)} samples")
        shard = bisect_right(self._ends, number)
        return shard, number - (self._ends[shard - 1] if shard else 0)
