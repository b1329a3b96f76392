"""The memory in which the shards of a distributed optimizer are kept: images that the node's agent owns, so that they
outlive the rank, or this process's own memory (docs/design/sharded-optimizer.md, "In the agent's memory").

An image is torn from when its buffer is taken to when the content is there and has its digest, by a thread beside the
training. So nobody takes a buffer again before the images that replace its content are whole in all ranks:
:meth:`BufferPool.wait_whole` waits for this rank's, and the caller sees to it that all have done so.
"""

from __future__ import annotations

import atexit
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from unicron_transition.iteration.rank_log import warn
from unicron_transition.snapshot import checkpoint_file, contents
from unicron_transition.snapshot.checkpoint_file import Aside
from unicron_transition.snapshot.cuts import COPY_PREFIX, CUT_PREFIX, Cuts
from unicron_transition.snapshot.image_format import (
    PAGE,
    SHARD,
    SUFFIX,
    BadImage,
    Image,
    ImagePage,
    Key,
    digest,
    read_page,
)
from unicron_transition.snapshot.worker import Worker

LASTING = (CUT_PREFIX, COPY_PREFIX)  # how the names of images begin that nobody writes over while they are of use


@dataclass(eq=False)
class Buffer:
    """Memory for one shard."""

    flat: torch.Tensor
    image: Image | None = None
    """The image that it is part of."""
    path: Path | None = None
    """The file of an earlier process that it reads."""
    digest: Future[bytes] | None = None
    """Of its content, when its image is whole."""
    aside: Future[None] | None = None
    """Is over when the image has the name under which the agent makes a file of it."""

    @property
    def file(self) -> Path | None:
        """The file that it is part of."""
        return self.image.path if self.image is not None else self.path


@dataclass(frozen=True)
class ClaimedImage:
    """The sound image of an earlier process."""

    key: Key
    head: bytes
    buffer: Buffer


