"""Turns images into files of a checkpoint, without torch, so that an agent can write what a rank left in memory.

A rank *sets aside* an image for this: the image gets a second name, under which it is not overwritten, and which the
agent removes when the file is complete.

The file of a place's first shard also has the untrained tensors, which are in no shard. The data of their image follow
the shard's own, and the shard's head has the places of both and the mark of that image. So there is only one kind of
file, and a checkpoint is whole when each place and shard has one.

Nodes that hold the same state write a *slice* of its file each, at the same time (docs/design/checkpoints.md,
"Slices"). A slice is a file like any other, with some of the state's tensors, so every reader can read and check it.
Its name has a digest of the whole state: slices of states that differ never count as one file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from unicron_transition.snapshot.image_format import (
    ALIGN,
    DIGEST,
    LEAF,
    SHARD,
    STATE,
    SUFFIX,
    UNTRAINED_KIND,
    BadImage,
    Data,
    DataDigest,
    ImagePage,
    Key,
    digest,
    file_front,
    inventory,
    item_bytes,
    read_page,
    reading_threads,
    write_note,
)
from unicron_transition.snapshot.model_facts import ModelFacts
from unicron_transition.snapshot.reading import PlainValues, open_plain, read_into, unpack, values_in

NOTE = "files.msgpack"  # the note beside the images with the folder of their checkpoints
ASIDE = "due-"  # the start of the second name of an image
PIECE = 1 << 22  # bytes
SYNC_BYTES = 64 << 20  # are written before they are put on disk: a slow disk's file then grows while others look at it
TOUCH_SECONDS = 1.0  # between two signs of life while a file does not grow
WORD = 8  # bytes: the untrained tensors begin at a multiple
Write = Callable[[Data], None]
LEAST_SLICE = 64 << 20  # bytes; smaller slices save little time
MOST_SLICES = 8  # slices of a file: every rank that reads a checkpoint opens all of its files
_SLICE = re.compile(r"\.slice-(\d+)-of-(\d+)\.")
VERIFIED_SUFFIX = "verified"  # of a file that says that an audit has found the state of this mark sound
DAMAGE_SUFFIX = "damaged"  # of a file that says that another one is damaged, or one of the files of a mark


class Slice(NamedTuple):
    """The part of a file that one node writes."""

    number: int = 0
    of: int = 1
    """The number of slices of the file."""

    @property
    def text(self) -> str:
        """The text in names, "" for a whole file."""
        return f".slice-{self.number}-of-{self.of}" if self.of > 1 else ""


WHOLE = Slice()


def folder_name(iteration: int) -> str:
    """Return the name of the folder of the checkpoint after which `iteration` comes next."""
    return f"iteration-{iteration:08d}"


def stem(key: Key) -> str:
    """Return a file's name without its suffix, which identifies its part of the checkpoint."""
    mark = set_mark(key.base, key.mark) if key.kind == SHARD else key.mark
    return f"{mark}.place-{key.place}-of-{key.size}.shard-{key.shard}-of-{key.count}"


def set_mark(base: int, mark: str) -> str:
    """Return the mark that all files of a set of shards share. base, mark: from the keys of their images."""
    return hashlib.blake2b(f"{base}.{mark}".encode(), digest_size=4).hexdigest()


def file_head(key: Key, head: bytes) -> bytes:
    """Return the part of an image's head that goes into a checkpoint file: the last part of a shard's head, which is
    empty if it cannot become a file. Raises ValueError."""
    if key.kind != SHARD:
        return head
    *_, last = unpack(head)
    return bytes(last)


