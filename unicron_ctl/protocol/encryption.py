"""CURVE on the controller's socket: peers know whom they talk to, and nobody else reads it (docs/design/trust.md).

The controller's secret lies in its state folder; everybody's configuration holds the public key. Peers make a key pair
of their own for each connection: who they are is munge's matter. Without a public key nothing is encrypted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import zmq

from unicron_ctl.config import Config, load
from unicron_ctl.errors import WRONG_USE, UserError

SECRET_FILE = "curve.secret"
VARIABLE = "UNICRON_PUBLIC_KEY"  # for programs without a configuration file
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85 (ZeroMQ RFC 32)


def is_key(text: str) -> bool:
    """Whether it has the form of a CURVE key."""
    return _KEY.fullmatch(text) is not None


def public_key(environment: Mapping[str, str] = os.environ, config: Config | None = None) -> str:
    """The controller's public key: UNICRON_PUBLIC_KEY, else the configuration's, else "". Raises UserError."""
    key = environment.get(VARIABLE) or (config or load(environment=environment)).controller.public_key
    if key and not is_key(key):
        raise UserError(
            f"{key!r} is no public key: write the 40 characters that `unicrond --make-key` printed", WRONG_USE
        )
    return key


def secure_client(socket: zmq.Socket[bytes], key: str) -> None:
    """Before connect: talk to the holder of the secret key only."""
    if key:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = key.encode()


def secure_server(socket: zmq.Socket[bytes], key: str, folder: Path) -> None:
    """Before bind: only for peers that know `key`, whose secret lies in `folder`. Raises UserError."""
    if not key:
        return
    path = folder / SECRET_FILE
    make = f"make one with `unicrond --make-key --state-dir {folder}` and put its public key into every unicron.toml"
    try:
        secret = path.read_text().strip()
    except OSError as error:
        raise UserError(f"public_key is set, but {path}: {error.strerror}: {make}") from None
    if path.stat().st_mode & 0o077:
        raise UserError(f"{path}: others may read it: `chmod 600 {path}`, or {make}")
    if not is_key(secret) or zmq.curve_public(secret.encode()).decode() != key:
        raise UserError(f"public_key does not belong to {path}: {make}")
    socket.curve_server = True
    socket.curve_secretkey = secret.encode()


def make_key(folder: Path) -> str:
    """A new secret in `folder`, unless there is one; returns its public key. Raises UserError."""
    path = folder / SECRET_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            _, secret = zmq.curve_keypair()
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secret + b"\n")
        return zmq.curve_public(path.read_text().strip().encode()).decode()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}: choose another --state-dir, or move the file away") from None
