"""Images as files of a checkpoint: an agent, which has no torch, can write what a rank has left in memory.

An image that is to become a file is *set aside* by the rank: it gets a second name, under which nobody writes over it,
and which the agent removes when the file is there.

The file of a place's first shard has what of the model is in no shard, too: the data of that image stand behind those
of the shard's, whose head says where each tensor of both is, and names the image by its mark. So there is one kind of
file, and a checkpoint is whole when each place and shard has its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import xxhash

from unicron_transition.snapshot.image_format import (
    DIGEST,
    SHARD,
    SUFFIX,
    UNTRAINED_KIND,
    BadImage,
    Data,
    ImagePage,
    Key,
    file_front,
    inventory,
    read_page,
    write_note,
)
from unicron_transition.snapshot.reading import unpack

NOTE = "files.msgpack"  # beside the images: where their checkpoints go
ASIDE = "due-"  # how the second name of an image begins that is to become a file
PIECE = 1 << 22  # bytes
WORD = 8  # bytes: what stands behind a shard's data begins at a multiple
Write = Callable[[Data], None]
DAMAGE_SUFFIX = "damaged"  # how the name of a file ends that says what is wrong with the others of its mark


def folder_name(iteration: int) -> str:
    """The folder of the checkpoint with which `iteration` comes next."""
    return f"iteration-{iteration:08d}"


def stem(key: Key) -> str:
    """The file's name without its suffix: which part of the checkpoint it is."""
    mark = set_mark(key.base, key.mark) if key.kind == SHARD else key.mark
    return f"{mark}.place-{key.place}-of-{key.size}.shard-{key.shard}-of-{key.count}"


def set_mark(base: int, mark: str) -> str:
    """The mark that all files of one set of shards share. base, mark: as in the keys of their images."""
    return hashlib.blake2b(f"{base}.{mark}".encode(), digest_size=4).hexdigest()


def file_head(key: Key, head: bytes) -> bytes:
    """The part of an image's head that describes it as a checkpoint file; of a shard's head that is the last part, and
    empty where no file can be made of the image. Raises ValueError."""
    if key.kind != SHARD:
        return head
    *_, told = unpack(head)
    return bytes(told)


def unfinished_path(path: Path) -> Path:
    """The name under which this thread writes `path`."""
    return path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.{threading.get_native_id()}.new")


@contextlib.contextmanager
def writing(path: Path, key: Key, head: bytes, size: int, mark: str) -> Iterator[Write]:
    """Write a file whose data, `size` bytes, are given to the function piece by piece. It gets its name when all of it
    is on disk; where something fails nothing is left of it. mark: as in the file's name. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new, total = unfinished_path(path), xxhash.xxh3_128()
    try:
        with new.open("wb") as file:

            def write(data: Data) -> None:
                file.write(data)
                total.update(data)

            file.write(file_front(key, head, size, bytes(DIGEST)))
            yield write
            file.seek(0)
            file.write(file_front(key, head, size, total.digest()))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        with contextlib.suppress(FileNotFoundError):
            (path.parent / f"{mark}.{DAMAGE_SUFFIX}").unlink()
    finally:
        with contextlib.suppress(OSError):  # a file system that fails may fail at this too
            new.unlink()


class Destination(NamedTuple):
    """The folder of a job's checkpoints, and how many of them stay."""

    folder: Path
    keep: int


def note_destination(memory: Path, where: Destination) -> None:
    """Leave a note beside the images, for the agent. Raises OSError."""
    write_note(memory / NOTE, msgpack.packb({"folder": str(where.folder.resolve()), "keep": where.keep}))


def destination(memory: Path) -> Destination | None:
    """Return where the job whose images are in `memory` has its checkpoints, None where the script makes none."""
    try:
        noted = msgpack.unpackb((memory / NOTE).read_bytes())
        return Destination(Path(noted["folder"]), max(1, int(noted["keep"])))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def aside_path(memory: Path, slot: int, iteration: int) -> Path:
    """The second name of an image that is set aside."""
    return memory / f"{ASIDE}{slot}-{iteration}{SUFFIX}"


