"""The agent's line to its ranks, a Unix socket of its own, and how a message looks to them."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import msgpack
import msgspec
import zmq

from detector.rank_channel import VERSION as RANK_VERSION
from unicron_ctl.protocol import wire

MAX_ENDPOINT = 100  # characters of a Unix socket's path (unix(7) has 108 bytes)


def bind_ranks(context: zmq.Context[zmq.Socket[bytes]], folder: str) -> tuple[zmq.Socket[bytes], str]:
    """The socket for the ranks, in `folder`, and its endpoint."""
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_BYTES)
    endpoint = f"ipc://{folder}/ranks"
    socket.bind(endpoint)
    return socket, endpoint


def for_rank(message: wire.Message) -> bytes:
    """The message as ranks understand it: a map with the version of their protocol (:mod:`detector.rank_channel`)."""
    fields: dict[str, Any] = msgspec.to_builtins(message, str_keys=False)
    data: bytes = msgpack.packb(fields | {"v": RANK_VERSION})
    return data


def socket_folder(prefix: str) -> str:
    """A private folder whose sockets' paths are short enough."""
    folder = tempfile.mkdtemp(prefix=prefix)
    if len(folder) + len("/ranks") <= MAX_ENDPOINT:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix=prefix, dir="/tmp")
