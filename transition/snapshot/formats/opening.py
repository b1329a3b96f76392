"""Which format a folder has, and its index."""

from __future__ import annotations

from pathlib import Path

from unicron.transition.snapshot.formats import dcp, own, rank_files, safetensors
from unicron.transition.snapshot.formats.index import BadCheckpoint, Index

TRACKER = "latest_checkpointed_iteration.txt"  # in a folder of Megatron-LM's checkpoints
RELEASE = "release"
KNOWN = "Unicron's own, Megatron-LM's torch_dist and torch, torch DCP, safetensors"


def index_of(folder: Path) -> Index:
    """The index of the newest checkpoint in a folder, or of the checkpoint that the folder is. Raises BadCheckpoint,
    OSError."""
    try:
        found = find(folder)
    except OSError as error:
        raise BadCheckpoint(f"{folder}: {error.strerror or error}") from None
    if found is None:
        raise BadCheckpoint(f"{folder} has no whole checkpoint of a format that is known ({KNOWN})")
    return found


def find(folder: Path) -> Index | None:
    """Find the same; None where there is no checkpoint at all. Raises BadCheckpoint, OSError."""
    if folder.is_dir() and (whole := own.newest(folder)) is not None:
        return own.read(whole)
    if (folder / TRACKER).is_file():
        return _of_megatron_lm(folder)
    if dcp.is_one(folder):
        return dcp.read(folder)
    if rank_files.is_one(folder):
        return rank_files.read(folder)
    return safetensors.read(folder) if safetensors.files(folder) else None


def _of_megatron_lm(folder: Path) -> Index:
    text = (folder / TRACKER).read_text().strip()
    if not (text.isdigit() or text == RELEASE):
        raise BadCheckpoint(f"{folder / TRACKER}: {text[:40]!r} is no iteration: write the number of one that is there")
    at = folder / (RELEASE if text == RELEASE else f"iter_{int(text):07d}")
    if not at.is_dir():
        raise BadCheckpoint(f"{folder / TRACKER} names {at.name}, which is not there: write the number of one that is")
    if not dcp.is_one(at) and not rank_files.is_one(at):
        raise BadCheckpoint(f"{at} is neither torch_dist nor torch: convert it with Megatron-LM")
    index = dcp.read(at) if dcp.is_one(at) else rank_files.read(at)
    if text != RELEASE and index.iteration == 0:
        index.iteration = int(text)
    if text == RELEASE:
        index.iteration = 0
    return index
