"""Finds the checkpoint of a folder, of any format, and makes its index."""

from __future__ import annotations

import contextlib
import gc
import shlex
from collections.abc import Iterator
from pathlib import Path

from unicron_transition.snapshot import folders
from unicron_transition.snapshot.formats import below, beside, dcp, format_table, own
from unicron_transition.snapshot.formats.format_table import LABELS, newest_own
from unicron_transition.snapshot.formats.index import DAMAGE, BadCheckpoint, Index, Tensor, some
from unicron_transition.snapshot.formats.tracker import TRACKER
from unicron_transition.snapshot.reading import names_in


def index_of(folder: Path) -> Index:
    """Return the index of a checkpoint, or of the newest one in a folder of checkpoints. Raises BadCheckpoint."""
    try:
        found = find(folder)
    except OSError as error:
        raise BadCheckpoint(f"{error.filename or folder}: {error.strerror or error}") from None
    except BadCheckpoint as error:
        if (folder / TRACKER).is_file():  # another checkpoint might be whole
            raise BadCheckpoint(f"{error}{hint(folder)}") from None
        raise
    if found is None:
        raise BadCheckpoint(f"{folder} has no whole checkpoint of a format that is known ({LABELS}){hint(folder)}")
    return found


def hint(folder: Path, how: str = "unicronctl checkpoint show {}") -> str:
    """Explain a folder without a checkpoint: why it is not one, or which is the newest whole one below it and why newer
    ones are not whole. how: the command or option that names a checkpoint."""
    if not folder.is_dir():
        return ""
    names = names_in(folder)
    if why := below.without_metadata(folder, names) or (names and below.named_unfinished(folder.absolute())):
        return f"; {why}"
    found = below.Below(find)
    found.look_below(folder)
    mine = "" if found.newest else beside.hint(folder)
    lines = [mine] if mine else []
    if found.newest:
        lines.append(f"; the newest whole one below it: {how.format(shlex.quote(str(found.newest)))}")
        its = found.newest.with_name(found.newest.name.replace(beside.OF_FSDP, "optimizer_"))
        if its != found.newest and dcp.is_one(its):
            lines.append(f"; its optimizer is in {its.name} beside it, torch DCP, too")
    if found.why_not and not mine:
        why_not = [f"{path.relative_to(folder)} ({why})" for path, why in found.why_not.items()]
        lines.append(f"; {'newer ones' if found.newest else 'those below it'} cannot be read: {some(why_not)}")
    if found.cut and not mine:
        lines.append("; there is more below it than what was looked at: name a folder nearer to it")
    return "".join(lines)


def find(folder: Path) -> Index | None:
    """Like :func:`index_of`, but return None if there is no checkpoint at all. Raises BadCheckpoint, OSError."""
    collects = gc.isenabled()
    gc.disable()  # all objects that are made here stay: collecting garbage would take longer than reading
    try:
        index = _read(folder.resolve())
        for tensor in index.tensors.values() if index is not None else ():
            try:
                tensor.check_blocks()
            except BadCheckpoint as error:
                raise BadCheckpoint(f"{folder}: {error}") from None
        return index
    except (BadCheckpoint, OSError):
        raise
    except DAMAGE as error:
        raise BadCheckpoint(
            f"{folder}: damaged, or of a release that is not known ({type(error).__name__}: {str(error)[:100]})"
        ) from None
    finally:
        if collects:
            gc.enable()


def _read(folder: Path) -> Index | None:
    for each in format_table.FORMATS:
        if (index := each.read(folder)) is None:
            continue
        if each.neighbours:
            beside.adopt(index, folder)
            if why := below.named_unfinished(folder):
                beside.doubt(index, f"{folder}: {why}")
        return index
    return None


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[Path]:
    """Keep a job from removing the checkpoint that :func:`index_of` finds. Gives the folder to read it from. Raises
    OSError, and BadCheckpoint if it was removed all the same."""
    with contextlib.ExitStack() as stack:
        at, kept = folder.resolve(), True
        while (whole := newest_own(at)) is not None:
            kept = stack.enter_context(folders.holding(whole.folder))
            if kept or whole.folder.exists():
                at = whole.folder
                break  # otherwise it was removed just now, and there is a newer one
        try:
            yield at
        except FileNotFoundError as error:
            if at.exists() and kept:
                raise
            raise BadCheckpoint(
                f"{at} was removed while it was read: {error.filename} is gone; read a newer one, or from where its "
                "folder can be written to: it is kept then"
            ) from None


# ------------------------------------------------------------ whether it is sound
def verify(folder: Path) -> tuple[Index | None, list[str]]:
    """Return the index, and a line for each fault of the files that their format can show.

    Every tensor is read, one block at a time. Unicron's own files have a checksum of all bytes, and torch's have one of
    each tensor. Safetensors have none, so only lengths and shapes are compared.
    """
    folder = folder.resolve()
    try:
        index = index_of(folder)
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
        except (BadCheckpoint, OSError) as error:
            wrong.append(str(error))
        except DAMAGE as error:
            wrong.append(f"{tensor.name}: damaged ({type(error).__name__}: {error})")
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