@dataclass
class Head:
    """The part of a training state that is not a tensor."""

    iteration: int
    layout: str
    """The layout, as people write it."""
    groups: list[PlainValues]
    """The settings of the optimizer's groups of parameters."""
    scheduler: PlainValues | None
    """The state of the learning-rate schedule."""
    scales: list[PlainValues]
    """The states of the gradient scalers."""
    seed: int
    loss: float | None
    step: float
    """The optimizer's step, if it is in no tensor."""
    untrained: str
    """The mark of the image whose data follow these in a checkpoint file."""
    about: bytes
    """The description of the tensors, MessagePack (:mod:`contents`)."""
    facts: ModelFacts = field(default_factory=ModelFacts)

    def pack(self) -> bytes:
        """Return the head as MessagePack."""
        packed: bytes = msgpack.packb(vars(self) | {"facts": vars(self.facts)})
        return packed


def head_of_file(page: ImagePage) -> Head:
    """Read the head of an image that is, or could become, a checkpoint file. Raises BadImage, OSError."""
    head = page.head()
    try:
        content = unpack(file_head(page.key, head))
        return Head(**content | {"facts": ModelFacts.of(values_in(content, "facts"))})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadImage(f"{page.path}: not a training state of this release ({error})") from None


def unfinished_path(path: Path) -> Path:
    """Return the name under which this thread writes the file `path`."""
    return path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.{threading.get_native_id()}.new")


@contextlib.contextmanager
def writing(path: Path, key: Key, head: bytes, size: int) -> Iterator[Write]:
    """Write a file with `size` bytes of data, which the body passes to the function piece by piece. The file gets its
    name when it is on disk, and is removed after an error. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new, total, unsynced = unfinished_path(path), DataDigest(), 0
    try:
        with new.open("wb") as file:

            def sync() -> None:
                nonlocal unsynced
                file.flush()
                os.fsync(file.fileno())
                unsynced = 0

            def write(data: Data) -> None:
                nonlocal unsynced
                file.write(data)
                total.update(data)
                unsynced += len(data)
                if unsynced >= SYNC_BYTES:
                    sync()

            file.write(file_front(key, head, size, bytes(DIGEST)))
            yield write
            file.seek(0)
            file.write(file_front(key, head, size, total.digest()))
            sync()
        _mark_each_damaged(path)
        new.replace(path)
        _damage_note(path).unlink(missing_ok=True)
    finally:
        with contextlib.suppress(OSError):  # on a broken file system this can fail too
            new.unlink()


def _damage_note(path: Path, of_mark: bool = False) -> Path:
    """Return the path of the note that the checkpoint file `path` is damaged. of_mark: or any other file of its
    mark."""
    return path.with_name(f"{path.name.split('.')[0] if of_mark else path.name}.{DAMAGE_SUFFIX}")


def _mark_each_damaged(path: Path) -> None:
    """Replace the note that a file of the mark of `path` is damaged by a note for each of its files. A reader does not
    know which one it is, so the checkpoint counts again only when all of them have been written anew. Raises
    OSError."""
    of_all = _damage_note(path, of_mark=True)
    if of_all.exists():
        for each in path.parent.glob(f"{of_all.stem}.*{SUFFIX}"):
            _damage_note(each).touch()
        of_all.unlink(missing_ok=True)


class Destination(NamedTuple):
    """The folder of a job's checkpoints, and how many of them are kept."""

    folder: Path
    keep: int


def note_destination(memory: Path, where: Destination) -> None:
    """Leave the destination in a note for the agent, beside the images. Raises OSError."""
    write_note(memory / NOTE, msgpack.packb({"folder": str(where.folder.resolve()), "keep": where.keep}))


def destination(memory: Path) -> Destination | None:
    """Read that note; None if the script makes no checkpoints."""
    try:
        noted = msgpack.unpackb((memory / NOTE).read_bytes())
        return Destination(Path(noted["folder"]), max(1, int(noted["keep"])))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def aside_path(memory: Path, slot: int, iteration: int, cut: Slice = WHOLE) -> Path:
    """Return the second name of an image that is set aside. cut: the slice of its file that its node writes."""
    return memory / f"{ASIDE}{slot}-{iteration}{cut.text}{SUFFIX}"


