"""The memory for the shards of a distributed optimizer: images that the node's agent owns, so that they outlive the
rank, or this process's own memory (docs/design/sharded-optimizer.md, "In the agent's memory").

An image is torn while its buffer is in use, until a thread beside the training has given its content a digest. So a
buffer must not be taken again before the images that replace its content are whole in all ranks:
:meth:`BufferPool.wait_whole` waits for this rank's, and the caller ensures that all ranks have done so.
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
    data_digest,
    read_page,
)
from unicron_transition.snapshot.worker import Worker

LASTING = (CUT_PREFIX, COPY_PREFIX)  # prefixes of images that are not overwritten while they are needed


@dataclass(eq=False)
class Buffer:
    """Memory for one shard."""

    flat: torch.Tensor
    image: Image | None = None
    """The image of which it is a part."""
    path: Path | None = None
    """The file of an earlier process that it reads."""
    digest: Future[bytes] | None = None
    """The digest of its content, once its image is whole."""
    aside: Future[None] | None = None
    """Done when the image has the name under which the agent makes a file of it."""

    @property
    def file(self) -> Path | None:
        """The file of which it is a part."""
        return self.image.path if self.image is not None else self.path


@dataclass(frozen=True)
class ClaimedImage:
    """A sound image of an earlier process."""

    key: Key
    head: bytes
    buffer: Buffer


class BufferPool:
    """The buffers of one rank, for its training thread."""

    def __init__(
        self,
        folder: Path | None,
        slot: int,
        device: torch.device,
        pinned: bool = False,
        tell: Callable[[str], None] | None = None,
        cuts: Cuts | None = None,
    ):
        self._folder = folder if device.type == "cpu" else None  # for images; None if none are made
        self.slot = slot
        self._device = device  # of buffers without images
        self._pinned = pinned  # a card copies to and from the buffers
        self._tell = tell or warn
        """Called once if there is no room for an image, and for each image of an earlier process that is of no use."""
        self._own = f"{SHARD}-{slot}."  # prefix of this rank's files
        self._cuts = cuts or Cuts(None, slot)  # also get what is sealed for a cut
        self._free: list[Buffer] = []
        self._pending: list[Future[bytes] | Future[None]] = []
        self._worker = Worker("unicron-images")
        atexit.register(self._worker.close)  # makes the last images whole
        self.aside = Aside()
        self._aside_failed = False
        self._number = 0
        self._head_bytes = 0  # the largest head so far; a rank's own shard has a larger one than the copies
        self._warned = False

    # ------------------------------------------------------------ buffers
    @contextlib.contextmanager
    def take_buffers(self, count: int, elements: int, head_bytes: int) -> Iterator[list[Buffer]]:
        """Take `count` torn buffers of `elements`, and let go of those of another size. An exception in the body
        discards the buffers, because a late message may still be written into them."""
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
        self._head_bytes = head_bytes = max(head_bytes, self._head_bytes)  # so that all buffers are equal
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
                image = Image(path, head_bytes + PAGE, size)  # spare room: the head sometimes grows a little
                flat = contents.raw(image.data[:size]).view(torch.float32)
                if self._pinned:  # if that fails, copies are only slower
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
        """Give back a buffer whose content is not needed. Its image stays whole until the buffer is taken again."""
        if buffer.path is not None:
            self.discard(buffer)
        else:
            self._free.append(buffer)

    def discard(self, buffer: Buffer) -> None:
        """Discard a buffer; the last reference frees its memory. Another slot's file stays."""
        if buffer.image is not None and self._pinned:
            torch.cuda.cudart().cudaHostUnregister(buffer.flat.data_ptr())
        if buffer.file is not None and buffer.file.name.startswith(self._own):
            with contextlib.suppress(OSError):
                buffer.file.unlink()

    @property
    def free(self) -> int:
        """The number of free buffers."""
        return len(self._free)

    # ------------------------------------------------------------ images
    def seal(self, buffer: Buffer, key: Key, head: bytes, cut: bool = False) -> None:
        """Seal a buffer, whose content stays until it is given back: a thread makes its image whole, and for a `cut`
        also makes a copy that stays."""
        if (image := buffer.image) is not None:
            cuts = self._cuts if cut else None
            buffer.digest = self._worker.submit_or_run(lambda: _finish(buffer, image, key, head, cuts))
            self._pending.append(buffer.digest)

    def remove_unwanted_cuts(self) -> None:
        """Let the thread remove cuts that the controller no longer wants."""
        if self._cuts.unwanted:
            self._pending.append(self._worker.submit_or_run(self._cuts.remove_unwanted))

    def set_aside(self, buffer: Buffer, iteration: int, untrained: Path | None = None) -> bool:
        """Set the image of a sealed buffer aside until the agent has made a checkpoint's file of it. untrained: an
        image that goes into the same file. False without an image, and once after one could not be set aside: then the
        caller must write the file."""
        failed, self._aside_failed = self._aside_failed, False
        if failed or (image := buffer.image) is None or self._folder is None or buffer.digest is None:
            return False
        path = checkpoint_file.aside_path(self._folder, self.slot, iteration)
        buffer.aside = self._worker.submit_or_run(lambda: checkpoint_file.set_aside(image.path, path, untrained))
        self.aside.note_image(path, buffer.aside)
        return True

    def forget_missed(self) -> None:
        """Forget images that could not be set aside, with a line about the reason; the caller writes them."""
        if self.aside.error is not None:
            self._tell(f"the training state could not be set aside for the agent: {self.aside.error}")
            self._aside_failed = True
            self.aside.forget()

    def wait_whole(self) -> None:
        """Wait until all sealed images of this rank are whole and unwanted cuts are gone."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def is_sound(self, buffer: Buffer) -> bool:
        """Whether its content still has its digest; a buffer without an image is trusted."""
        return buffer.digest is None or buffer.digest.result() == data_digest(
            buffer.flat.view(torch.uint8).numpy().data
        )

    def discard_spoiled(self, buffer: Buffer) -> None:
        """Discard a buffer that is not sound, with a line about it."""
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
        """Return the sound images that earlier processes have left for this rank, the newest first.

        here: the slots of this node at this `place` of `size` (:func:`claimant`). usable(page): why an image cannot be
        used, from its first page; empty if it can. Own files that cannot be used are removed. lacks(key): whether a
        process with buffers of its own lacks the image; then only cuts and copies that it lacks are claimed.
        """
        folder = self._folder
        if folder is None or not folder.is_dir():
            return []
        if lacks is None:
            with contextlib.suppress(OSError):
                checkpoint_file.remove_half_aside(folder, self.slot)
        pages: list[ImagePage] = []
        for path in sorted(folder.iterdir()):
            if path.name.startswith(LASTING) if lacks is not None else not path.name.startswith(checkpoint_file.ASIDE):
                own = re.match(rf"{re.escape(self._own)}(\d+)\b", path.name)
                self._number = max(self._number, int(own[1])) if own else self._number
                try:
                    page = self._examine(path, here, place, size, usable)
                    if page is not None and (lacks is None or lacks(page.key)):
                        pages.append(page)
                except (BadImage, OSError) as error:
                    if own:
                        self._pass_over(path, error)
        claimed = []
        for page in sorted(pages, key=lambda each: each.key.iteration, reverse=True):
            try:
                head, data = contents.read(page)
                claimed.append(ClaimedImage(page.key, head, Buffer(data.view(torch.float32), path=page.path)))
            except (BadImage, OSError) as error:
                self._pass_over(page.path, error)
                if page.path.name.startswith(LASTING):  # otherwise the agent would still report it
                    page.path.unlink(missing_ok=True)
        return claimed

    def _examine(
        self, path: Path, here: Sequence[int], place: int, size: int, usable: Callable[[ImagePage], str]
    ) -> ImagePage | None:
        """Read the first page of an image for this rank. Raises OSError, and BadImage if no rank can use it."""
        if not path.name.endswith(SUFFIX):
            raise BadImage(f"{path}: its writer ended before it was made")
        page = read_page(path)
        if page.key.kind != SHARD or (page.key.place, page.key.size) != (place, size):
            raise BadImage(f"{path}: of another layout")
        if claimant(page.key, here) != self.slot:
            return None
        if problem := usable(page):
            raise BadImage(f"{path}: {problem}")
        return page

    def _pass_over(self, path: Path, error: Exception) -> None:
        self._tell(f"training state in memory passed over: {error}")
        self.discard(Buffer(torch.empty(0), path=path))


def claimant(key: Key, here: Sequence[int]) -> int:
    """Return the slot that may use an image on a node whose slots at its place are `here`: the image's own slot, or, if
    that is not on this node, one of these by the number of the shard."""
    return key.slot if key.slot in here else here[key.shard % len(here)]


def _wait_whole(buffer: Buffer) -> None:
    """Wait until the thread is done with the buffer; it must not make new content whole."""
    if buffer.digest is not None:
        buffer.digest.result()
        buffer.digest = None


def _is_free(buffer: Buffer) -> bool:
    """Whether its image exists, and the agent is not making a file of it."""
    assert buffer.image is not None
    try:
        if buffer.aside is not None:
            wait([buffer.aside])
        return not checkpoint_file.is_aside(buffer.image.path)
    except OSError:  # it was removed, so its content would be lost
        return False


def _finish(buffer: Buffer, image: Image, key: Key, head: bytes, cuts: Cuts | None) -> bytes:
    summed = image.mark_whole(key, head, buffer.flat.nbytes)
    if cuts is not None:
        cuts.write(key, head, buffer.flat.nbytes, lambda copy: contents.copy_flat(buffer.flat, copy))
    return summed
