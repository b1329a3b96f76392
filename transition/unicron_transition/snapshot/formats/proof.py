"""Whether main parameters are those of a model: a format that keeps an optimizer's state without the names of its
parameters is read by their order, and this proves it."""

from __future__ import annotations

import numpy as np

from unicron_transition.snapshot.formats.index import Array, BadCheckpoint, Place, Tensor
from unicron_transition.snapshot.formats.written import cast

PIECE = 1 << 20  # elements


def prove(whole: Tensor, dtype: str, found: Array, offset: Place, extent: Place) -> None:
    """Raises BadCheckpoint where these main parameters, rounded, are not the model's of that place; OSError."""
    flat, its = found.reshape(-1), whole.read(offset, extent).reshape(-1)
    for begin in range(0, flat.size, PIECE):
        piece = slice(begin, begin + PIECE)
        if not np.array_equal(_bits(cast(flat[piece], dtype, whole.dtype)), _bits(its[piece])):
            raise BadCheckpoint(
                f"{whole.name}: what its optimizer has in this place, rounded, is not the model's parameter: give "
                '--no-load-optim (begin_with="model"), or save it once with --ckpt-format torch_dist '
                "--dist-ckpt-optim-fully-reshardable"
            )


def _bits(array: Array) -> Array:
    """Elements as bytes: no number is like another."""
    return np.ascontiguousarray(array).view(np.uint8)
