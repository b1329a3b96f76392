"""The payloads of munge credentials. Each names its purpose, and a CURVE public key or a page's address, so that it
is worth nothing for another purpose, over another connection, or at another page."""

from __future__ import annotations

import json

from unicron_ctl.shared.protocol.wire import Register

CONTROLLER = "controller"


def of_controller(key: str) -> str:
    """The user who makes the credential says that this public key is the controller's."""
    return _claim(CONTROLLER, key)


def of_agent(message: Register, key: str) -> str:
    """The connection with this key speaks for the agent of this message."""
    return _claim("agent", message.job, message.element, message.node, message.agent, key)


def of_asker(key: str) -> str:
    """The user who asks by the connection with this key."""
    return _claim("asker", key)


def of_viewer(origin: str) -> str:
    """The user opens the page of `unicronctl web` that browsers know by this origin: scheme://host:port."""
    return _claim("viewer", origin)


def controller_key(payload: bytes) -> str:
    """The key in :func:`of_controller`; "" when it is something else."""
    try:
        found = json.loads(payload)
    except ValueError:
        return ""
    return found[2] if isinstance(found, list) and found[:2] == ["unicron", CONTROLLER] and len(found) == 3 else ""


def _claim(*words: str | int) -> str:
    return json.dumps(["unicron", *words])
