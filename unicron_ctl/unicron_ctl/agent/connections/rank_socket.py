"""The agent's line to its ranks, a Unix socket of its own, and the messages on it."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import zmq

from unicron_ctl.agent.connections.held_folders import let_go, try_hold
from unicron_ctl.shared.protocol import wire
from unicron_detector.formats import RANKS
from unicron_detector.processes.rank_messages import FROM_RANK, FromRank, ToRank

PLACES = ("/tmp", "/dev/shm")  # where an epilog looks for what is left
FOR_RANKS = re.compile(r"unicron-\d+-\w{8}(?:-\w{8})?")  # names of folders with the ranks' socket, or their counters
MAX_ENDPOINT = 100  # characters of a Unix socket's path (unix(7) has 108 bytes)


class RankLine:
    """The ranks' line: ranks connect to `endpoint`, and the agent polls `socket`. :meth:`set_identity` must be called
    for a slot before anything is sent to it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: str) -> None:
        self.folder, self.endpoint = folder, f"ipc://{folder}/ranks"
        self._held = try_hold(Path(folder))
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_BYTES)
        self.socket.bind(self.endpoint)
        self._identities: dict[int, bytes] = {}

    def bind_again(self) -> bool:
        """Make the socket again if something has removed it, as cleaners of /tmp do; True if so. ZeroMQ removes the
        name when it closes a socket, so the old one is kept and the new one bound beside it."""
        path = self.endpoint.removeprefix("ipc://")
        if os.path.exists(path):
            return False
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        let_go(self._held)
        self._held = try_hold(Path(self.folder))
        self.socket.bind(f"{self.endpoint}.new")
        os.rename(f"{path}.new", path)
        return True

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        let_go(self._held)
        self._held = -1

    def receive(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield each message that has come: (sender, data)."""
        while int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:  # a look costs less than an error of a vain call
            identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            yield identity, frames[-1] if frames else b""

    def set_identity(self, slot: int, identity: bytes) -> None:
        """Note the sender of the slot's process."""
        self._identities[slot] = identity

    def send(self, slots: Iterable[int], message: wire.Message | ToRank) -> None:
        """Send a message to those of the slots whose sender is known."""
        data = for_rank(message)
        for slot in slots:
            if slot in self._identities:
                self.socket.send_multipart([self._identities[slot], data])


def for_rank(message: wire.Message | ToRank) -> bytes:
    """Return a message of the controller or of this agent as a map with the version of the ranks' protocol
    (:mod:`unicron_detector.processes.rank_messages`)."""
    kind = {} if isinstance(message, wire.Message) else {"kind": message.kind}
    fields: dict[str, Any] = kind | msgspec.to_builtins(message, str_keys=False)
    data: bytes = msgpack.packb(fields | {"v": RANKS.number})
    return data


class Head(msgspec.Struct):
    """The process and the slot that have sent a message."""

    v: int
    kind: str
    slot: int
    incarnation: int


_head = msgspec.msgpack.Decoder(Head)
_bodies = {kind: msgspec.msgpack.Decoder(message) for kind, message in FROM_RANK.items()}


def from_rank(data: bytes) -> tuple[Head, FromRank]:
    """Return a rank's message. Raises msgspec.MsgspecError for one that does not fit."""
    head = _head.decode(data)
    if refusal := RANKS.refusal(head.v):
        raise msgspec.ValidationError(f"{refusal}; the job's Python has another unicron than the agent")
    if head.kind not in FROM_RANK:
        raise msgspec.ValidationError(f"{head.kind!r} is no message of a rank")
    return head, _bodies[head.kind].decode(data)


def socket_folder(job: str, environment: Mapping[str, str]) -> str:
    """Make a private folder in which sockets' paths are short enough, in the first place that has room: TMPDIR may be
    full. Its name begins with the element's own job id, by which the epilog finds what a killed agent has left. Raises
    OSError."""
    prefix = f"unicron-{environment.get('SLURM_JOB_ID', job)}-"
    first: OSError | None = None
    for parent in places(environment):
        try:
            folder = tempfile.mkdtemp(prefix=prefix, dir=os.path.abspath(parent))
        except OSError as error:
            first = first or OSError(error.errno, error.strerror, parent)
            continue
        try:
            if len(folder) + len("/ranks") <= MAX_ENDPOINT:
                _try_socket(f"{folder}/ranks")
                return folder
        except OSError as error:
            first = first or OSError(error.errno, error.strerror, parent)
        os.rmdir(folder)
    raise first or OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), PLACES[0])


def places(environment: Mapping[str, str]) -> list[str]:
    """Return the places for such a folder."""
    return list(dict.fromkeys((environment.get("TMPDIR") or PLACES[0], *PLACES)))


def _try_socket(path: str) -> None:
    """Raise OSError if there is room for a folder but not for a socket in it."""
    with socket.socket(socket.AF_UNIX) as tried:
        tried.bind(path)
    os.unlink(path)
