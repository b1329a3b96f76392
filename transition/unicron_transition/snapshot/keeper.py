"""Copies a rank's training state to memory that outlives the rank, beside the training (docs/design/memory.md).

A thread copies during the next forward and backward passes, and the session waits for it before parameters change. An
error costs nothing but copies.

A state is useful only if all places have it. So no image is overwritten before a newer one is whole in all ranks: all
wait for theirs before they agree to step, and the state that a generation began with stays until its first copy is
whole.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unicron_transition.iteration.rank_log import warn
from unicron_transition.snapshot import checkpoint_file, contents
from unicron_transition.snapshot.checkpoint_file import Aside, Slice
from unicron_transition.snapshot.cuts import Cuts, ImageRing, ring_paths
from unicron_transition.snapshot.image_format import (
    STATE,
    DataDigest,
    Image,
    Key,
    inventory,
    mark_verified,
    memory_folder,
)
from unicron_transition.snapshot.worker import Worker

EVERY = "UNICRON_MEMORY_EVERY"
COPIES = "UNICRON_STATE_COPIES"
FURTHEST = 1024  # iterations: after failures the next try comes after 1, 2, 4, ... and at most this many


def copy_interval(environment: Mapping[str, str] = os.environ) -> int:
    """Return the iterations from one copy to the next, 0 to make none. Raises ValueError for a value that is not a
    number."""
    every = _number(environment, EVERY, "iterations, 1 or more; 0 keeps nothing in memory")
    return every if memory_folder(environment) is not None else 0


def wanted_copies(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many other nodes should have a copy of each part. Raises ValueError for a value that is not a
    number."""
    return _number(environment, COPIES, "copies, 1 or more; 0 for none")


def _number(environment: Mapping[str, str], name: str, of_what: str) -> int:
    text = environment.get(name) or "1"
    if not text.isdecimal():
        raise ValueError(f"{name}={text!r}: write a number of {of_what}")
    return int(text)


@dataclass
class _Copy:
    """A copy to be made."""

    key: Key
    head: bytes
    contents: contents.Contents
    tensors: list[torch.Tensor]
    ready: Any
    """The event on the GPU after which the tensors are ready."""
    aside: Path | None
    """Its second name, if the agent makes a file of it."""


