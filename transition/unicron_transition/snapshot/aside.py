"""What a rank has set aside for its agent, which makes a checkpoint's file of it (docs/design/checkpoints.md)."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any


class Aside:
    """The last image of one rank that was to be set aside."""

    def __init__(self) -> None:
        self._path = Path()
        self._done: Future[Any] | None = None

    def note_image(self, path: Path, done: Future[Any]) -> None:
        """path: the second name that the image gets. done: is over when it has it, or cannot have it."""
        self._path, self._done = path, done

    @property
    def is_open(self) -> bool:
        """Whether the agent has not made a file of it yet."""
        return self._done is not None and (not self._done.done() or self._path.exists())

    @property
    def error(self) -> BaseException | None:
        """Why it could not be set aside; None while that may be."""
        return self._done.exception() if self._done is not None and self._done.done() else None

    def forget(self) -> None:
        """The error is known; the checkpoint comes in another way."""
        self._done = None
