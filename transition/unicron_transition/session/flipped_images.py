"""A bit that flips on purpose in a copy of the training state, in memory or on disk
(:mod:`unicron_detector.chaos.inject`). It waits until there is a whole one."""

from __future__ import annotations

import contextlib
import mmap
import random
from pathlib import Path

import torch

from unicron_detector.chaos.inject import Flip, injector
from unicron_transition.iteration import flips
from unicron_transition.snapshot import contents, folders
from unicron_transition.snapshot.checkpoint import Checkpoints
from unicron_transition.snapshot.image_format import SHARD, STATE, BadImage, ImagePage, inventory, read_page
from unicron_transition.snapshot.local_state import LocalState

_draw = random.SystemRandom()


def strike(local: LocalState, slot: int, memory: Path | None, checkpoints: Checkpoints | None) -> None:
    """Let a fault strike in this rank's newest image in `memory`, or in the newest whole checkpoint."""
    if memory is not None and (flip := injector.flip_due("memory")) is not None:
        local.wait_whole()  # of this iteration
        own = [each for each in inventory(memory) if each.key.slot == slot and each.key.kind in (STATE, SHARD)]
        _strike_one(flip, sorted(own, key=lambda each: each.key.iteration)[-1:])
    if checkpoints is not None and (flip := injector.flip_due("file")) is not None:
        with contextlib.suppress(OSError, BadImage):  # removed meanwhile
            newest = next((each for each in folders.whole(checkpoints.folder) if not each.foreign), None)
            _strike_one(flip, [read_page(_draw.choice(newest.paths))] if newest is not None else [])


def _strike_one(flip: Flip, images: list[ImagePage]) -> None:
    for found in images:
        with contextlib.suppress(OSError, BadImage):  # overwritten meanwhile
            flip_image(flip, found)


def flip_image(flip: Flip, found: ImagePage) -> bool:
    """Flip a bit in one number of a tensor in the file. Raises OSError, BadImage."""
    try:
        tensors = [each for each in contents.open_image(found).tensors if each[2] >= 0 and each[1]]
    except BadImage:  # a shard in memory: its reader knows its tensors
        tensors = [(torch.float32, found.data_bytes // 4, found.offset)]
    with found.path.open("r+b") as file, mmap.mmap(file.fileno(), found.used) as mapped:
        named = [
            (
                f"{found.path.name} of iteration {found.key.iteration}",
                torch.frombuffer(mapped, dtype=dtype, count=count, offset=begin),
            )
            for dtype, count, begin in tensors
        ]
        struck = flips.strike(flip, named)
        named.clear()
    return struck
