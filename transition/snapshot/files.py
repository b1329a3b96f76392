"""Images as files of a checkpoint: an agent, which has no torch, can write what a rank has left in memory.

An image that is to become a file is *set aside* by the rank: it gets a second name, under which nobody writes over it,
and which the agent removes when the file is there.

The file of a place's first shard has what of the model is in no shard, too: the data of that image stand behind those
of the shard's, whose head says where each tensor of both is, and names the image by its mark. So a checkpoint is whole
by the files that it always had, and whoever reads one reads these.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgpack

from unicron.transition.snapshot.images import (
    SHARD,
    SUFFIX,
    SUMS,
    UNTRAINED,
    BadImage,
    Found,
    Key,
    front,
    inventory,
    leave,
    look,
)

NOTE = "files.msgpack"  # beside the images: where their checkpoints go
ASIDE = "due-"  # how the second name of an image begins that is to become a file
PIECE = 1 << 22  # bytes
WORD = 8  # bytes: the checksums' words; what stands behind a shard's data begins at a multiple
DAMAGED = "damaged"  # how the name of a file ends that says what is wrong with the others of its mark
_SUMS = struct.Struct("<QQ")
_MODULUS = 1 << 64
assert _SUMS.size == SUMS


def folder_name(iteration: int) -> str:
    """Of the checkpoint with which `iteration` comes next."""
    return f"iteration-{iteration:08d}"


def stem(key: Key) -> str:
    """Of the file's name: what it is to the whole checkpoint."""
    mark = set_mark(key.base, key.mark) if key.kind == SHARD else key.mark
    return f"{mark}.place-{key.place}-of-{key.size}.shard-{key.shard}-of-{key.count}"


def set_mark(base: int, mark: str) -> str:
    """The same in all files of one set of shards: that of an image, which is one of a generation's number, with it."""
    return hashlib.blake2b(f"{base}.{mark}".encode(), digest_size=4).hexdigest()


def file_head(key: Key, head: bytes) -> bytes:
    """What the head of an image says to whoever reads it as a file of a checkpoint. Of a shard that is its last part,
    and it is empty where no file can be made of it. Raises ValueError."""
    if key.kind != SHARD:
        return head
    *_, told = msgpack.unpackb(head)
    return bytes(told)


def unfinished(path: Path) -> Path:
    """The name under which this thread writes `path`."""
    return path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.{threading.get_native_id()}.new")


def finished(path: Path, mark: str) -> None:
    """The file that this thread has written under its unfinished name, and is on disk, gets its own."""
    unfinished(path).replace(path)
    with contextlib.suppress(FileNotFoundError):
        (path.parent / f"{mark}.{DAMAGED}").unlink()


class Destination(NamedTuple):
    """Where a job's checkpoints go, and how many stay."""

    folder: Path
    keep: int


def note_destination(memory: Path, where: Destination) -> None:
    """Beside the images, for the agent. Raises OSError."""
    leave(memory / NOTE, msgpack.packb({"folder": str(where.folder.resolve()), "keep": where.keep}))


def destination(memory: Path) -> Destination | None:
    """That of the job whose images are in `memory`; None where the script makes no checkpoints."""
    try:
        noted = msgpack.unpackb((memory / NOTE).read_bytes())
        return Destination(Path(noted["folder"]), max(1, int(noted["keep"])))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def aside_path(memory: Path, slot: int, iteration: int) -> Path:
    """The second name of an image that is set aside."""
    return memory / f"{ASIDE}{slot}-{iteration}{SUFFIX}"


def set_aside(image: Path, aside: Path, untrained: Path | None = None) -> None:
    """The image is whole, and stays as it is under the name `aside` until that is removed; what has that name is
    another one, of a process before this one that came by the same iteration. untrained: the image that its file needs,
    too; it stays as long. Raises OSError."""
    try:
        if untrained is not None:
            _name_also(untrained, _beside(aside))
        _name_also(image, aside)
    except OSError:
        _beside(aside).unlink(missing_ok=True)
        raise


def _beside(aside: Path) -> Path:
    """The second name of what is in no shard, where `aside` is that of the shard. It is no image's name: who looks for
    images has them by their own."""
    return aside.with_suffix(f".{UNTRAINED}")


def _name_also(image: Path, name: Path) -> None:
    new = name.with_name(f"{name.name}.{os.getpid()}.new")
    new.unlink(missing_ok=True)
    new.hardlink_to(image)
    new.replace(name)
    new.unlink(missing_ok=True)  # where both were this image already, which replaces nothing


def let_go(aside: Path) -> None:
    """What is set aside under this name has its file, or will have none. The image's name goes last: as long as it is
    there its rank sets no other one aside. Raises OSError."""
    _beside(aside).unlink(missing_ok=True)
    aside.unlink(missing_ok=True)


def tidy(memory: Path, slot: int) -> None:
    """For a slot's new process: its last one may have ended between the two names that it gave. Raises OSError."""
    for path in memory.glob(f"{ASIDE}{slot}-*.{UNTRAINED}"):
        if not path.with_suffix(SUFFIX).exists():
            path.unlink(missing_ok=True)


