"""The table of formats: how a checkpoint of each is recognised, read and written. A new format is a row here, and the
modules that the row names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from unicron_transition.snapshot import folders
from unicron_transition.snapshot.formats import (
    dcp,
    own,
    rank_files,
    safetensors,
    torch_files,
    write_dcp,
    write_safetensors,
)
from unicron_transition.snapshot.formats.index import BadCheckpoint, Index
from unicron_transition.snapshot.formats.tracker import RELEASE, TRACKER, megatrons_iteration, problem, read_tracker
from unicron_transition.snapshot.formats.written import Options


@dataclass(frozen=True)
class Format:
    """One format. The rows are tried in order, and the first that can read a folder counts."""

    name: str
    """The name in `--format` and in what `show` prints."""
    label: str
    """The name in messages."""
    is_there: Callable[[Path, Sequence[str], Sequence[str]], bool]
    """Whether a folder holds such a checkpoint, whole or not, judging by the names of its files and folders."""
    read: Callable[[Path], Index | None]
    """Return the index of a folder or file, None for another format. Raises BadCheckpoint, OSError."""
    write: Callable[[Path, Index, Options], None] | None = None
    """Fill an empty folder. Raises BadCheckpoint, OSError. None for a format that is only read."""
    neighbours: bool = False
    """Whether training libraries put their own files beside it."""
    checksums: bool = True
    """Whether damage to a tensor's bytes can be detected."""
    weights_only: bool = False
    """Whether it holds a model's weights alone, under Hugging Face's names and in any precision."""
    has_their_names: Callable[[Index], bool] = lambda index: False
    """Whether an index of this format is likely to have Hugging Face's names."""


def newest_own(folder: Path) -> folders.WholeCheckpoint | None:
    """Return Unicron's newest checkpoint in a folder, None if Megatron-LM has a newer one there."""
    whole = own.newest(folder) if folder.is_dir() else None
    return whole if whole is not None and whole.iteration >= megatrons_iteration(folder) else None


def _read_own(folder: Path) -> Index | None:
    whole = newest_own(folder)
    return own.read(whole) if whole is not None else None


def _read_megatrons(folder: Path) -> Index | None:
    """Read the checkpoint that Megatron-LM's tracker file names."""
    if not (folder / TRACKER).is_file():
        return None
    if why := problem(folder):
        raise BadCheckpoint(why)
    text = read_tracker(folder)
    at = folder / (RELEASE if text == RELEASE else f"iter_{int(text):07d}")
    if not at.is_dir():
        if (of_verl := folder / f"global_step_{text}").is_dir():
            raise BadCheckpoint(f"{folder / TRACKER} is verl's, and names {of_verl.name}: its actor is the model")
        raise BadCheckpoint(f"{folder / TRACKER} names {at.name}, which is not there: write the number of one that is")
    index = dcp.read(at) or rank_files.read(at)
    if index is None:
        raise BadCheckpoint(
            f"{at} is half-written, or neither torch_dist nor torch: write the number of another one into {TRACKER}, "
            "or convert it with Megatron-LM"
        )
    if text == RELEASE:
        index.iteration = 0
    elif index.iteration == 0:
        index.iteration = int(text)
    return index


def _has_own(folder: Path, files: Sequence[str], inner: Sequence[str]) -> bool:
    return any(folders.FOLDER.fullmatch(name) for name in [folder.name, *inner]) and own.newest(folder) is not None


def _has_rank_files(folder: Path, files: Sequence[str], inner: Sequence[str]) -> bool:
    return any(name.startswith("mp_rank_") for name in inner) and rank_files.is_one(folder)


def _files(*names: str, suffix: str = "\0") -> Callable[[Path, Sequence[str], Sequence[str]], bool]:
    """Look for a file with one of these names, or with this suffix."""

    def is_there(folder: Path, files: Sequence[str], inner: Sequence[str]) -> bool:
        return not set(names).isdisjoint(files) or any(name.endswith(suffix) for name in files)

    return is_there


FORMATS = (
    Format(own.FORMAT, "Unicron's own", _has_own, _read_own),
    Format(
        dcp.TORCH_DIST,
        "Megatron-LM's torch_dist and torch",
        _files(TRACKER),
        _read_megatrons,
        write=write_dcp.write_megatrons,
    ),
    Format(
        dcp.DCP,
        "torch DCP",
        _files(dcp.METADATA, suffix=dcp.SUFFIX),
        dcp.read,
        write=write_dcp.write_dcp,
        neighbours=True,
    ),
    Format(rank_files.FORMAT, "mp_rank_*", _has_rank_files, rank_files.read),
    Format(
        safetensors.FORMAT,
        "safetensors",
        _files(f"{safetensors.NAME}.index.json", suffix=safetensors.SUFFIX),
        safetensors.read,
        write=write_safetensors.write,
        neighbours=True,
        checksums=False,
        weights_only=True,
        has_their_names=lambda index: True,
    ),
    Format(
        torch_files.FORMAT,
        "pytorch_model.bin",
        _files(torch_files.FIRST, torch_files.MODEL, f"{torch_files.MODEL}.index.json"),
        torch_files.read,
        neighbours=True,
        weights_only=True,
        has_their_names=lambda index: bool(index.common.facts.heads),
    ),
)
BY_NAME = {each.name: each for each in FORMATS}
EXPORTS = tuple(each.name for each in FORMATS if each.write is not None)
LABELS = ", ".join(each.label for each in FORMATS)
