"""A rank's training state in memory that outlives it: copied beside the training, after each step
(docs/design/memory.md).

Two files take turns, so one is whole while the other is written. A thread copies while the next forward and backward
passes run; before parameters change the session waits for it. Whatever goes wrong costs nothing but copies.

A state is of use only where all places have it. So no image is written over before a newer one is whole in all ranks:
all settle theirs before they agree to step, and what a generation goes on from stays until its first copy is whole.

The controller may name an iteration, a cut, whose copy is to stay until another one is in enough nodes: two more files
take turns for these. A copy of which a checkpoint's file is to be made is set aside for the agent (`files.py`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unicron.transition.iteration.rank_log import warn
from unicron.transition.snapshot import contents, files
from unicron.transition.snapshot.double_buffer import BUFFERS, Turns
from unicron.transition.snapshot.images import STATE, SUFFIX, Image, Key, inventory, memory_folder

EVERY = "UNICRON_MEMORY_EVERY"
COPIES = "UNICRON_STATE_COPIES"
FURTHEST = 1024  # iterations: after a failure the next try comes after 1, 2, 4, ... and at most so many


@dataclass(frozen=True)
class Settings:
    """folder: None keeps nothing. every: iterations from one copy to the next."""

    folder: Path | None
    every: int

    @classmethod
    def chosen(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """What the environment says. Raises ValueError, one line, for what is no number."""
        text = environment.get(EVERY) or "1"
        if not text.isdecimal():
            raise ValueError(f"{EVERY}={text!r}: write a number of iterations, 1 or more; 0 keeps nothing in memory")
        return cls(memory_folder(environment) if int(text) else None, int(text))


def wanted_copies(environment: Mapping[str, str] = os.environ) -> int:
    """In how many other nodes each part of the state is to be. Raises ValueError, one line, for what is no number."""
    text = environment.get(COPIES) or "1"
    if not text.isdecimal():
        raise ValueError(f"{COPIES}={text!r}: write a number of copies, 1 or more; 0 for none")
    return int(text)


@dataclass
class _Task:
    """One copy. ready: of a card, when the tensors are what they are to be."""

    key: Key
    head: bytes
    contents: contents.Contents
    tensors: list[torch.Tensor]
    ready: Any
    aside: Path | None


class Keeper:
    """Of one rank. What is not private is called by the main thread."""

    def __init__(self, folder: Path, slot: int, every: int, tell: Callable[[str], None] = warn):
        self.folder, self.slot, self.every = folder, slot, every
        self._say = tell
        self.newest = -1  # the iteration of the last whole image of this process
        self.trouble = ""  # why the last copy came to nothing
        self.size = 0  # bytes of one image
        self.cut = self.good = -1  # the iteration to keep when it comes; the one that is to stay meanwhile
        self.keep = -1  # the iteration that the generation goes on from: not written over before another one is whole
        self._turns, self._cuts = self._files("state"), self._files("cut")
        self.none = False  # no cut is to be kept, and what there is goes
        self._aside: Path | None = None  # the last copy that was to be set aside
        self._setting_aside = False
        self.missed = False  # what was to be set aside last was not
        self._failures = self._pause = 0
        self._quiet = False  # that there is no room for a cut was said
        self._free, self._done = threading.Event(), threading.Event()
        self._free.set()
        self._done.set()
        self._tasks: queue.SimpleQueue[_Task | Turns | None] = queue.SimpleQueue()  # copies, and files to be removed
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, Any] = {}
        self._pins = True  # the driver lets the card write into files of shared memory
        self._pinned: dict[Path, int] = {}  # file -> address

    def _files(self, what: str) -> Turns:
        paths = [self.folder / f"{what}-{self.slot}-{number}{SUFFIX}" for number in range(BUFFERS)]
        return Turns(paths, self._unpin)

    # ------------------------------------------------------------ the main thread
    def copy(self, gatherer: contents.Gatherer, iteration: int, base: int, writer: Any, aside: bool = False) -> None:
        """Begin to copy the state with which `iteration` comes next, if a copy is due. writer: what this rank's part is
        to the whole (:class:`checkpoint.Writer`). base: the generation. aside: it is due, and the agent is
        to make a file of it."""
        if iteration != self.cut and not aside and (iteration % self.every or self._pause):
            self._pause -= bool(self._pause)
            return
        self.settle()
        found = gatherer.contents()
        head = contents.head_of(gatherer.state, found.about, iteration, writer.layout)
        key = writer.key(iteration, STATE, self.slot, base)
        self.size = found.size
        self._free.clear()
        self._done.clear()
        apart = None
        if aside:
            apart = self._aside = files.aside_path(self.folder, self.slot, iteration)
            self._setting_aside, self.missed = True, False
        self._put(_Task(key, head, found, found.still(), _event(found.tensors), apart))

    def _put(self, task: _Task | Turns) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="unicron-memory", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # there are no more to be had
                if isinstance(task, _Task):
                    self._failed(error, task)
                    self._ended(task)
                return
            self._thread = thread
        self._tasks.put(task)

    @property
    def filing(self) -> bool:
        """The agent has not made a file yet of what was set aside last."""
        return self._setting_aside or (self._aside is not None and self._aside.exists())

    def wait(self) -> None:
        """Until the tensors that are copied may change."""
        self._free.wait()

    def settle(self) -> None:
        """Until the copy at hand is whole, or has failed."""
        self._done.wait()

    def hand_over(self, slot: int, iteration: int) -> None:
        """Another rank of the node keeps this one's state: what is here goes once it has had as much since before
        `iteration`, for then all other places have, too."""
        self.settle()
        newest, its = -1, -1
        for found in inventory(self.folder):
            if found.path in self._turns.paths:
                newest = max(newest, found.key.iteration)
            elif found.key.kind == STATE and found.key.slot == slot and found.key.iteration < iteration:
                its = max(its, found.key.iteration)
        if its >= newest:
            self._put(self._turns)

    def drop_cuts(self) -> None:
        """Where the controller wants none their files go, and their memory. To give back that takes seconds, so it is
        the thread's; what is to be copied is put there first."""
        if self.none:
            self.none = False
            self._put(self._cuts)

    @property
    def holds(self) -> bool:
        """It has files."""
        return self._turns.holds

    def close(self) -> None:
        """The copy at hand is over, and what is to go has gone."""
        self.settle()
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None

    # ------------------------------------------------------------ the thread
    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            if isinstance(task, Turns):
                with contextlib.suppress(Exception):  # whatever it is, as a card's driver: the copies go on
                    task.clear()
                continue
            try:
                self._copy(task)
            except Exception as error:  # whatever it is, the training goes on
                self._failed(error, task)
            finally:
                self._ended(task)

    def _ended(self, task: _Task) -> None:
        if task.aside is not None:
            self._setting_aside = False
        self._free.set()
        self._done.set()

    def _failed(self, error: Exception, task: _Task) -> None:
        self.missed = self.missed or task.aside is not None
        if not self.trouble:
            self._say(
                f"the training state is not kept in memory, the training goes on: {error} (tried again later; see "
                f"{self.folder})"
            )
        self.trouble = f"{type(error).__name__}: {error}"
        self._pause = min(FURTHEST, 1 << self._failures)
        self._failures += 1
        for turns in (self._turns, self._cuts):
            turns.forget()

    def _room(self, task: _Task) -> tuple[Turns, Image] | None:
        """Of those for cuts, if this is one and there is room for it; else of those that take turns. None where this
        copy can be left out. Raises OSError."""
        if task.key.iteration == self.cut:
            try:
                image = self._cuts.room(self._cuts.next(self.good), len(task.head), task.contents.size)
                self._quiet = False
                return self._cuts, image
            except OSError as error:
                if not (self._quiet or self.filing):
                    self._say(
                        f"no copies of the training state are kept for other nodes, the training goes on: {error}"
                    )
                    self._quiet = True
            if task.key.iteration % self.every and task.aside is None:
                return None  # it is not one that all ranks keep
        try:
            return self._turns, self._turns.room(self._turns.next(self.keep), len(task.head), task.contents.size)
        except OSError:
            # There is room again when the agent has made its file; what is set aside can be gone on from.
            if self.filing and task.aside is None:
                return None
            raise

    def _copy(self, task: _Task) -> None:
        room = self._room(task)
        if room is None:
            return
        turns, image = room
        image.mark_torn()
        data = contents.raw(image.data[: task.contents.size])
        if task.ready is None:
            self._fill(task, image, data)
        else:
            self._fetch(task, image.path, data)
        self._free.set()
        image.mark_whole(task.key, task.head, task.contents.size)
        if task.aside is not None:
            files.set_aside(image.path, task.aside)
        self.newest = task.key.iteration
        turns.written(image.path)
        self.keep = -1
        if self.trouble:
            self._say("the training state is kept in memory again")
        self.trouble, self._failures = "", 0

    def _fill(self, task: _Task, image: Image, data: torch.Tensor) -> None:
        """What a copy of these contents to this image needs stays with the image."""
        copier, found = image.copier, task.contents
        if not isinstance(copier, contents.Copier) or copier.tensors is not found.tensors:
            copier = image.copier = contents.Copier(found.tensors, found.offsets, data, found.moving)
        copier.copy(task.tensors)

    # ------------------------------------------------------------ from a card
    def _fetch(self, task: _Task, path: Path, data: torch.Tensor) -> None:
        """On a stream of its own, beside what the training computes."""
        device = next(tensor.device for tensor in task.tensors if tensor.is_cuda)
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            self._pin(path, data)
            stream.wait_event(task.ready)
            contents.fill(task.tensors, task.contents.offsets, data)
            stream.synchronize()

    def _pin(self, path: Path, data: torch.Tensor) -> None:
        """The card writes into the file itself. Where that is refused it goes by way of pageable memory, slower."""
        if self._pins and path not in self._pinned:
            refused = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), 0)
            self._pins = not int(refused)
            if self._pins:
                self._pinned[path] = data.data_ptr()

    def _unpin(self, path: Path) -> None:
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