def set_aside(image: Path, aside: Path, untrained: Path | None = None) -> None:
    """Keep a whole image as it is, under the name `aside`, until the agent removes that name. An image that has it
    already is replaced: an earlier process came by the same iteration. untrained: the image that its file needs, too;
    it stays as long. Raises OSError."""
    try:
        if untrained is not None:
            _name_also(untrained, _beside(aside))
        _name_also(image, aside)
    except OSError:
        _beside(aside).unlink(missing_ok=True)
        raise


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


def _beside(aside: Path) -> Path:
    """The second name of the untrained tensors' image, where `aside` is that of the shard. It has a suffix of its own,
    so that a look for images finds the image once."""
    return aside.with_suffix(f".{UNTRAINED_KIND}")


def _name_also(image: Path, name: Path) -> None:
    new = name.with_name(f"{name.name}.{os.getpid()}.new")
    new.unlink(missing_ok=True)
    new.hardlink_to(image)
    new.replace(name)
    new.unlink(missing_ok=True)  # where both were this image already, which replaces nothing


def release_aside(aside: Path) -> None:
    """Release what is set aside under this name: it has its file, or will have none. The image's name goes last: as
    long as it is there its rank sets no other one aside. Raises OSError."""
    _beside(aside).unlink(missing_ok=True)
    aside.unlink(missing_ok=True)


def remove_half_aside(memory: Path, slot: int) -> None:
    """Remove what an earlier process of the slot had begun to set aside when it ended. Raises OSError."""
    for path in memory.glob(f"{ASIDE}{slot}-*.{UNTRAINED_KIND}"):
        if not path.with_suffix(SUFFIX).exists():
            path.unlink(missing_ok=True)


def is_aside(image: Path) -> bool:
    """Whether the image has a second name, so that nobody may write over it. Raises OSError."""
    return image.stat().st_nlink > 1


def asides(memory: Path, on_bad: Callable[[BadImage], None] = lambda error: None) -> list[ImagePage]:
    """The images that are to become files, the oldest first. A bad one is removed, since its rank sets no other one
    aside before that; on_bad is called."""
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


def persist(found: ImagePage, folder: Path, pace: Callable[[int], None] = lambda size: None) -> Path:
    """Write an image as a file of the checkpoint in `folder`; returns its path, on disk. A file that is there stays,
    unless somebody has found its checkpoint damaged.

    pace: called with the bytes of each piece that was written, it may wait, or raise what ends this. Raises BadImage
    where the image is damaged or its writer overwrites it meanwhile, or where the untrained tensors that belong into
    the file are not there, and OSError.
    """
    path = folder / folder_name(found.key.iteration) / f"{stem(found.key)}{SUFFIX}"
    mark = path.name.split(".")[0]
    if path.exists() and not (path.parent / f"{mark}.{DAMAGE_SUFFIX}").exists():
        return path
    head = found.head()
    untrained = _untrained_of(found, head)
    size = found.data_bytes if untrained is None else behind(found.data_bytes) + untrained.data_bytes
    with writing(path, found.key, head, size, mark) as write:
        _copy(found, write, pace)
        if untrained is not None:
            write(bytes(behind(found.data_bytes) - found.data_bytes))
            _copy(untrained, write, pace)
        if any(each is not None and read_page(each.path) != each for each in (found, untrained)):
            raise BadImage(f"{found.path}: overwritten while it was copied")
    return path


def _copy(found: ImagePage, write: Write, pace: Callable[[int], None]) -> None:
    """Write the data of an image, which are checked on the way."""
    own = xxhash.xxh3_128()
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


# ------------------------------------------------------------ what of a model is in no shard
def behind(size: int) -> int:
    """Return where in a file the data begin that stand behind `size` bytes of a shard."""
    return -(-size // WORD) * WORD


def _untrained_of(found: ImagePage, head: bytes) -> ImagePage | None:
    """The image of the untrained tensors that belong into the file of this shard. Raises BadImage where there is none,
    OSError."""
    try:
        told = file_head(found.key, head) if found.key.kind == SHARD else b""
        mark = msgpack.unpackb(told, strict_map_key=False).get("untrained") if told else ""
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
