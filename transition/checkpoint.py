"""Checkpoints on disk: the last resort of the nearest principle, for a job of which no rank is left
(docs/design/micro-batch-reuse.md).

A file holds what a newcomer gets from a replica (`migrate.TrainingState`): it does not depend on how many ranks there
are. It is written beside the training, from a copy in the host's memory, under another name until it is whole; its
checksums (the zip archive's) are checked before it is used, and a damaged one is passed over for the one before.
Nothing is unpickled but tensors and plain values.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import torch

from transition.migrate import StateMismatch, TrainingState

VERSION = 1
STALE_SECONDS = 86400.0  # a file that was being written when its writer died
# Of ranks that end without a plan the first member saves the state at once, the second after so long, and so on up to
# the RESCUERSth, unless one before it has done so.
RESCUE_SECONDS = 60.0
RESCUERS = 10
LOOK_SECONDS = 0.2
_NAME = re.compile(r"iteration-(\d+)\.pt")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used, or the last one cannot be written; one line that says what to do."""


class Checkpoints:
    """The checkpoints of one job in `folder`, which all its nodes share.

    interval: iterations between two of them; 0 writes one at the end only. keep: how many stay. A write that fails
    costs nothing but itself: it is reported, and the next one is tried when it is due.
    """

    def __init__(self, folder: str | os.PathLike[str], interval: int = 0, keep: int = 2):
        if interval < 0 or keep < 1:
            raise ValueError(f"interval {interval} must be at least 0 and keep {keep} at least 1")
        self.folder, self.interval, self.keep = Path(folder), interval, keep
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None
        self.written: int | None = None  # the iteration of the last one that this process wrote

    def found(self) -> list[tuple[int, Path]]:
        """(iteration to go on with, path) of all that are there, the newest first."""
        if not self.folder.is_dir():
            return []
        matches = ((_NAME.fullmatch(path.name), path) for path in self.folder.iterdir())
        return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)

    def load(self, state: TrainingState) -> int | None:
        """Puts the newest sound one into `state`; returns the iteration to go on with, None where there is none.

        Raises :class:`CheckpointError` when there are some and none can be used: starting anew would hide that.
        """
        reasons = []
        for iteration, path in self.found():
            try:
                data = _read(path)
            except (OSError, CheckpointError) as error:
                reasons.append(f"{path}: {error}")
                _say(f"checkpoint passed over: {reasons[-1]}")
                continue
            _restore(state, data, path)
            return iteration
        if reasons:
            raise CheckpointError(f"no checkpoint can be read ({reasons[0]}): move {self.folder} away to start anew")
        return None

    def due(self, iteration: int) -> bool:
        """Whether one is to be written when `iteration` iterations are done."""
        return bool(self.interval) and iteration % self.interval == 0 and iteration != self.written

    def save(self, state: TrainingState, iteration: int) -> None:
        """Copies the state, and lets a thread write it. Waits for the write before, if that still goes on."""
        self.wait()
        data = {
            "version": VERSION,
            "header": state.header(iteration),
            "tensors": [tensor.detach().to("cpu", copy=True) for tensor in state.tensors()],
        }
        self._error, self.written = None, iteration
        self._writer = threading.Thread(target=self._write, args=(data, iteration), name="unicron-checkpoint")
        self._writer.start()

    def wait(self) -> None:
        """Until the last write is over, however it ended."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def save_last(self, state: TrainingState, iteration: int) -> None:
        """The final one, on disk when this returns. Raises :class:`CheckpointError` when it cannot be written."""
        self.wait()
        if self.written != iteration or self._error is not None:
            self.save(state, iteration)
            self.wait()
        if self._error is not None:
            raise CheckpointError(f"the last checkpoint was not written: {self._error}: make room in {self.folder}")

    def rescue(self, state: TrainingState, iteration: int, place: int) -> None:
        """The state of a rank that nobody leads any more, on disk when this returns. place: of the rank among the
        members; all hold the same, so a later one writes only what those before it have not written in time.

        Raises :class:`CheckpointError` when it cannot be written.
        """
        self.wait()
        began, turn = time.monotonic(), RESCUE_SECONDS * min(place, RESCUERS)
        grew: dict[Path, tuple[tuple[int, int], float]] = {}
        while not self._saved(iteration):
            written = self._being_written(iteration, grew)
            if time.monotonic() - began >= turn and not written:
                self.save_last(state, iteration)
                _say(f"no plan came: the state was saved in {self.folder}, to go on with iteration {iteration}")
                return
            time.sleep(LOOK_SECONDS)

    def _saved(self, iteration: int) -> bool:
        return any(number >= iteration for number, _ in self.found())

    def _being_written(self, iteration: int, grew: dict[Path, tuple[tuple[int, int], float]]) -> bool:
        """Another process is at it: its file has changed within the time that one has. grew: what was seen so far of
        such files, and since when on this process's clock; the file server's may differ by minutes."""
        now, written = time.monotonic(), False
        long_ago = time.time() - RESCUERS * RESCUE_SECONDS
        for path in self.folder.glob(f"iteration-{iteration:08d}.pt.*.new"):
            with contextlib.suppress(OSError):
                status = path.stat()
                found = status.st_mtime_ns, status.st_size
                seen = grew.get(path)
                if seen is None and status.st_mtime < long_ago:
                    continue
                if seen is None or seen[0] != found:
                    seen = grew[path] = found, now
                written = written or now - seen[1] < RESCUE_SECONDS
        return written

    def _write(self, data: dict[str, Any], iteration: int) -> None:
        path = self.folder / f"iteration-{iteration:08d}.pt"
        unfinished = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.new")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                torch.save(data, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
            self._prune()
        except (OSError, RuntimeError) as error:  # torch says RuntimeError for a full disk
            self._error = error
            with contextlib.suppress(OSError):  # a file system that fails may fail at this too
                unfinished.unlink()
            _say(f"checkpoint of iteration {iteration} not written, the training goes on: {error}")

    def _prune(self) -> None:
        for _, path in self.found()[self.keep :]:
            path.unlink(missing_ok=True)
        for path in self.folder.glob("iteration-*.new"):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        data = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # zipfile and torch name damage in many ways
        raise CheckpointError(f"damaged ({type(error).__name__})") from None
    if damaged:
        raise CheckpointError(f"damaged ({damaged} does not match its checksum)")
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise CheckpointError("not a checkpoint of this release")
    return data


def _restore(state: TrainingState, data: dict[str, Any], path: Path) -> None:
    other = CheckpointError(f"{path} is of another model: give the options that it was written with, or another folder")
    try:
        state.adopt(data["header"])
    except (StateMismatch, ValueError, KeyError):
        raise other from None
    mine, saved = list(state.tensors()), data["tensors"]
    if [(tensor.shape, tensor.dtype) for tensor in mine] != [(tensor.shape, tensor.dtype) for tensor in saved]:
        raise other
    for tensor, value in zip(mine, saved, strict=True):
        tensor.copy_(value)


def _say(text: str) -> None:
    print(f"unicron: {text}", file=sys.stderr, flush=True)
