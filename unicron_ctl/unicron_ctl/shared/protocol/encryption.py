"""Encrypts the controller's connections with CURVE: peers know the controller, nobody else reads the messages, and the
key of its connection identifies the sender of a message (docs/design/trust.md).

The controller's secret is in its state folder and is made at its first start. Its public key is in the configuration,
or peers ask for it (`controller_discovery`). Peers make key pairs of their own; a munge credential proves their user.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import zmq

from unicron_ctl.shared.protocol.zmtp import Keys
from unicron_ctl.shared.settings.config import Config, ControllerConfig
from unicron_ctl.shared.settings.config_file import load
from unicron_ctl.shared.system.errors import WRONG_USE, UserError

SECRET_FILE = "curve.secret"
VARIABLE = "UNICRON_PUBLIC_KEY"  # for programs without a configuration file
PLAIN = ""  # the key of a controller that encrypts nothing
NONE = "none"  # the same in a configuration
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85 (ZeroMQ RFC 32)


def is_key(text: str) -> bool:
    """Whether the text has the form of a CURVE key."""
    return _KEY.fullmatch(text) is not None


def public_key(environment: Mapping[str, str] = os.environ, config: Config | None = None) -> str | None:
    """Return the controller's public key from UNICRON_PUBLIC_KEY or the configuration: :data:`PLAIN` for "none", None
    if neither has one. Raises UserError."""
    key = environment.get(VARIABLE) or (config or load(environment=environment)).controller.public_key
    if not key:
        return None
    if key == NONE:
        return PLAIN
    if not is_key(key):
        raise UserError(
            f"{key!r} is not a public key: write the 40 characters that `unicrond --make-key` printed", WRONG_USE
        )
    return key


def new_pair() -> tuple[str, str]:
    """Make a key pair: public, secret."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def secure_client(socket: zmq.Socket[bytes], key: str, pair: tuple[str, str] | None = None) -> str:
    """Encrypt a socket before it connects, so that only the holder of the secret of `key` can answer. pair: this
    side's, or a new one. Returns this side's public key, or :data:`PLAIN` for a controller that encrypts nothing."""
    if key == PLAIN:
        return PLAIN
    public, secret = pair or new_pair()
    socket.curve_publickey, socket.curve_secretkey = public.encode(), secret.encode()
    socket.curve_serverkey = key.encode()
    return public


def server_keys(config: ControllerConfig, folder: Path) -> tuple[Keys | None, str]:
    """Return the controller's keys, None if it encrypts nothing, and the public one as peers get it. Raises
    UserError."""
    if config.auth == "none" and config.public_key in ("", NONE):
        return None, PLAIN
    public, secret = secret_of_server(folder, config.public_key)
    return Keys(public, secret), public


def secret_of_server(folder: Path, configured: str) -> tuple[str, str]:
    """Return the public key and the secret in `folder`; make them unless the configuration has a public key. Raises
    UserError."""
    path = folder / SECRET_FILE
    make = f"make one with `unicrond --make-key --state-dir {folder}` and put its public key into every unicron.toml"
    if not configured:
        make_key(folder)
    try:
        secret = path.read_text().strip()
    except OSError as error:
        raise UserError(f"public_key is set, but {path}: {error.strerror}: {make}") from None
    if path.stat().st_mode & 0o077:
        raise UserError(f"{path}: others may read it: `chmod 600 {path}`, or {make}")
    key = zmq.curve_public(secret.encode()).decode() if is_key(secret) else ""
    if not key:
        raise UserError(f"{path}: this is not a secret key: move it away, or {make}")
    if configured and configured != key:
        raise UserError(f"public_key does not belong to {path}: {make}")
    return key, secret


def make_key(folder: Path) -> str:
    """Make a secret in `folder`, unless there is one; return its public key. Raises UserError."""
    path = folder / SECRET_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            _, secret = new_pair()
            draft = path.with_suffix(".new")  # a power cut must not leave half a key
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(f"{secret}\n".encode())
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        return zmq.curve_public(path.read_text().strip().encode()).decode()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}: choose another --state-dir, or move the file away") from None
