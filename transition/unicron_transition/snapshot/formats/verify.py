"""Whether the files of a checkpoint are as they were written, as far as its format can tell."""

from __future__ import annotations

from pathlib import Path

from unicron_transition.snapshot.formats import opening, own
from unicron_transition.snapshot.formats.index import DAMAGE, BadCheckpoint, Index, Tensor


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
    for block in tensor.blocks:
        if (raw := block.raw(tensor.dtype)) is not None:
            try:
                raw.check()
            except BadCheckpoint:
                raise BadCheckpoint(f"{raw.path}: the bytes of {tensor.name} do not match their checksum") from None
    if tensor.check is not None:
        for box in tensor.boxes():
            tensor.read(*box)
