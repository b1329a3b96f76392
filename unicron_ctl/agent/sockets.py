"""The agent's two lines: to the controller, over TCP, and to its ranks, through a Unix socket of its own."""

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
from unicron_ctl.protocol.encryption import public_key, secure_client

MAX_ENDPOINT = 100  # characters of a Unix socket's path (unix(7) has 108 bytes)
# A host that vanishes closes no connection, and TCP tries for a quarter of an hour: ZeroMQ asks every second, and
# connects again when five seconds brought no answer, or two no connection.
TO_CONTROLLER = (
    (zmq.LINGER, 500),
    (zmq.SNDHWM, 10000),
    (zmq.RECONNECT_IVL, 100),
    (zmq.RECONNECT_IVL_MAX, 1000),
    (zmq.CONNECT_TIMEOUT, 2000),
    (zmq.HEARTBEAT_IVL, 1000),
    (zmq.HEARTBEAT_TIMEOUT, 5000),
    (zmq.MAXMSGSIZE, wire.MAX_BYTES),
)


def connect_controller(context: zmq.Context[zmq.Socket[bytes]], address: str, identity: str) -> zmq.Socket[bytes]:
    """A socket that keeps itself connected to the controller; `identity` is unique among all agents.

    Raises zmq.ZMQError for an address that is none, UserError for a public key that cannot be read.
    """
    key = public_key()
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.IDENTITY, identity.encode())
        for option, value in TO_CONTROLLER:
            socket.setsockopt(option, value)
        secure_client(socket, key)
        socket.connect(address)
    except zmq.ZMQError:
        socket.close(0)
        raise
    return socket


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
