"""Copies a rank's training state to memory that outlives it, beside the training (docs/design/memory.md).

A thread copies while the next forward and backward passes run; before parameters change the session waits for it.
Whatever goes wrong costs nothing but copies.

A state is of use only where all places have it. So no image is written over before a newer one is whole in all ranks:
all wait for theirs before they agree to step, and what a generation goes on from stays until its first copy is whole.
"""

from __future__ import annotations

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
from unicron_transition.snapshot.checkpoint_file import Aside
from unicron_transition.snapshot.cuts import Cuts, ImageRing, ring_paths
from unicron_transition.snapshot.image_format import STATE, Image, Key, inventory, memory_folder
from unicron_transition.snapshot.worker import Worker

EVERY = "UNICRON_MEMORY_EVERY"
COPIES = "UNICRON_STATE_COPIES"
FURTHEST = 1024  # iterations: after a failure the next try comes after 1, 2, 4, ... and at most so many


@dataclass(frozen=True)
class Settings:
    """The folder into which a rank copies its state, and how often.

    folder: None keeps nothing. every: iterations from one copy to the next.
    """

    folder: Path | None
    every: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read the environment. Raises ValueError, one line, for what is no number."""
        every = _number(environment, EVERY, "iterations, 1 or more; 0 keeps nothing in memory")
        return cls(memory_folder(environment) if every else None, every)


def wanted_copies(environment: Mapping[str, str] = os.environ) -> int:
    """In how many other nodes each part of the state is to be. Raises ValueError, one line, for what is no number."""
    return _number(environment, COPIES, "copies, 1 or more; 0 for none")


def _number(environment: Mapping[str, str], name: str, of_what: str) -> int:
    text = environment.get(name) or "1"
    if not text.isdecimal():
        raise ValueError(f"{name}={text!r}: write a number of {of_what}")
    return int(text)


@dataclass
class _Copy:
    """One copy. tensors: as they are to be copied. ready: of a card, when they are. aside: its second name, if it is to
    become a file."""

    key: Key
    head: bytes
    contents: contents.Contents
    tensors: list[torch.Tensor]
    ready: Any
    aside: Path | None


class Keeper:
    """Keeps the state of one rank. Its public methods are for the main thread."""

    def __init__(self, folder: Path, slot: int, every: int, tell: Callable[[str], None] = warn):
        self.folder, self.slot, self.every = folder, slot, every
        self._say = tell
        self.trouble = ""  # why the last copy came to nothing
        self.needed = -1  # the iteration that the generation goes on from: not written over before another one is whole
        self._card = _Card()
        self._ring = ImageRing(ring_paths(folder, STATE, slot), self._card.unpin)
        self.cuts = Cuts(folder, slot, tell, self._card.unpin)
        self.aside = Aside()
        self._failures = self._pause = 0
        self._worker = Worker("unicron-memory")
        self._copied = threading.Event()  # the tensors may change
        self._copied.set()
        self._whole: Future[None] | None = None  # the last copy

    # ------------------------------------------------------------ the main thread
    def copy(self, gatherer: contents.Gatherer, iteration: int, base: int, writer: Any, aside: bool = False) -> None:
        """Begin to copy the state with which `iteration` comes next, if a copy is due. base: the generation. writer:
        what this rank's part is to the whole (:class:`checkpoint.Writer`). aside: the copy is due, and the agent is to
        make a file of it."""
        if not self.cuts.is_due(iteration) and not aside and (iteration % self.every or self._pause):
            self._pause -= bool(self._pause)
            return
        self.wait_whole()
        found = gatherer.contents()
        head = contents.head_of(gatherer.state, found.about, iteration, writer.layout)
        path = checkpoint_file.aside_path(self.folder, self.slot, iteration) if aside else None
        key = writer.key(iteration, STATE, self.slot, base)
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
        """Waits until the tensors that are copied may change again."""
        self._copied.wait()

    def wait_whole(self) -> None:
        """Until the copy at hand is whole, or has failed."""
        if self._whole is not None:
            self._whole.exception()

    def hand_over(self, slot: int, iteration: int) -> None:
        """Another rank of the node keeps this one's state: what is here goes once it has had as much since before
        `iteration`, for then all other places have, too."""
        self.wait_whole()
        newest, its = -1, -1
        for found in inventory(self.folder):
            if found.path in self._ring.paths:
                newest = max(newest, found.key.iteration)
            elif found.key.kind == STATE and found.key.slot == slot and found.key.iteration < iteration:
                its = max(its, found.key.iteration)
        if its >= newest:
            self._worker.submit_or_run(self._ring.remove)

    def remove_unwanted_cuts(self) -> None:
        """Have the thread remove the cuts, after what is to be copied, where the controller wants none."""
        if self.cuts.unwanted:
            self._worker.submit_or_run(self.cuts.remove_unwanted)

    @property
    def has_files(self) -> bool:
        """Whether it has images, cuts aside."""
        return self._ring.has_files

    def close(self) -> None:
        """The copy at hand is over, and what is to go has gone."""
        self._worker.close()

    # ------------------------------------------------------------ the thread
    def _run(self, task: _Copy) -> None:
        try:
            self._copy(task)
        except Exception as error:  # whatever it is, the training goes on
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
        """A cut's image, if this is one and there is room for it; else one of the ring. None where this copy can be
        left out. Raises OSError."""
        sizes = len(task.head), task.contents.size
        if self.cuts.is_due(task.key.iteration):
            try:
                return self.cuts.reserve(STATE, *sizes)
            except OSError as error:
                if not self.aside.is_open:
                    self.cuts.complain(error)
            if task.key.iteration % self.every and task.aside is None:
                return None  # it is not one that all ranks keep
        try:
            return self._ring, self._ring.reserve(*sizes, self.needed)
        except OSError:
            # There is room again when the agent has made its file; what is set aside can be gone on from.
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
        if task.ready is None:
            copier.copy(task.tensors)
        else:
            self._card.copy(copier, task.tensors, task.ready, image.path)
        self._copied.set()
        ring.finish(image, task.key, task.head, found.size)
        if task.aside is not None:
            checkpoint_file.set_aside(image.path, task.aside)
        self.needed = -1
        if self.trouble:
            self._say("the training state is kept in memory again")
        self.trouble, self._failures = "", 0


class _Card:
    """Copies from a card, on a stream of their own, beside what the training computes."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._pins = True  # the driver lets the card write into files of shared memory
        self._pinned: dict[Path, int] = {}  # file -> address

    def copy(self, copier: contents.Copier, tensors: list[torch.Tensor], ready: Any, path: Path) -> None:
        """Copy the tensors, once `ready` is over, into the mapping of the file `path`."""
        device = next(tensor.device for tensor in tensors if tensor.is_cuda)
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            self._pin(path, copier.into)
            stream.wait_event(ready)
            copier.copy(tensors)
            stream.synchronize()

    def _pin(self, path: Path, data: torch.Tensor) -> None:
        """Have the card write into the file itself. Where that is refused it goes by way of pageable memory, slower."""
        if self._pins and path not in self._pinned:
            refused = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), 0)
            self._pins = not int(refused)
            if self._pins:
                self._pinned[path] = data.data_ptr()

    def unpin(self, path: Path) -> None:
        """The mapping of the file is about to be released."""
        if path in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop(path))


def _event(tensors: list[torch.Tensor]) -> Any:
    """When what was done to the tensors on their card so far is over; None where they are in the host's memory."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
