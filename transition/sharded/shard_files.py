"""Where the shards of a distributed optimizer are kept: in images that the node's agent owns, so that they outlive the
rank, or in this process's own memory (docs/design/sharded-optimizer.md, "In the agent's memory").

An image is torn from when its room is taken to when the content is there and summed, by a thread beside the training.
So nobody takes a room again before the images that replace its content are whole in all ranks: :meth:`Rooms.settle`
waits for this rank's, and the caller sees to it that all have done so.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from unicron.transition.iteration.rank_log import warn
from unicron.transition.snapshot import contents, files
from unicron.transition.snapshot.cuts import COPY_PREFIX, CUT_PREFIX
from unicron.transition.snapshot.cutting import Cutting
from unicron.transition.snapshot.images import PAGE, SHARD, SUFFIX, BadImage, Found, Image, Key, digest, read_page

STAY = (CUT_PREFIX, COPY_PREFIX)  # names of images that nobody writes over while they are of use


@dataclass(eq=False)
class Room:
    """Memory for one shard. image: what it is part of. path: the file of an earlier process that it reads. sums: of its
    content, when its image is whole. aside: when it has the name under which the agent makes a file of it."""

    flat: torch.Tensor
    image: Image | None = None
    path: Path | None = None
    sums: Future[bytes] | None = None
    aside: Future[None] | None = None


@dataclass(frozen=True)
class Claimed:
    """The sound image of an earlier process."""

    key: Key
    head: bytes
    room: Room


class Rooms:
    """Of one rank, for its training thread. folder: where images are made; None: none are.

    device: of rooms that are no images. pinned: a card copies to and from them. tell: called once when there is no room
    for an image, and of each image that an earlier process left and that cannot be used, with one line. cuts: what is
    sealed for a cut goes there, too.
    """

    def __init__(
        self,
        folder: Path | None,
        slot: int,
        device: torch.device,
        pinned: bool = False,
        tell: Callable[[str], None] | None = None,
        cuts: Cutting | None = None,
    ):
        self._folder = folder if device.type == "cpu" else None
        self.slot, self._device, self._pinned, self._tell = slot, device, pinned, tell or warn
        self._own = f"{SHARD}-{slot}."  # how the names of this rank's files begin
        self._cuts = cuts
        self._spare: list[Room] = []
        self._pending: list[Room] = []
        self._worker: ThreadPoolExecutor | None = None
        self._dropped: Future[None] | None = None  # cuts that were not wanted any more
        self._aside: tuple[Path, Future[None]] | None = None  # the last image that was to become a file
        self._gives_up = False  # that could not be
        self._number = 0
        self._head_bytes = 0  # of the largest head so far: a rank's own shard has a larger one than the copies
        self._warned = False

    # ------------------------------------------------------------ rooms
    @contextlib.contextmanager
    def take(self, count: int, elements: int, head_bytes: int) -> Iterator[list[Room]]:
        """So many rooms of `elements`, torn; those of another size are let go of. What is raised inside costs the
        rooms: a message that is late may still be written there."""
        self.trim(elements)
        rooms: list[Room] = []
        try:
            while len(rooms) < count:
                rooms.append(self._one(elements, head_bytes))
            yield rooms
        except BaseException:
            for room in rooms:
                self.discard(room)
            raise

    def trim(self, elements: int) -> None:
        """Rooms of another size that wait to be used again are let go of."""
        for room in [room for room in self._spare if room.flat.numel() != elements]:
            self._spare.remove(room)
            self.discard(room)

    def _one(self, elements: int, head_bytes: int) -> Room:
        self._head_bytes = head_bytes = max(head_bytes, self._head_bytes)  # one room is as good as the other then
        for room in reversed(self._spare):
            if room.image is None or (room.image.fits(head_bytes, room.flat.nbytes) and _is_free(room)):
                self._spare.remove(room)
                _summed(room)
                if room.image is not None:
                    room.image.mark_torn()
                return room
        if self._spare:
            room = self._spare.pop()
            _summed(room)
            self.discard(room)
        size = elements * torch.float32.itemsize
        if self._folder is not None:
            self._number += 1
            path = self._folder / f"{self._own}{self._number}{SUFFIX}"
            try:
                image = Image(path, head_bytes + PAGE, size)  # some more: it grows a little now and then
                flat = contents.raw(image.data[:size]).view(torch.float32)
                if self._pinned:  # where that fails its copies are slower, that is all
                    torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), size, 0)
                return Room(flat, image)
            except OSError as error:
                self._complain(error, size)
        flat = torch.zeros(elements, dtype=torch.float32, device=self._device, pin_memory=self._pinned)
        return Room(flat)

    def _complain(self, error: OSError, size: int) -> None:
        if not self._warned:
            self._warned = True
            self._tell(
                f"no room for {size >> 20} MiB of training state in {self._folder} ({error.strerror or error}): it is "
                "kept in this process alone and ends with it; give the node more shared memory"
            )

    def give_back(self, room: Room) -> None:
        """Its content is not needed any more; the room is used again. Its image stays whole until then."""
        if room.path is not None:
            self.discard(room)
        else:
            self._spare.append(room)

    def discard(self, room: Room) -> None:
        """It is not used again; its memory is freed with the last reference. A file that is another slot's stays."""
        if room.image is not None and self._pinned:
            torch.cuda.cudart().cudaHostUnregister(room.flat.data_ptr())
        path = room.image.path if room.image is not None else room.path
        if path is not None and path.name.startswith(self._own):
            with contextlib.suppress(OSError):
                path.unlink()

    @property
    def spare(self) -> int:
        """Rooms that wait to be used again."""
        return len(self._spare)

    # ------------------------------------------------------------ images
    def seal(self, room: Room, key: Key, head: bytes, cut: bool = False) -> None:
        """The content of a room is there, and does not change before the room is given back: a thread makes its image
        whole. cut: and a copy that stays."""
        if room.image is None:
            return
        room.sums = self._thread.submit(_finish, room, room.image, key, head, self._cuts if cut else None)
        self._pending.append(room)

    def drop_cuts(self) -> None:
        """Where the controller wants none their files go. To give back their memory takes seconds: the thread does."""
        if self._cuts is not None and self._cuts.none:
            self._cuts.none = False
            self._dropped = self._thread.submit(self._cuts.drop)

    @property
    def _thread(self) -> ThreadPoolExecutor:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "unicron-images")
        return self._worker

    def set_aside(self, room: Room, iteration: int, untrained: Path | None = None) -> bool:
        """The agent is to make a checkpoint's file of the image of a room that is sealed; nobody writes over it before.
        untrained: an image that goes into the same file. False where it has none, and once after what could not be: the
        caller has another way then."""
        given_up, self._gives_up = self._gives_up, False
        if given_up or room.image is None or self._folder is None or self._worker is None:
            return False
        path = files.aside_path(self._folder, self.slot, iteration)
        room.aside = self._worker.submit(files.set_aside, room.image.path, path, untrained)
        self._aside = path, room.aside
        return True

    @property
    def filing(self) -> bool:
        """The agent has not made a file yet of what was set aside last."""
        return self._aside is not None and (not self._aside[1].done() or self._aside[0].exists())

    @property
    def missed(self) -> bool:
        """What was to be set aside last could not be."""
        return self._aside is not None and self._aside[1].done() and self._aside[1].exception() is not None

    def begin_anew(self) -> None:
        """What was missed is heard of, and comes again in another way."""
        if self._aside is not None and self.missed:
            self._tell(f"the training state could not be set aside for the agent: {self._aside[1].exception()}")
            self._aside, self._gives_up = None, True

    def settle(self) -> None:
        """Until all images of this rank are whole that have been sealed, and cuts have gone that are not wanted."""
        if self._dropped is not None:
            wait([self._dropped])  # where they could not go the training goes on all the same
        pending, self._pending = self._pending, []
        for room in pending:
            if room.sums is not None:
                room.sums.result()

    def sound(self, room: Room) -> bool:
        """Its content is what it was when it was summed; one that has no image is believed."""
        return room.sums is None or room.sums.result() == digest(_bytes(room))

    def spoiled(self, room: Room) -> None:
        """It is not :meth:`sound`: said, and not used again."""
        path = room.image.path if room.image is not None else room.path
        self._tell(f"training state in memory passed over: {path}: changed since it was written")
        self.discard(room)

    def claim(
        self,
        here: Sequence[int],
        place: int,
        size: int,
        usable: Callable[[Found], str],
        lacks: Callable[[Key], bool] | None = None,
    ) -> list[Claimed]:
        """The sound images that earlier processes have left and that are this rank's to use, the newest first.

        here: the slots of this node at this `place` of `size` (:func:`claimant`). usable(found): why an image is of no
        use in spite of its first page; empty for one that is. Own files that are of no use are removed. lacks: for a
        process that has rooms of its own: of cuts and copies those that it says yes to, and nothing else.
        """
        found: list[Found] = []
        if self._folder is not None and lacks is None:
            with contextlib.suppress(OSError):
                files.remove_half_aside(self._folder, self.slot)
        for path in sorted(self._folder.iterdir()) if self._folder is not None and self._folder.is_dir() else []:
            if lacks is not None and not path.name.startswith(STAY):
                continue
            if path.name.startswith(files.ASIDE):  # the second name of one; the agent removes it
                continue
            own = re.match(rf"{re.escape(self._own)}(\d+)\b", path.name)
            self._number = max(self._number, int(own[1])) if own else self._number
            try:
                if not path.name.endswith(SUFFIX):
                    raise BadImage(f"{path}: its writer ended before it was made")
                about = read_page(path)
                if about.key.kind == SHARD and (about.key.place, about.key.size) == (place, size):
                    if claimant(about.key, here) == self.slot:
                        if why := usable(about):
                            raise BadImage(f"{path}: {why}")
                        if lacks is None or lacks(about.key):
                            found.append(about)
                elif own:
                    raise BadImage(f"{path}: of another layout")
            except (BadImage, OSError) as error:
                self._pass_over(path, error if own else None)
        claimed = []
        for about in sorted(found, key=lambda each: each.key.iteration, reverse=True):
            try:
                claimed.append(_read(about))
            except (BadImage, OSError) as error:
                self._pass_over(about.path, error)
                if about.path.name.startswith(STAY):  # else the agent would go on saying that it is here
                    about.path.unlink(missing_ok=True)
        return claimed

    def _pass_over(self, path: Path, error: Exception | None) -> None:
        if error is not None:
            self._tell(f"training state in memory passed over: {error}")
            self.discard(Room(torch.empty(0), path=path))


def claimant(key: Key, here: Sequence[int]) -> int:
    """Who uses an image that lies on a node whose slots at its place are `here`: its own slot; of a slot that is not on
    this node, or not any more, one of these, by the number of the shard."""
    return key.slot if key.slot in here else here[key.shard % len(here)]


def _summed(room: Room) -> None:
    """Its thread is done with it; else it would make whole what is written by then."""
    if room.sums is not None:
        room.sums.result()
        room.sums = None


def _is_free(room: Room) -> bool:
    """Its image is there, and the agent makes no file of it."""
    assert room.image is not None
    try:
        if room.aside is not None:
            wait([room.aside])
        return not files.is_aside(room.image.path)
    except OSError:  # somebody has removed it: nobody would see what is written
        return False


def _finish(room: Room, image: Image, key: Key, head: bytes, cuts: Cutting | None) -> bytes:
    found = image.mark_whole(key, head, room.flat.nbytes)
    if cuts is not None:
        cuts.keep(key, head, room.flat)
    return found


def _bytes(room: Room) -> memoryview:
    return room.flat.view(torch.uint8).numpy().data


def _read(found: Found) -> Claimed:
    head, data = contents.read(found)
    return Claimed(found.key, head, Room(data.view(torch.float32), path=found.path))
