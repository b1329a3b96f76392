"""Unicron's checkpoints in the folder of Megatron-LM's `--save`, and those of `--load` in any format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from unicron_transition.iteration.rank_log import warn
from unicron_transition.megatron_lm.arguments import Folders
from unicron_transition.snapshot.checkpoint import CheckpointError, Checkpoints, Writer
from unicron_transition.snapshot.folders import WholeCheckpoint
from unicron_transition.snapshot.foreign import Foreign, Selection
from unicron_transition.snapshot.formats.tracker import TRACKER, megatrons_iteration
from unicron_transition.snapshot.migrate import TrainingState

NO_CHECKPOINT = "{} has no checkpoint, and --exit-on-missing-checkpoint is given"


class LauncherCheckpoints(Checkpoints):
    """Checkpoints that are written to `--save`; without it, none are. The training continues from there, otherwise from
    `--load`, which may have Unicron's checkpoints or Megatron-LM's."""

    needs_beginning = False  # by default Megatron-LM starts anew if the folder is empty

    def __init__(self, folders: Folders, before: Callable[[int], int]):
        folder = folders.save or folders.load
        assert folder is not None
        # None: it chooses its interval by itself.
        interval = (folders.interval or None) if folders.save else 0
        super().__init__(folder, interval, begin_from=folders.load)
        self.begin = Selection(folders.optimizer, folders.iteration)
        self._writes = folders.save is not None
        self._needed = folders.needed
        self._before = before  # before(iteration) returns the samples of all iterations before
        self.choices()  # finds an unusable folder before the model is built

    def whole_ones(self) -> list[WholeCheckpoint]:
        return super().whole_ones() if self._writes else []

    def load(self, state: TrainingState, iteration: int | None = None) -> int | None:
        found = super().load(state, iteration)
        if found is None and self._needed:
            raise CheckpointError(NO_CHECKPOINT.format(self.begin_from or self.folder))
        if found is None and self.begin_from is not None:
            warn(f"--load {self.begin_from} has no checkpoint: the training starts anew")
        return found

    def choices(self) -> list[WholeCheckpoint]:
        all_ones = super().choices()
        own = self.whole_ones() if self.begin_from == self.folder else []
        if own and (theirs := megatrons_iteration(self.folder)) > own[0].iteration:
            raise CheckpointError(
                f"{self.folder} has Megatron-LM's own iteration {theirs}, and Unicron's newest is "
                f"{own[0].iteration}: to begin from Megatron-LM's, move the folders iteration-* away; to go on from "
                f"Unicron's, move {TRACKER} away"
            )
        if not all_ones and self._needed:
            raise CheckpointError(NO_CHECKPOINT.format(self.begin_from or self.folder))
        return all_ones

    def _load_beginning(self, state: TrainingState, folder: Path) -> Foreign:
        found = super()._load_beginning(state, folder)
        position = self._before(found.iteration)
        if self.begin.iteration and found.samples not in (None, position):
            warn(
                f"the data go on at sample {position}, where iteration {found.iteration} begins in this run; "
                f"{folder} was trained with {found.samples} samples: to go on with those that follow, give that "
                "run's --global-batch-size and --rampup-batch-size"
            )
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


def checkpoints(folders: Folders | None, before: Callable[[int], int]) -> LauncherCheckpoints | None:
    """Return the checkpoints; None without folders. Raises :class:`CheckpointError` for an unusable folder."""
    return LauncherCheckpoints(folders, before) if folders is not None and (folders.save or folders.load) else None
