"""Asks the kernel for huge pages in new memory that is going to be filled at once: each page of 4 KiB costs a fault, and
these faults take longer than to copy the state there."""

from __future__ import annotations

import ctypes
import mmap

import torch

HUGE = 2 << 20  # bytes of such a page
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def new_tensor(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor whose elements have any values. It does not matter if the kernel gives it no huge pages."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if made.is_cpu:
        begin = -(-made.data_ptr() // HUGE) * HUGE
        end = (made.data_ptr() + made.nbytes) // HUGE * HUGE
        if begin < end:
            _madvise(begin, end - begin, mmap.MADV_HUGEPAGE)
    return made
