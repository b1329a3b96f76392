"""Whether the files of a checkpoint are as they were written, as far as its format can tell."""

from __future__ import annotations

import zlib
from pathlib import Path

from unicron.transition.snapshot.formats import opening, own
from unicron.transition.snapshot.formats.index import DAMAGE, Array, BadCheckpoint, Index, Raw, Tensor

PIECE = 1 << 24  # bytes


def problems(folder: Path) -> tuple[Index | None, list[str]]:
    """(the index, what is wrong, a line each). Every tensor is read, one block after the other. Unicron's own files
    have a checksum of all bytes, those of torch one of each tensor; of safetensors there is none, so that only lengths
    and shapes are compared."""
    folder = folder.resolve()
    try:
        index = opening.index_of(folder)
    except BadCheckpoint as error:
        return None, [str(error)]
    if index.format == own.FORMAT:
        found = own.newest(folder)
        wrong = own.check(found) if found is not None else [f"{folder}: it has been removed meanwhile"]
        if wrong:
            return index, wrong
    wrong = []
    for tensor in index.tensors.values():
        try:
            _check(tensor)
        except OSError as error:
            wrong.append(str(error))
        except DAMAGE as error:
            named = isinstance(error, BadCheckpoint)
            wrong.append(str(error) if named else f"{tensor.name}: damaged ({type(error).__name__}: {error})")
    return index, wrong


def _check(tensor: Tensor) -> None:
    """Raises BadCheckpoint, OSError."""
    sums = {}
    for block in tensor.blocks:
        raw = block.find() if block.find is not None else None
        if raw is not None and raw.crc is not None and raw.strides is None:
            if block.whole:
                sums[block.box] = raw
            elif _sum(raw.array()) != raw.crc:
                raise _differs(raw, tensor)
    for box in tensor.boxes():
        found = tensor.read(*box)
        if box in sums and _sum(found) != sums[box].crc:
            raise _differs(sums[box], tensor)


def _differs(raw: Raw, tensor: Tensor) -> BadCheckpoint:
    return BadCheckpoint(f"{raw.path}: the bytes of {tensor.name} do not match their checksum")


def _sum(array: Array) -> int:
    data, found = memoryview(array.reshape(-1).data).cast("B"), 0
    for begin in range(0, len(data), PIECE):
        found = zlib.crc32(data[begin : begin + PIECE], found)
    return found
