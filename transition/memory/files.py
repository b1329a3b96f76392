"""Images as files of a checkpoint: an agent, which has no torch, can write what a rank has left in memory.

An image that is to become a file is *set aside* by the rank: it gets a second name, under which nobody writes over it,
and which the agent removes when the file is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgpack

from transition.memory.images import SHARD, SUFFIX, BadImage, Found, Key, leave, look

NOTE = "files.msgpack"  # beside the images: where their checkpoints go
ASIDE = "due-"  # how the second name of an image begins that is to become a file
PIECE = 1 << 22  # bytes
DAMAGED = "damaged"  # how the name of a file ends that says what is wrong with the others of its mark


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


def set_aside(image: Path, aside: Path) -> None:
    """The image is whole, and stays as it is under the name `aside` until that is removed; what has that name is
    another one, of a process before this one that came by the same iteration. Raises OSError."""
    new = aside.with_name(f"{aside.name}.{os.getpid()}.new")
    new.unlink(missing_ok=True)
    new.hardlink_to(image)
    new.replace(aside)
    new.unlink(missing_ok=True)  # where both were this image already, which replaces nothing


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
                path.unlink()
            tell(error)
        except OSError:
            pass  # it is gone
    return sorted(found, key=lambda each: (each.key.iteration, each.path))


def persist(found: Found, folder: Path, pace: Callable[[int], None] = lambda size: None) -> Path:
    """Write an image as a file of the checkpoint in `folder`; returns its path, on disk. One that is there stays,
    unless somebody has found its checkpoint damaged.

    pace: told the bytes of each piece that was written, it may wait, or raise what ends this. The data are not looked
    at: their checksums go with them, and whoever reads the file compares them. Raises BadImage where the writer has
    begun to overwrite the image meanwhile, and OSError.
    """
    path = folder / folder_name(found.key.iteration) / f"{stem(found.key)}{SUFFIX}"
    mark = path.name.split(".")[0]
    if path.exists() and not (path.parent / f"{mark}.{DAMAGED}").exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    new = unfinished(path)
    try:
        with found.path.open("rb") as image, new.open("wb") as file:
            while piece := image.read(PIECE):
                file.write(piece)
                pace(len(piece))
            file.truncate(found.used)
            file.flush()
            os.fsync(file.fileno())
        if look(found.path) != found or look(new).used != found.used:
            raise BadImage(f"{found.path}: overwritten while it was copied")
        finished(path, mark)
    finally:
        with contextlib.suppress(OSError):
            new.unlink()
    return path