def set_aside(image: Path, aside: Path, untrained: Path | None = None) -> None:
    """Preserve a whole image under the name `aside` until the agent removes that name. An older image of that name, of
    an earlier process at the same iteration, is replaced. untrained: another image for the same file. Raises
    OSError."""
    try:
        if untrained is not None:
            _name_also(untrained, _beside(aside))
        _name_also(image, aside)
    except OSError:
        _beside(aside).unlink(missing_ok=True)
        raise


class Aside:
    """The image that a rank set aside last."""

    def __init__(self) -> None:
        self._path = Path()
        self._done: Future[Any] | None = None

    def note_image(self, path: Path, done: Future[Any]) -> None:
        """Note an image. path: its second name. done: the attempt to give it that name."""
        self._path, self._done = path, done

    @property
    def is_open(self) -> bool:
        """Whether the agent has yet to make its file."""
        return self._done is not None and (not self._done.done() or self._path.exists())

    @property
    def is_awaited(self) -> bool:
        """Whether the next checkpoint has to wait for this file. Of the nodes with slices only the first one counts: it
        writes the slices of an agent that hangs, and that agent must not stop all further checkpoints."""
        return self.is_open and not slice_in(self._path).number

    @property
    def error(self) -> BaseException | None:
        """Why it could not be set aside; None if it was, or still could be, or if the first node also writes this slice
        then."""
        if self._done is None or not self._done.done() or slice_in(self._path).number:
            return None
        return self._done.exception()

    def forget(self) -> None:
        """Forget the error, because the checkpoint is written in another way."""
        self._done = None


def _beside(aside: Path) -> Path:
    """Return the second name of the untrained tensors' image, given that of the shard. Its suffix differs, so that a
    search for images finds the image once."""
    return aside.with_suffix(f".{UNTRAINED_KIND}")


def _name_also(image: Path, name: Path) -> None:
    new = name.with_name(f"{name.name}.{os.getpid()}.new")
    new.unlink(missing_ok=True)
    new.hardlink_to(image)
    new.replace(name)
    new.unlink(missing_ok=True)  # if both were already this image, `replace` did nothing


def release_aside(aside: Path) -> None:
    """Remove the names under which an image is set aside. The image's own goes last, since the rank sets no other image
    aside as long as it is there. Raises OSError."""
    _beside(aside).unlink(missing_ok=True)
    aside.unlink(missing_ok=True)


def remove_half_aside(memory: Path, slot: int) -> None:
    """Remove what an earlier process of the slot left half set aside. Raises OSError."""
    for path in memory.glob(f"{ASIDE}{slot}-*.{UNTRAINED_KIND}"):
        if not path.with_suffix(SUFFIX).exists():
            path.unlink(missing_ok=True)


def remove_after(memory: Path, iteration: int, on_removal: Callable[[Path], None] = lambda path: None) -> None:
    """Remove all images of training states after `iteration`: own ones, cuts, copies of other nodes' and those set
    aside, because they are unsound. on_removal: called with each file before. Raises OSError."""
    for found in inventory(memory):
        if found.key.iteration <= iteration or found.key.kind not in (STATE, SHARD):
            continue
        on_removal(found.path)
        if found.path.name.startswith(ASIDE):
            release_aside(found.path)
        else:
            found.path.unlink(missing_ok=True)


def is_aside(image: Path) -> bool:
    """Whether the image has a second name and must not be overwritten. Raises OSError."""
    return image.stat().st_nlink > 1


def asides(memory: Path, on_bad: Callable[[BadImage], None] = lambda error: None) -> list[ImagePage]:
    """List the images that are set aside, the oldest first. A bad one is removed and passed to `on_bad`, since its rank
    would set no other one aside."""
    found = []
    for path in memory.glob(f"{ASIDE}*{SUFFIX}"):
        try:
            found.append(read_page(path))
        except BadImage as error:
            with contextlib.suppress(OSError):
                release_aside(path)
            on_bad(error)
        except OSError:
            pass  # it is gone
    return sorted(found, key=lambda each: (each.key.iteration, each.path))


