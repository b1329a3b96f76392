"""Gives images to another agent of the job, and gets images from it (:mod:`image_stream` has the protocol)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from unicron_ctl.agent.snapshots import image_stream as stream
from unicron_ctl.shared.system.addresses import split
from unicron_transition.snapshot.image_format import BadImage, ImagePage, Key


def put(
    found: ImagePage,
    address: str,
    token: str,
    meter: stream.Meter,
    rate: float = 0.0,
    wanted: stream.Check = lambda: True,
) -> None:
    """Give an image to the agent at `address`. rate: the most bytes a second, 0 for no limit. wanted(): whether it is
    still wanted.

    Raises OSError, NoLongerWanted, and BadImage if it was overwritten meanwhile, or was damaged and has been removed.
    """
    with _connect(address, token, stream.Request(bytes=found.used)) as connection:
        connection.settimeout(stream.room_seconds(found.used))
        reply = stream.receive(connection, len(stream.GO))
        connection.settimeout(stream.SILENT_SECONDS)
        if reply == stream.SO:
            raise stream.Busy("it serves others")
        if reply != stream.GO:
            length = min(stream.MOST_REASON, stream.LENGTH.unpack(stream.receive(connection, stream.LENGTH.size))[0])
            raise stream.TransferError(stream.receive(connection, length).decode(errors="replace"))
        stream.send_image(connection, found, rate, meter, wanted=wanted)
        answer = stream.receive(connection, len(stream.KEPT))
        if answer == stream.HARM and (problem := stream.examine(found)):
            raise BadImage(problem)
        if answer != stream.KEPT:
            raise stream.ChecksumError(f"{address} has not kept it: it came damaged")


def get(key: Key, folder: Path, address: str, token: str, meter: stream.Meter) -> ImagePage:
    """Get an image from the agent at `address` into `folder`. Raises OSError, Busy, NoRoom if there is no room here,
    BadImage."""
    with _connect(address, token, stream.Request(key)) as connection:
        length = stream.LENGTH.unpack(stream.receive(connection, stream.LENGTH.size))[0]
        if not length:
            raise stream.Busy("it serves others")
        try:
            with _open_draft(folder, length) as draft:
                draft.receive(connection, meter)
                found = draft.keep_image()
        except stream.ChecksumError:
            connection.sendall(stream.HARM)
            raise
        connection.sendall(stream.KEPT)
    if found.key != key:
        found.path.unlink()
        raise BadImage(f"{address} has sent another image than was asked for")
    return found


def _open_draft(folder: Path, length: int) -> stream.Draft:
    try:
        return stream.Draft(folder, length)
    except (OSError, OverflowError) as error:
        raise stream.NoRoom("".join(stream.no_room(folder, length, error))) from error


@contextlib.contextmanager
def _connect(address: str, token: str, request: stream.Request) -> Iterator[socket.socket]:
    with socket.create_connection(split(address), stream.SILENT_SECONDS) as connection:
        connection.settimeout(stream.SILENT_SECONDS)
        stream.keep_alive(connection)
        nonce, data = stream.receive(connection, stream.NONCE), msgspec.msgpack.encode(request)
        connection.sendall(stream.proof(token, nonce, data) + stream.LENGTH.pack(len(data)) + data)
        yield connection