class Keeper:
    """Keeps copies of one rank's state. Its public methods are for the main thread."""

    def __init__(self, folder: Path, slot: int, every: int, tell: Callable[[str], None] = warn):
        self.folder, self.slot, self.every = folder, slot, every
        self._say = tell
        self.trouble = ""  # why the last copy failed
        self.needed = -1  # the iteration with which the generation began: not overwritten before another one is whole
        self._base = -1  # the generation of the last copy
        self._gpu = _GpuCopier()
        self._ring = ImageRing(ring_paths(folder, STATE, slot), self._gpu.unpin, holds_verified=True)
        self.cuts = Cuts(folder, slot, tell, self._gpu.unpin)
        self.aside = Aside()
        self._failures = self._pause = 0
        self._worker = Worker("unicron-memory")
        self._copied = threading.Event()  # the tensors can change
        self._copied.set()
        self._whole: Future[None] | None = None  # the last copy

    # ------------------------------------------------------------ the main thread
    def copy(
        self, gatherer: contents.Gatherer, iteration: int, base: int, writer: Any, aside: Slice | None = None
    ) -> None:
        """Start to copy the state after which `iteration` comes next, if a copy is due. base: the generation. writer:
        this rank's :class:`checkpoint.Writer`. aside: make a copy in any case, and set it aside for the agent, which
        writes this slice of it."""
        if not self.cuts.is_due(iteration) and aside is None and (iteration % self.every or self._pause):
            self._pause -= bool(self._pause)
            return
        self.wait_whole()
        found = gatherer.contents()
        head = contents.head_of(gatherer.state, found.about, iteration, writer.layout)
        path = checkpoint_file.aside_path(self.folder, self.slot, iteration, aside) if aside is not None else None
        key, self._base = writer.key(iteration, STATE, self.slot, base), base
        task = _Copy(key, head, found, found.still(), _event(found.tensors), path)
        self._copied.clear()
        try:
            self._whole = self._worker.submit(lambda: self._run(task))
        except RuntimeError as error:
            self._whole = Future()
            self._whole.set_exception(error)
            self._fail(error)
            self._copied.set()
        if path is not None:
            self.aside.note_image(path, self._whole)

    def wait_copied(self) -> None:
        """Wait until the copied tensors can change again."""
        self._copied.wait()

    def wait_whole(self) -> None:
        """Wait until the current copy is whole or has failed."""
        if self._whole is not None:
            self._whole.exception()

    def hand_over(self, slot: int, iteration: int) -> None:
        """Remove this rank's images once `slot`, which keeps the same state from now on, has had as new a state since
        before `iteration`. Then all other places have it too."""
        self.wait_whole()
        newest, its = -1, -1
        for found in inventory(self.folder):
            if found.path in self._ring.paths:
                newest = max(newest, found.key.iteration)
            elif found.key.kind == STATE and found.key.slot == slot and found.key.iteration < iteration:
                its = max(its, found.key.iteration)
        if its >= newest:
            self._worker.submit_or_run(self._ring.remove)

    def note_verified(self, iteration: int, mark: str) -> None:
        """Let the thread mark this rank's newest image up to `iteration` as verified, since a wrong state stays wrong.
        It stays until a newer one is verified. mark: of the state of `iteration`."""
        self._worker.submit_or_run(lambda: self._mark_verified(iteration, mark))

    def remove_after(self, iteration: int) -> None:
        """Remove all images in this node's memory of states after `iteration`, because they are unsound."""
        self.wait_whole()
        self._worker.submit_or_run(lambda: self._remove_after(iteration)).exception()

    def remove_unwanted_cuts(self) -> None:
        """Let the thread remove the cuts, after pending copies, if the controller wants none."""
        if self.cuts.unwanted:
            self._worker.submit_or_run(self.cuts.remove_unwanted)

    @property
    def has_files(self) -> bool:
        """Whether it has images other than cuts."""
        return self._ring.has_files

    def close(self) -> None:
        """Wait until copies and removals are over, and end the thread."""
        self._worker.close()

    # ------------------------------------------------------------ the thread
    def _mark_verified(self, iteration: int, mark: str) -> None:
        for own in (self._ring.paths, self.cuts.paths(STATE)):
            found = [
                each
                for each in inventory(self.folder)
                if each.path in own
                and (each.key.mark == mark if each.key.iteration == iteration else each.key.base == self._base)
                and each.key.iteration <= iteration
            ]
            if found:
                with contextlib.suppress(OSError):  # then it only counts as not verified
                    mark_verified(max(found, key=lambda each: (each.key.iteration, each.key.base)))
        self._ring.note_verified()

    def _remove_after(self, iteration: int) -> None:
        try:
            checkpoint_file.remove_after(self.folder, iteration, self._forget)
        except OSError as error:
            self._say(f"unsound training states after iteration {iteration} could not be removed from memory: {error}")
        self._ring.note_verified()
        self.needed = self.needed if self.needed <= iteration else -1

    def _forget(self, path: Path) -> None:
        self._ring.forget(path)
        self.cuts.forget(path)

    def _run(self, task: _Copy) -> None:
        try:
            self._copy(task)
        except Exception as error:  # the training goes on after any error
            self._fail(error)
            raise
        finally:
            self._copied.set()

    def _fail(self, error: BaseException) -> None:
        if not self.trouble:
            self._say(
                f"the training state is not kept in memory, the training goes on: {error} (tried again later; see "
                f"{self.folder})"
            )
        self.trouble = f"{type(error).__name__}: {error}"
        self._pause = min(FURTHEST, 1 << self._failures)
        self._failures += 1
        self._ring.release()
        self.cuts.release()

    def _reserve(self, task: _Copy) -> tuple[ImageRing, Image] | None:
        """Reserve an image for a cut, if this is one and there is room, or one of the ring. None if this copy can be
        skipped. Raises OSError."""
        sizes = len(task.head), task.contents.size
        if self.cuts.is_due(task.key.iteration):
            try:
                return self.cuts.reserve(STATE, *sizes)
            except OSError as error:
                if not self.aside.is_open:
                    self.cuts.complain(error)
            if task.key.iteration % self.every and task.aside is None:
                return None  # not all ranks keep this one
        try:
            return self._ring, self._ring.reserve(*sizes, self.needed)
        except OSError:
            # There will be room when the agent has made its file. Until then the image set aside can be gone on from.
            if task.aside is None and self.aside.is_open:
                return None
            raise

    def _copy(self, task: _Copy) -> None:
        reserved = self._reserve(task)
        if reserved is None:
            return
        ring, image = reserved
        data = contents.raw(image.data[: task.contents.size])
        copier, found = image.copier, task.contents
        if not isinstance(copier, contents.Copier) or copier.tensors is not found.tensors:
            copier = image.copier = contents.Copier(found.tensors, found.offsets, data, found.moving)
        total = DataDigest() if task.ready is None else None
        if task.ready is None:
            copier.copy(task.tensors, total)
        else:
            self._gpu.copy(copier, task.tensors, task.ready, image.path)
        self._copied.set()
        ring.finish(image, task.key, task.head, found.size, total.digest() if total is not None else None)
        if task.aside is not None:
            checkpoint_file.set_aside(image.path, task.aside)
        self.needed = -1
        if self.trouble:
            self._say("the training state is kept in memory again")
        self.trouble, self._failures = "", 0


class _GpuCopier:
    """Copies from a GPU on a stream of its own, beside the training's computation."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._pins = True  # the driver lets the GPU write to files of shared memory
        self._pinned: dict[Path, int] = {}  # file -> address

    def copy(self, copier: contents.Copier, tensors: list[torch.Tensor], ready: Any, path: Path) -> None:
        """Copy the tensors, after `ready`, to the mapping of the file `path`."""
        device = next(tensor.device for tensor in tensors if tensor.is_cuda)
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            self._pin(path, copier.into)
            stream.wait_event(ready)
            copier.copy(tensors)
            stream.synchronize()

    def _pin(self, path: Path, data: torch.Tensor) -> None:
        """Let the GPU write to the file directly. If that is refused, copies go through pageable memory, slower."""
        if self._pins and path not in self._pinned:
            refused = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), 0)
            self._pins = not int(refused)
            if self._pins:
                self._pinned[path] = data.data_ptr()

    def unpin(self, path: Path) -> None:
        """Undo :meth:`_pin` before the mapping of the file is released."""
        if path in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop(path))


def _event(tensors: list[torch.Tensor]) -> Any:
    """Record an event after all present work on the tensors' GPU; None if they are in the host's memory."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