class BufferPool:
    """The buffers of one rank, for its training thread. folder: where images are made; None: none are.

    device: of buffers that are no images. pinned: a card copies to and from them. tell: called once when there is no
    room for an image, and with one line for each image of an earlier process that cannot be used. cuts: what is sealed
    for a cut goes there, too.
    """

    def __init__(
        self,
        folder: Path | None,
        slot: int,
        device: torch.device,
        pinned: bool = False,
        tell: Callable[[str], None] | None = None,
        cuts: Cuts | None = None,
    ):
        self._folder = folder if device.type == "cpu" else None
        self.slot, self._device, self._pinned, self._tell = slot, device, pinned, tell or warn
        self._own = f"{SHARD}-{slot}."  # how the names of this rank's files begin
        self._cuts = cuts or Cuts(None, slot)
        self._free: list[Buffer] = []
        self._pending: list[Future[bytes] | Future[None]] = []
        self._worker = Worker("unicron-images")
        atexit.register(self._worker.close)  # the last images become whole
        self.aside = Aside()
        self._aside_failed = False
        self._number = 0
        self._head_bytes = 0  # of the largest head so far: a rank's own shard has a larger one than the copies
        self._warned = False

    # ------------------------------------------------------------ buffers
    @contextlib.contextmanager
    def take_buffers(self, count: int, elements: int, head_bytes: int) -> Iterator[list[Buffer]]:
        """Take so many torn buffers of `elements`; those of another size are let go of. An exception inside costs the
        buffers: a message that is late may still be written there."""
        self.trim(elements)
        buffers: list[Buffer] = []
        try:
            while len(buffers) < count:
                buffers.append(self._take_one(elements, head_bytes))
            yield buffers
        except BaseException:
            for buffer in buffers:
                self.discard(buffer)
            raise

    def trim(self, elements: int) -> None:
        """Let go of free buffers of another size."""
        for buffer in [buffer for buffer in self._free if buffer.flat.numel() != elements]:
            self._free.remove(buffer)
            self.discard(buffer)

    def _take_one(self, elements: int, head_bytes: int) -> Buffer:
        self._head_bytes = head_bytes = max(head_bytes, self._head_bytes)  # one buffer is as good as the other then
        for buffer in reversed(self._free):
            if buffer.image is None or (buffer.image.fits(head_bytes, buffer.flat.nbytes) and _is_free(buffer)):
                self._free.remove(buffer)
                _wait_whole(buffer)
                if buffer.image is not None:
                    buffer.image.mark_torn()
                return buffer
        if self._free:
            buffer = self._free.pop()
            _wait_whole(buffer)
            self.discard(buffer)
        return self._make_one(elements, head_bytes)

    def _make_one(self, elements: int, head_bytes: int) -> Buffer:
        size = elements * torch.float32.itemsize
        if self._folder is not None:
            self._number += 1
            path = self._folder / f"{self._own}{self._number}{SUFFIX}"
            try:
                image = Image(path, head_bytes + PAGE, size)  # some more: it grows a little now and then
                flat = contents.raw(image.data[:size]).view(torch.float32)
                if self._pinned:  # where that fails its copies are slower, that is all
                    torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), size, 0)
                return Buffer(flat, image)
            except OSError as error:
                self._complain(error, size)
        flat = torch.zeros(elements, dtype=torch.float32, device=self._device, pin_memory=self._pinned)
        return Buffer(flat)

    def _complain(self, error: OSError, size: int) -> None:
        if not self._warned:
            self._warned = True
            self._tell(
                f"no room for {size >> 20} MiB of training state in {self._folder} ({error.strerror or error}): it is "
                "kept in this process alone and ends with it; give the node more shared memory"
            )

    def give_back(self, buffer: Buffer) -> None:
        """Give a buffer back, whose content is not needed any more. Its image stays whole until the buffer is used
        again."""
        if buffer.path is not None:
            self.discard(buffer)
        else:
            self._free.append(buffer)

    def discard(self, buffer: Buffer) -> None:
        """Discard a buffer; its memory is freed with the last reference. A file of another slot stays."""
        if buffer.image is not None and self._pinned:
            torch.cuda.cudart().cudaHostUnregister(buffer.flat.data_ptr())
        if buffer.file is not None and buffer.file.name.startswith(self._own):
            with contextlib.suppress(OSError):
                buffer.file.unlink()

    @property
    def free(self) -> int:
        """The number of buffers that wait to be used again."""
        return len(self._free)

    # ------------------------------------------------------------ images
    def seal(self, buffer: Buffer, key: Key, head: bytes, cut: bool = False) -> None:
        """Seal a buffer, whose content does not change before it is given back: a thread makes its image whole. cut:
        and a copy that stays."""
        if (image := buffer.image) is not None:
            cuts = self._cuts if cut else None
            buffer.digest = self._worker.submit_or_run(lambda: _finish(buffer, image, key, head, cuts))
            self._pending.append(buffer.digest)

    def remove_unwanted_cuts(self) -> None:
        """Have the thread remove cuts that the controller does not want."""
        if self._cuts.unwanted:
            self._pending.append(self._worker.submit_or_run(self._cuts.remove_unwanted))

    def set_aside(self, buffer: Buffer, iteration: int, untrained: Path | None = None) -> bool:
        """Set the image of a sealed buffer aside: the agent makes a checkpoint's file of it, and nobody writes over it
        before. untrained: an image that goes into the same file. False where there is no image, and once after one that
        could not be set aside: the caller has another way then."""
        failed, self._aside_failed = self._aside_failed, False
        if failed or (image := buffer.image) is None or self._folder is None or buffer.digest is None:
            return False
        path = checkpoint_file.aside_path(self._folder, self.slot, iteration)
        buffer.aside = self._worker.submit_or_run(lambda: checkpoint_file.set_aside(image.path, path, untrained))
        self.aside.note_image(path, buffer.aside)
        return True

    def forget_missed(self) -> None:
        """Forget images that could not be set aside, with a line that says why: they come in another way."""
        if self.aside.error is not None:
            self._tell(f"the training state could not be set aside for the agent: {self.aside.error}")
            self._aside_failed = True
            self.aside.forget()

    def wait_whole(self) -> None:
        """Wait until all sealed images of this rank are whole, and cuts that are not wanted have gone."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def is_sound(self, buffer: Buffer) -> bool:
        """Whether its content is what it was when it got its digest; a buffer without an image is believed."""
        return buffer.digest is None or buffer.digest.result() == digest(buffer.flat.view(torch.uint8).numpy().data)

    def discard_spoiled(self, buffer: Buffer) -> None:
        """Discard a buffer that is not sound, with a line that says so."""
        self._tell(f"training state in memory passed over: {buffer.file}: changed since it was written")
        self.discard(buffer)

    # ------------------------------------------------------------ of earlier processes
    def claim(
        self,
        here: Sequence[int],
        place: int,
        size: int,
        usable: Callable[[ImagePage], str],
        lacks: Callable[[Key], bool] | None = None,
    ) -> list[ClaimedImage]:
        """Return the sound images that earlier processes have left and that are this rank's to use, the newest first.

        here: the slots of this node at this `place` of `size` (:func:`claimant`). usable(found): why an image is of no
        use in spite of its first page; empty for one that is. Own files that are of no use are removed. lacks: for a
        process that has buffers of its own: of cuts and copies those that it says yes to, and nothing else.
        """
        folder = self._folder
        if folder is None or not folder.is_dir():
            return []
        if lacks is None:
            with contextlib.suppress(OSError):
                checkpoint_file.remove_half_aside(folder, self.slot)
        found: list[ImagePage] = []
        for path in sorted(folder.iterdir()):
            if path.name.startswith(LASTING) if lacks is not None else not path.name.startswith(checkpoint_file.ASIDE):
                own = re.match(rf"{re.escape(self._own)}(\d+)\b", path.name)
                self._number = max(self._number, int(own[1])) if own else self._number
                try:
                    about = self._examine(path, here, place, size, usable)
                    if about is not None and (lacks is None or lacks(about.key)):
                        found.append(about)
                except (BadImage, OSError) as error:
                    if own:
                        self._pass_over(path, error)
        claimed = []
        for about in sorted(found, key=lambda each: each.key.iteration, reverse=True):
            try:
                head, data = contents.read(about)
                claimed.append(ClaimedImage(about.key, head, Buffer(data.view(torch.float32), path=about.path)))
            except (BadImage, OSError) as error:
                self._pass_over(about.path, error)
                if about.path.name.startswith(LASTING):  # else the agent would go on saying that it is here
                    about.path.unlink(missing_ok=True)
        return claimed

    def _examine(
        self, path: Path, here: Sequence[int], place: int, size: int, usable: Callable[[ImagePage], str]
    ) -> ImagePage | None:
        """Read what an image says of itself, if it is this rank's to use. Raises BadImage for one that is of no use to
        anybody, OSError."""
        if not path.name.endswith(SUFFIX):
            raise BadImage(f"{path}: its writer ended before it was made")
        about = read_page(path)
        if about.key.kind != SHARD or (about.key.place, about.key.size) != (place, size):
            raise BadImage(f"{path}: of another layout")
        if claimant(about.key, here) != self.slot:
            return None
        if why := usable(about):
            raise BadImage(f"{path}: {why}")
        return about

    def _pass_over(self, path: Path, error: Exception) -> None:
        self._tell(f"training state in memory passed over: {error}")
        self.discard(Buffer(torch.empty(0), path=path))


def claimant(key: Key, here: Sequence[int]) -> int:
    """Return the slot that uses an image on a node whose slots at its place are `here`: the image's own slot, or, if
    that is not on this node (any more), one of these by the number of the shard."""
    return key.slot if key.slot in here else here[key.shard % len(here)]


def _wait_whole(buffer: Buffer) -> None:
    """Wait until the thread is done with the buffer; else it would make whole what is written by then."""
    if buffer.digest is not None:
        buffer.digest.result()
        buffer.digest = None


def _is_free(buffer: Buffer) -> bool:
    """Whether its image is there, and the agent makes no file of it."""
    assert buffer.image is not None
    try:
        if buffer.aside is not None:
            wait([buffer.aside])
        return not checkpoint_file.is_aside(buffer.image.path)
    except OSError:  # somebody has removed it: nobody would see what is written
        return False


def _finish(buffer: Buffer, image: Image, key: Key, head: bytes, cuts: Cuts | None) -> bytes:
    found = image.mark_whole(key, head, buffer.flat.nbytes)
    if cuts is not None:
        cuts.write(key, head, buffer.flat.nbytes, lambda copy: contents.copy_flat(buffer.flat, copy))
    return found