def persist(
    found: ImagePage, folder: Path, pace: Callable[[int], None] = lambda size: None, cut: Slice = WHOLE
) -> Path:
    """Write an image, or a slice of a STATE image, to its file in the folder of checkpoints `folder`, and return the
    file's path. An existing file is kept unless it was found damaged.

    pace: called with the size of each piece after it was written; it can wait, or raise an error to stop. Raises
    BadImage if the image is damaged or overwritten meanwhile, or if its untrained tensors are gone, OSError.
    """
    if cut.of > 1:
        return _persist_slice(found, folder, pace, cut)
    path = folder / folder_name(found.key.iteration) / f"{stem(found.key)}{SUFFIX}"
    if _is_there(path):
        return path
    head = found.head()
    untrained = _untrained_of(found, head)
    size = found.data_bytes if untrained is None else behind(found.data_bytes) + untrained.data_bytes
    with writing(path, found.key, head, size) as write:
        _copy(found, write, pace)
        if untrained is not None:
            write(bytes(behind(found.data_bytes) - found.data_bytes))
            _copy(untrained, write, pace)
        _check_same(found)
        if untrained is not None:
            _check_same(untrained)
    return path


def _persist_slice(found: ImagePage, folder: Path, pace: Callable[[int], None], cut: Slice) -> Path:
    head = head_of_file(found)
    try:
        about, begin, end = cut_out(head.about, found.data_bytes, cut)
    except (KeyError, TypeError, ValueError) as error:
        raise BadImage(f"{found.path}: not a training state of this release ({error})") from None
    name = f"{stem(found.key)}{cut.text}.{state_digest(found.digest, head.about)}{SUFFIX}"
    path = folder / folder_name(found.key.iteration) / name
    if _is_there(path):
        return path
    with writing(path, found.key, replace(head, about=about).pack(), end - begin) as write:
        _copy_range(found, write, pace, begin, end, _toucher(unfinished_path(path)))
        _check_same(found)
    return path


def _is_there(path: Path) -> bool:
    """Whether a file exists, and was not found damaged."""
    return path.exists() and not any(_damage_note(path, of_mark).exists() for of_mark in (False, True))


def _check_same(found: ImagePage) -> None:
    if read_page(found.path) != found:
        raise BadImage(f"{found.path}: overwritten while it was copied")


def _copy(found: ImagePage, write: Write, pace: Callable[[int], None]) -> None:
    """Write the data of an image, and check them on the way."""
    own = DataDigest(found.number)
    with found.path.open("rb") as image:
        image.seek(found.offset)
        left = found.data_bytes
        while left:
            piece = image.read(min(PIECE, left))
            if not piece:
                raise BadImage(f"{found.path}: cut off")
            write(piece)
            own.update(piece)
            left -= len(piece)
            pace(len(piece))
    if own.digest() != found.digest and read_page(found.path) == found:
        raise BadImage(f"{found.path}: its data do not match their checksum")


def _toucher(path: Path) -> Callable[[], None]:
    """Return a function that shows, now and then, that the unfinished file `path` has a living writer."""
    due = 0.0

    def touch() -> None:
        nonlocal due
        if (now := time.monotonic()) >= due:
            due = now + TOUCH_SECONDS
            os.utime(path)

    return touch


