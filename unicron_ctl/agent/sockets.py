"""The agent's line to its ranks, a Unix socket of its own, and how a message looks to them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
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


def bind_again(socket: zmq.Socket[bytes], endpoint: str) -> bool:
    """Where something has removed the socket from its folder, as cleaners of /tmp do: make it once more. True when that
    was needed. ZeroMQ removes a name when it lets go of it, so the old one is kept and the new one bound beside it."""
    path = endpoint.removeprefix("ipc://")
    if os.path.exists(path):
        return False
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    socket.bind(f"{endpoint}.new")
    os.rename(f"{path}.new", path)
    return True


def for_rank(message: wire.Message) -> bytes:
    """The message as ranks understand it: a map with the version of their protocol (:mod:`detector.rank_channel`)."""
    fields: dict[str, Any] = msgspec.to_builtins(message, str_keys=False)
    data: bytes = msgpack.packb(fields | {"v": RANK_VERSION})
    return data


def socket_folder(job: str, environment: Mapping[str, str]) -> str:
    """A private folder whose sockets' paths are short enough. Its name begins with the element's own job id: that is
    all that the epilog, which removes what a killed agent leaves, is told by Slurm.
    """
    prefix = f"unicron-{environment.get('SLURM_JOB_ID', job)}-"
    folder = tempfile.mkdtemp(prefix=prefix)
    if len(folder) + len("/ranks") <= MAX_ENDPOINT:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix=prefix, dir="/tmp")
