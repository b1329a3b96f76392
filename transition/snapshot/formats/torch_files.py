"""Megatron-LM's older `torch` format: one file of torch's for each tensor and pipeline rank."""

from __future__ import annotations

import re
from pathlib import Path

from unicron.transition.snapshot.formats.index import BadCheckpoint, Index

FORMAT = "torch"
_PART = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")


def is_one(folder: Path) -> bool:
    return folder.is_dir() and any(_PART.fullmatch(path.name) for path in folder.iterdir())


def read(folder: Path) -> Index:
    """The index of the checkpoint in a folder. Raises BadCheckpoint, OSError."""
    raise BadCheckpoint(f"{folder}: the torch format is not read yet")