def _copy_range(
    found: ImagePage, write: Write, pace: Callable[[int], None], begin: int, end: int, on_checked: Callable[[], None]
) -> None:
    """Write some of the data of an image. All are checked first, in several threads, since only all of them have a
    checksum; then each leaf that is written must have the digest that it had in this check. on_checked: called after
    each leaf of the check."""
    leaves = found.check_file(reading_threads(), on_checked)
    with open_plain(found.path) as image:
        for at in range(begin // LEAF * LEAF, end, LEAF):
            leaf = memoryview(bytearray(min(LEAF, found.data_bytes - at)))
            read_into(image, found.path, found.offset + at, leaf)
            if digest(leaf) != leaves[at // LEAF]:
                raise BadImage(f"{found.path}: changed while it was copied")
            piece = leaf[max(0, begin - at) : end - at]
            write(piece)
            pace(len(piece))


# ------------------------------------------------------------ untrained tensors
def behind(size: int) -> int:
    """Return the offset of the untrained tensors after `size` bytes of a shard."""
    return -(-size // WORD) * WORD


def _untrained_of(found: ImagePage, head: bytes) -> ImagePage | None:
    """Find the image of untrained tensors for the file of this shard. Raises BadImage if it is gone, OSError."""
    try:
        packed = file_head(found.key, head) if found.key.kind == SHARD else b""
        mark = msgpack.unpackb(packed, strict_map_key=False).get("untrained") if packed else ""
    except (ValueError, TypeError, AttributeError) as error:
        raise BadImage(f"{found.path}: not an image of this release ({error})") from None
    if not mark:
        return None
    wanted = UNTRAINED_KIND, found.key.place, found.key.size, mark
    for each in _images_near(found):
        if (each.key.kind, each.key.place, each.key.size, each.key.mark) == wanted:
            return each
    raise BadImage(f"{found.path}: what of the model is not trained is not in memory any more")


def _images_near(found: ImagePage) -> Iterator[ImagePage]:
    with contextlib.suppress(BadImage, FileNotFoundError):
        yield read_page(_beside(found.path))
    yield from inventory(found.path.parent)


# ------------------------------------------------------------ slices
def slices_of(size: int, nodes: int) -> int:
    """Return how many of the nodes that hold a state write a slice of it. size: of the state, in bytes."""
    return max(1, min(nodes, MOST_SLICES, size // LEAST_SLICE))


def slice_in(path: Path) -> Slice:
    """Return the slice that a file's name gives."""
    match = _SLICE.search(path.name)
    return Slice(int(match[1]), int(match[2])) if match else WHOLE


def state_digest(data_digest: bytes, about: bytes) -> str:
    """Return the text in the names of a state's slices. data_digest, about: of the image, and of its head."""
    return digest(data_digest + about).hex()[:8]


def cut_out(about: bytes, size: int, cut: Slice) -> tuple[bytes, int, int]:
    """Return the description of the tensors in a slice, and the range of their bytes in the data. about: that of all
    tensors (`Head.about`); size: of the data.

    The state of one parameter is never divided, so slices differ by the largest at most. Raises ValueError, KeyError
    or TypeError for a description that no rank writes.
    """
    found = unpack(about)
    ends, number, at = [], 0, 0  # of the parameters
    for entry in found["index"]:
        numbers = _numbers(entry)
        if numbers != list(range(number, number + len(numbers))):
            raise ValueError("its tensors are not in the order of its parameters")
        number += len(numbers)
        for kind, count in found["tensors"][number - len(numbers) : number]:
            at += -(-count * item_bytes(kind) // ALIGN) * ALIGN
        ends.append((at, number))
    if (at, number) != (size, len(found["tensors"])):
        raise ValueError(f"its tensors have {at} bytes, and its data {size}")
    edges = [(0, 0), *ends]

    def edge(number: int) -> int:
        """Return the first parameter of a slice."""
        if number == cut.of:
            return len(ends)
        return min(range(len(edges)), key=lambda each: abs(edges[each][0] * cut.of - number * size))

    first, last = edge(cut.number), edge(cut.number + 1)
    (begin, before), (end, behind) = edges[first], edges[last]
    index = [_renumber_entry(entry, before) for entry in found["index"][first:last]]
    return msgpack.packb(found | {"index": index, "tensors": found["tensors"][before:behind]}), begin, end


def _numbers(entry: Any) -> list[int]:
    """Return the numbers of a parameter's tensors, in order."""
    *_, keys, _, values = entry
    return sorted([*keys.values(), *(number for number, _ in values.values())])


def _renumber_entry(entry: Any, before: int) -> list[Any]:
    """Return the description of a parameter after the first `before` tensors were left out."""
    *place, keys, others, values = entry
    fewer = {key: [number - before, shape] for key, (number, shape) in values.items()}
    return [*place, {key: number - before for key, number in keys.items()}, others, fewer]