def is_aside(image: Path) -> bool:
    """It has a second name, so nobody may write over it. Raises OSError."""
    return image.stat().st_nlink > 1


def asides(memory: Path, tell: Callable[[BadImage], None] = lambda error: None) -> list[Found]:
    """The images that are to become files, the oldest first. What is none any more is removed, with a word to `tell`:
    as long as it is there its rank sets no other one aside."""
    found = []
    for path in memory.glob(f"{ASIDE}*{SUFFIX}"):
        try:
            found.append(look(path))
        except BadImage as error:
            with contextlib.suppress(OSError):
                let_go(path)
            tell(error)
        except OSError:
            pass  # it is gone
    return sorted(found, key=lambda each: (each.key.iteration, each.path))


def persist(found: Found, folder: Path, pace: Callable[[int], None] = lambda size: None) -> Path:
    """Write an image as a file of the checkpoint in `folder`; returns its path, on disk. One that is there stays,
    unless somebody has found its checkpoint damaged.

    pace: told the bytes of each piece that was written, it may wait, or raise what ends this. The data are not looked
    at: their checksums go with them, and whoever reads the file compares them. Raises BadImage where the writer has
    begun to overwrite the image meanwhile, or where what belongs into its file, too, is not there, and OSError.
    """
    path = folder / folder_name(found.key.iteration) / f"{stem(found.key)}{SUFFIX}"
    mark = path.name.split(".")[0]
    if path.exists() and not (path.parent / f"{mark}.{DAMAGED}").exists():
        return path
    head, data = found.read()
    untrained = _untrained_of(found, head)
    size, sums = found.data_bytes, found.sums
    if untrained is not None:
        sums = joined(sums, size, bytes(data[size // WORD * WORD :]), untrained.sums)
        size = behind(size) + untrained.data_bytes
    path.parent.mkdir(parents=True, exist_ok=True)
    new = unfinished(path)
    try:
        with new.open("wb") as file:
            file.write(front(found.key, head, size, sums))
            begin = file.tell()
            _copy(found, file, pace)
            if untrained is not None:
                file.seek(begin + behind(found.data_bytes))
                _copy(untrained, file, pace)
            file.flush()
            os.fsync(file.fileno())
        if any(each is not None and look(each.path) != each for each in (found, untrained)):
            raise BadImage(f"{found.path}: overwritten while it was copied")
        finished(path, mark)
    finally:
        with contextlib.suppress(OSError):
            new.unlink()
    return path


def _copy(found: Found, into: BinaryIO, pace: Callable[[int], None]) -> None:
    """The data of an image."""
    with found.path.open("rb") as image:
        image.seek(found.offset)
        left = found.data_bytes
        while left:
            piece = image.read(min(PIECE, left))
            if not piece:
                raise BadImage(f"{found.path}: cut off")
            into.write(piece)
            left -= len(piece)
            pace(len(piece))


# ------------------------------------------------------------ what of a model is in no shard
def behind(size: int) -> int:
    """Where in a file's data those begin that stand behind `size` bytes of a shard."""
    return -(-size // WORD) * WORD


def joined(sums: bytes, size: int, tail: bytes, others: bytes) -> bytes:
    """The checksum (migrate.checksum) of two images' data, the second :func:`behind` the first, from theirs.
    size: of the first, bytes; tail: the last ones of it that are no whole word. The second is of whole words."""
    (plain, weighted), (other_plain, other_weighted), words = _SUMS.unpack(sums), _SUMS.unpack(others), size // WORD
    if tail:  # summed byte by byte, and from now on a word
        word = int.from_bytes(tail, "little")
        word ^= word >> 32
        plain += word - sum(tail)
        weighted += word * (2 * words + 1) - sum((2 * number + 1) * byte for number, byte in enumerate(tail))
        words += 1
    total = plain + other_plain, weighted + other_weighted + 2 * words * other_plain
    return _SUMS.pack(*(each % _MODULUS for each in total))


def _untrained_of(found: Found, head: bytes) -> Found | None:
    """The image of what of the model is in no shard, where it belongs into the file of this one. Raises BadImage where
    it is not there, OSError."""
    try:
        told = file_head(found.key, head) if found.key.kind == SHARD else b""
        mark = msgpack.unpackb(told, strict_map_key=False).get("untrained") if told else ""
    except (ValueError, TypeError, AttributeError) as error:
        raise BadImage(f"{found.path}: not an image of this release ({error})") from None
    if not mark:
        return None
    wanted = UNTRAINED, found.key.place, found.key.size, mark
    for each in _images_near(found):
        if (each.key.kind, each.key.place, each.key.size, each.key.mark) == wanted:
            return each
    raise BadImage(f"{found.path}: what of the model is not trained is not in memory any more")


def _images_near(found: Found) -> Iterator[Found]:
    with contextlib.suppress(BadImage, FileNotFoundError):
        yield look(_beside(found.path))
    yield from inventory(found.path.parent)
