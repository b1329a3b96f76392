"""Which format a folder has, and its index."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from unicron.transition.snapshot import folders
from unicron.transition.snapshot.formats import beside, dcp, own, rank_files, safetensors, torch_files
from unicron.transition.snapshot.formats.index import DAMAGE, BadCheckpoint, Index
from unicron.transition.snapshot.formats.tracker import RELEASE, TRACKER, is_number, problem, tracked

LEVELS, MOST_ENTRIES = 2, 1000  # how far below a folder is looked for a checkpoint, and at how many names of each
KNOWN = "Unicron's own, Megatron-LM's torch_dist and torch, torch DCP, safetensors"


def index_of(folder: Path) -> Index:
    """The index of the newest checkpoint in a folder, or of the checkpoint that the folder is. Raises BadCheckpoint,
    OSError."""
    try:
        found = find(folder)
    except OSError as error:
        raise BadCheckpoint(f"{error.filename or folder}: {error.strerror or error}") from None
    if found is None:
        raise BadCheckpoint(f"{folder} has no whole checkpoint of a format that is known ({KNOWN}){hint(folder)}")
    return found


def hint(folder: Path) -> str:
    """What people may have meant by a folder without a checkpoint: the newest one below it, for example."""
    below = _below(folder, LEVELS)
    if below is not None:
        return f"; {below} has one"
    if folder.is_dir() and any(folder.glob("pytorch_model*.bin")):
        return f"; pytorch_model.bin is a pickle: save it as {safetensors.NAME} with transformers' save_pretrained"
    return beside.hint(folder) if folder.is_dir() else ""


def _below(folder: Path, levels: int) -> Path | None:
    """The folder with the highest number in its name that looks like a checkpoint, not far below this one."""
    try:
        with os.scandir(folder) as entries:
            some = itertools.islice(entries, MOST_ENTRIES)
            inner = [folder / each.name for each in some if each.is_dir(follow_symlinks=False)]
    except OSError:
        return None
    inner.sort(key=_rank, reverse=True)
    for path in inner:
        if _looks(path):
            return path
        if levels > 1 and (found := _below(path, levels - 1)) is not None:
            return found
    return None


def _rank(folder: Path) -> tuple[bool, list[int]]:
    """By which folders are looked at: a newer one has a higher number, and some have a model's optimizer alone."""
    return not folder.name.startswith("optim"), [int(number) for number in re.findall(r"[0-9]{1,9}", folder.name)]


def _looks(folder: Path) -> bool:
    names = (TRACKER, dcp.METADATA, safetensors.NAME, f"{safetensors.NAME}.index.json", torch_files.FIRST)
    return any((folder / name).is_file() for name in names) or rank_files.is_one(folder) or bool(own.newest(folder))


def find(folder: Path) -> Index | None:
    """Find the same; None where there is no checkpoint at all. Raises BadCheckpoint, OSError."""
    collects = gc.isenabled()
    gc.disable()  # what is made here stays: looking through it for garbage takes longer than reading it
    try:
        index = _find(folder)
        if index is not None:
            _check_blocks(folder, index)
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


def _check_blocks(folder: Path, index: Index) -> None:
    for tensor in index.tensors.values():
        try:
            tensor.check_blocks()
        except BadCheckpoint as error:
            raise BadCheckpoint(f"{folder}: {error}") from None


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Path]:
    """The checkpoint that :func:`index_of` finds stays meanwhile, though a job may remove its old ones and write new
    ones. Gives the folder to read it from. Raises OSError, and BadCheckpoint for one that was removed all the same."""
    with contextlib.ExitStack() as stack:
        at, kept = folder.resolve(), True
        while (whole := _own(at)) is not None:
            kept = stack.enter_context(folders.held(whole.folder))
            if kept or whole.folder.exists():
                at = whole.folder
                break  # else it was removed just now, and there is a newer one
        try:
            yield at
        except FileNotFoundError as error:
            if at.exists() and kept:
                raise
            raise BadCheckpoint(
                f"{at} was removed while it was read: {error.filename} is gone; read a newer one, or from where its "
                "folder can be written to: it is kept then"
            ) from None


def _own(folder: Path) -> folders.Found | None:
    """The newest one, where it is one of Unicron's own."""
    whole = own.newest(folder) if folder.is_dir() else None
    return whole if whole is not None and whole.iteration >= megatrons_iteration(folder) else None


def _find(folder: Path) -> Index | None:
    folder = folder.resolve()
    if (whole := _own(folder)) is not None:
        return own.read(whole)
    if (folder / TRACKER).is_file():
        return _of_megatron_lm(folder)
    if rank_files.is_one(folder) and not dcp.is_one(folder):
        return rank_files.read(folder)
    index = dcp.read(folder) if dcp.is_one(folder) else safetensors.read(folder) or torch_files.read(folder)
    if index is not None:
        beside.adopt(index, folder)
    return index


def megatrons_iteration(folder: Path) -> int:
    """The iteration of the newest checkpoint of Megatron-LM's own in a folder; -1 where it names none. Raises
    OSError."""
    text = tracked(folder)
    return int(text) if is_number(text) else -1


def _of_megatron_lm(folder: Path) -> Index:
    if why := problem(folder):
        raise BadCheckpoint(why)
    text = tracked(folder)
    at = folder / (RELEASE if text == RELEASE else f"iter_{int(text):07d}")
    if not at.is_dir():
        raise BadCheckpoint(f"{folder / TRACKER} names {at.name}, which is not there: write the number of one that is")
    if not dcp.is_one(at) and not rank_files.is_one(at):
        raise BadCheckpoint(
            f"{at} is half-written, or neither torch_dist nor torch: write the number of another one into {TRACKER}, "
            "or convert it with Megatron-LM"
        )
    index = dcp.read(at) if dcp.is_one(at) else rank_files.read(at)
    if text != RELEASE and index.iteration == 0:
        index.iteration = int(text)
    if text == RELEASE:
        index.iteration = 0
    return index
