"""Which format a folder has, and its index."""

from __future__ import annotations

import contextlib
import gc
import shlex
from collections.abc import Iterator
from pathlib import Path

from unicron_transition.snapshot import folders
from unicron_transition.snapshot.formats import below, beside, dcp, own, rank_files, safetensors, torch_files
from unicron_transition.snapshot.formats.index import DAMAGE, BadCheckpoint, Index, some
from unicron_transition.snapshot.formats.tracker import RELEASE, TRACKER, is_number, problem, tracked

KNOWN = "Unicron's own, Megatron-LM's torch_dist and torch, torch DCP, pytorch_model.bin, safetensors"


def index_of(folder: Path) -> Index:
    """The index of the newest checkpoint in a folder, or of the checkpoint that the folder is. Raises BadCheckpoint,
    OSError."""
    try:
        found = find(folder)
    except OSError as error:
        raise BadCheckpoint(f"{error.filename or folder}: {error.strerror or error}") from None
    except BadCheckpoint as error:
        if (folder / TRACKER).is_file():  # another one may be whole
            raise BadCheckpoint(f"{error}{hint(folder)}") from None
        raise
    if found is None:
        raise BadCheckpoint(f"{folder} has no whole checkpoint of a format that is known ({KNOWN}){hint(folder)}")
    return found


def hint(folder: Path, how: str = "unicronctl checkpoint show {}") -> str:
    """What people may have meant by a folder without a checkpoint: why it is none, or the newest whole one below it,
    and why newer ones are not whole. how: what people write to name one."""
    if not folder.is_dir():
        return ""
    names = beside.names_in(folder)
    if why := below.without_metadata(folder, names) or (names and below.named_unfinished(folder.absolute())):
        return f"; {why}"
    found = below.Below(find)
    found.look_below(folder)
    mine = "" if found.newest else beside.hint(folder)
    why_not = [f"{path.relative_to(folder)} ({why})" for path, why in found.why_not.items()]
    said = [mine] if mine else []
    if found.newest:
        said.append(f"; the newest whole one below it: {how.format(shlex.quote(str(found.newest)))}")
        its = found.newest.with_name(found.newest.name.replace(beside.OF_FSDP, "optimizer_"))
        if its != found.newest and dcp.is_one(its):
            said.append(f"; its optimizer is in {its.name} beside it, torch DCP, too")
    if why_not and not mine:
        said.append(f"; {'newer ones' if found.newest else 'those below it'} cannot be read: {some(why_not)}")
    if found.cut and not mine:
        said.append("; there is more below it than what was looked at: name a folder nearer to it")
    return "".join(said)


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
        if why := below.named_unfinished(folder):
            beside.doubt(index, f"{folder}: {why}")
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
        if (of_verl := folder / f"global_step_{text}").is_dir():
            raise BadCheckpoint(f"{folder / TRACKER} is verl's, and names {of_verl.name}: its actor is the model")
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
