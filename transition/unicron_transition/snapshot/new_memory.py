"""New memory for the tensors of a state, which are going to be filled at once.

In huge pages if the kernel has some: the faults of small ones take longer than the copy.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

HUGE = 2 << 20  # bytes of a huge page
CHUNK = 64 << 20  # bytes that are taken from the kernel at once; what is not used takes no memory
ALIGN = 64  # bytes: each tensor begins at a multiple, as torch's own do


class NewMemory:
    """Tensors side by side in memory of this process, so that small ones are in huge pages, too. Each has a storage of
    its own, and the memory goes back to the kernel with the last tensor in it."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._at = self._end = 0  # what is left of it

    def tensor(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor with any content."""
        size = shape.numel() * dtype.itemsize
        if device.type != "cpu" or not size:
            return torch.empty(shape, dtype=dtype, device=device)
        if self._chunk is None or self._at + size > self._end:
            self._chunk = self._take_chunk(size)
        made = torch.frombuffer(self._chunk, dtype=dtype, count=shape.numel(), offset=self._at)
        self._at += -(-size // ALIGN) * ALIGN
        return made.view(shape)

    def _take_chunk(self, size: int) -> mmap.mmap:
        """Take a chunk for at least `size` bytes, which begin with a huge page."""
        room = max(CHUNK, -(-size // HUGE) * HUGE)
        chunk = mmap.mmap(-1, room + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._at = -torch.frombuffer(chunk, dtype=torch.uint8).data_ptr() % HUGE
        self._end = self._at + room
        with contextlib.suppress(OSError):  # a kernel without them
            chunk.madvise(mmap.MADV_HUGEPAGE, self._at, room)
        return chunk
