"""Images as files of a checkpoint: an agent, which has no torch, can write what a rank has left in memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from pathlib import Path

import msgpack

from transition.memory.images import SUFFIX, BadImage, Found, Key, look

NOTE = "files.msgpack"  # beside the images: where their checkpoints go
DAMAGED = "damaged"  # how the name of a file ends that says what is wrong with the others of its mark


def folder_name(iteration: int) -> str:
    """Of the checkpoint with which `iteration` comes next."""
    return f"iteration-{iteration:08d}"


def stem(key: Key) -> str:
    """Of the file's name: what it is to the whole checkpoint."""
    return f"{key.mark}.place-{key.place}-of-{key.size}.shard-{key.shard}-of-{key.count}"


def unfinished(path: Path) -> Path:
    """The name under which this process writes `path`."""
    return path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.new")


def finished(path: Path, mark: str) -> None:
    """The file that was written under its unfinished name, and is on disk, gets its own."""
    unfinished(path).replace(path)
    with contextlib.suppress(FileNotFoundError):
        (path.parent / f"{mark}.{DAMAGED}").unlink()


def note_destination(memory: Path, folder: Path) -> None:
    """Beside the images: `folder` is where the job's checkpoints are. Raises OSError."""
    new = memory / f"{NOTE}.{os.getpid()}.new"
    new.write_bytes(msgpack.packb({"folder": str(folder.resolve())}))
    new.replace(memory / NOTE)


def destination(memory: Path) -> Path | None:
    """Where the checkpoints of the job go whose images are in `memory`; None where the script makes none."""
    try:
        return Path(msgpack.unpackb((memory / NOTE).read_bytes())["folder"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def persist(found: Found, folder: Path) -> Path:
    """Write an image as a file of the checkpoint in `folder`; returns its path, on disk. One that is there stays.

    The data are not looked at: their checksums go with them, and whoever reads the file compares them. Raises BadImage
    where the writer has begun to overwrite the image meanwhile, and OSError.
    """
    path = folder / folder_name(found.key.iteration) / f"{stem(found.key)}{SUFFIX}"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    new = unfinished(path)
    try:
        with found.path.open("rb") as image, new.open("wb") as file:
            shutil.copyfileobj(image, file, 1 << 22)
            file.truncate(found.used)
            file.flush()
            os.fsync(file.fileno())
        if look(found.path) != found or look(new).used != found.used:
            raise BadImage(f"{found.path}: overwritten while it was copied")
        finished(path, found.key.mark)
    finally:
        with contextlib.suppress(OSError):
            new.unlink()
    return path
