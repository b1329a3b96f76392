"""Unicron's checkpoints in the folders of Megatron-LM's `--save` and `--load`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unicron.transition.megatron_lm.arguments import Folders
from unicron.transition.snapshot.checkpoint import CheckpointError, Checkpoints, Writer
from unicron.transition.snapshot.folders import Found
from unicron.transition.snapshot.migrate import TrainingState

NEEDED = "{} has no checkpoint, and --exit-on-missing-checkpoint is given"
TRACKER = "latest_checkpointed_iteration.txt"  # in a folder of Megatron-LM's own checkpoints


class SavedAndLoaded(Checkpoints):
    """Written to `--save`. Gone on from there, else from `--load`; with no `--save` nothing is written."""

    def __init__(self, folders: Folders):
        folder = folders.save or folders.load
        assert folder is not None
        # Without --save-interval it finds its interval by itself.
        super().__init__(folder, (folders.interval or None) if folders.save else 0)
        self._finetune = folders.finetune
        self._writes = folders.save is not None
        other = folders.load if folders.load != folders.save else None
        self._other = Checkpoints(other) if other is not None and self._writes else None
        self._needed = folders.needed
        self._check_whose(folders)

    def _check_whose(self, folders: Folders) -> None:
        for folder in (folders.load, folders.save):
            if folder is not None and Path(folder, TRACKER).exists() and not self._found_anywhere():
                raise CheckpointError(
                    f"{folder} holds checkpoints of Megatron-LM's own format, which unicron cannot go on from: give "
                    "another folder, or run the job with --unicron-mode=restart"
                )

    def _found_anywhere(self) -> bool:
        return bool(super().found() or (self._other is not None and self._other.found()))

    def _weights(self) -> list[Found]:
        """What a fine-tuning begins with, as if it were of iteration 0."""
        source = self._other or self
        return [each._replace(iteration=0) for each in Checkpoints.found(source)]

    def found(self) -> list[Found]:
        return [] if self._finetune and not self._writes else super().found()

    def load_one(self, state: TrainingState, found: Found, alone: bool = False) -> bool:
        if not self._finetune or found not in self._weights():
            return super().load_one(state, found, alone)
        sound = super().load_one(state, found, alone=True)
        self.newest = 0
        return sound

    def load(self, state: TrainingState, iteration: int | None = None) -> int | None:
        if self._finetune and not self.found():
            if any(self.load_one(state, each) for each in self._weights()):
                return 0
            raise CheckpointError("--finetune finds no sound checkpoint in --load: give another folder")
        if self._other is not None and not any(iteration in (None, each.iteration) for each in self.found()):
            return self._other.load(state, iteration)
        found = super().load(state, iteration)
        if found is None and self._needed:
            raise CheckpointError(NEEDED.format(self.folder))
        return found

    def choices(self) -> list[Found]:
        found = super().choices()
        if not found and self._finetune:
            found = self._weights()
            if not found:
                raise CheckpointError("--finetune finds no checkpoint in --load: give another folder")
        if not found and self._other is not None:
            found = self._other.choices()
        if not found and self._needed:
            raise CheckpointError(NEEDED.format(self.folder))
        return found

    @property
    def destination(self) -> Path | None:
        return self.folder if self._writes else None

    def is_due(self, iteration: int) -> bool:
        return self._writes and super().is_due(iteration)

    def save_last(self, state: TrainingState, iteration: int, writer: Writer | None = None) -> None:
        if self._writes:
            super().save_last(state, iteration, writer)

    def rescue(self, *arguments: Any, **keywords: Any) -> None:
        if self._writes:
            super().rescue(*arguments, **keywords)


def checkpoints(folders: Folders | None) -> SavedAndLoaded | None:
    """None where neither option was given. Raises :class:`CheckpointError` for a folder of another kind."""
    return SavedAndLoaded(folders) if folders is not None and (folders.save or folders.load) else None
