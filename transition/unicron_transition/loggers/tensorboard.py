"""TensorBoard's event files."""

from __future__ import annotations

import os
from typing import Any

from unicron_transition.loggers.logger import Logger, needed


class TensorBoard(Logger):
    """Writes event files into `folder`, which all nodes share; one file for each rank that was the first one. A file
    begins with the step from which on TensorBoard passes over what is in earlier files, so no step shows twice. Raises
    ValueError where tensorboard is not installed."""

    def __init__(self, folder: str | os.PathLike[str]):
        super().__init__()
        self._folder = os.fspath(folder)
        needed("tensorboard", "tensorboard")
        self._make = needed("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer: Any = None

    def _opened(self, first: int) -> int:
        self._writer = self._make(self._folder, purge_step=first)
        return first - 1

    def _write(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def _flush(self) -> None:
        self._writer.flush()

    def _closed(self) -> None:
        self._writer.close()
