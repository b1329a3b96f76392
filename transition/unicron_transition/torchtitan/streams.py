"""torchtitan's data loaders as a session's `fetch`: any micro-batch by iteration and index.

Stream `index` is the loader of data-parallel rank `index`, of as many ranks as an iteration has micro-batches. It has
one micro-batch for each iteration. A loader reads only forwards; so whoever reads a stream notes the loader's state in
a file now and then, and who takes the stream over goes on from there. The state is a function of the position, so it
does not matter who wrote it, or when.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from unicron_transition.iteration.rank_log import inform, warn

NOTED_SECONDS = 1.0  # of reading, after which a stream's state is noted: so much is read again at most
NOTES = 3  # of a stream that are kept: a job may go back by a few iterations
TOLD_SECONDS = 10.0  # of reading again that the log mentions


class Stream:
    """One loader, with its position: the number of micro-batches that were read."""

    def __init__(self, loader: Any, notes: Path, wanted: int):
        self._loader, self._notes, self.position = loader, notes, 0
        self._warned = False
        begun = time.monotonic()
        for noted in _positions(notes):
            if noted <= wanted and self._load(noted):
                break
        self._batches: Iterator[Any] = iter(loader)
        self._last: Any = None
        self._read_seconds = 0.0
        self._skip_to(wanted)
        if (seconds := time.monotonic() - begun) > TOLD_SECONDS:
            inform(f"data: {notes.name} was read again up to iteration {wanted}, in {seconds:.0f} s")

    def at(self, iteration: int) -> Any:
        """Return the micro-batch of an iteration, the last one that was read or a later one."""
        self._skip_to(iteration)
        if self.position == iteration:
            self._next()
        return self._last

    def is_behind(self, iteration: int) -> bool:
        """Whether another rank has read this stream since, and noted a position nearer to this iteration."""
        if iteration <= self.position:
            return False
        return any(self.position < noted <= iteration for noted in _positions(self._notes))

    def _skip_to(self, iteration: int) -> None:
        while self.position < iteration:
            self._next()

    def _next(self) -> None:
        if self._read_seconds > NOTED_SECONDS:
            self._note()
        begun = time.monotonic()
        try:
            self._last = next(self._batches)
        except StopIteration:
            raise IndexError(
                f"the dataset ends before iteration {self.position}: let it repeat, or give fewer --training.steps"
            ) from None
        self.position += 1
        self._read_seconds += time.monotonic() - begun

    def _note(self) -> None:
        self._read_seconds = 0.0
        path = self._notes / str(self.position)
        half = path.with_suffix(f".{os.getpid()}")
        try:
            self._notes.mkdir(parents=True, exist_ok=True)
            torch.save(_state(self._loader), half)
            half.replace(path)
            # Those ahead stay: the job may have gone back, and comes there again.
            for old in [each for each in _positions(self._notes) if each <= self.position][NOTES:]:
                (self._notes / str(old)).unlink(missing_ok=True)
        except OSError as error:
            if not self._warned:
                self._warned = True
                warn(f"no positions of the data are noted in {self._notes}: {error}; after a loss they are read anew")

    def _load(self, position: int) -> bool:
        try:
            state = torch.load(self._notes / str(position), weights_only=True)
            _plain(self._loader).load_state_dict(self._loader, state)
        except Exception as error:  # damaged, or removed by its reader: an older one, or the beginning, does as well
            warn(f"the position of the data in {self._notes / str(position)} cannot be used: {error}")
            return False
        self.position = position
        return True


class Streams:
    """All streams of a job; a rank opens those that it reads.

    Parameters
    ----------
    build
        `build(index)` returns the loader of a stream.
    notes
        The folder of their positions, which all nodes should share.
    """

    def __init__(self, build: Callable[[int], Any], notes: Path):
        self._build, self._notes = build, notes
        self._open: dict[int, Stream] = {}

    def __call__(self, iteration: int, index: int) -> Any:
        """Return micro-batch `index` of `iteration`."""
        stream = self._open.get(index)
        if stream is None or iteration < stream.position - 1 or stream.is_behind(iteration):
            stream = self._open[index] = Stream(self._build(index), self._notes / f"stream-{index}", iteration)
        return stream.at(iteration)


def _positions(notes: Path) -> list[int]:
    """Return the noted positions, the last first."""
    with contextlib.suppress(OSError):
        return sorted((int(name) for name in os.listdir(notes) if name.isdigit()), reverse=True)
    return []


def _plain(loader: Any) -> Any:
    """Return the class whose state is plain values: torchtitan's own is a pickle of the state of torchdata's loader."""
    of_torchdata = (each for each in type(loader).__mro__ if each.__name__ == "StatefulDataLoader")
    return next(of_torchdata, type(loader))


def _state(loader: Any) -> Any:
    return _plain(loader).state_dict(loader)
