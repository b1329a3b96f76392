"""Makes the payloads of munge credentials. Each names its purpose, and a CURVE public key or a page's address, so that
it is worthless for another purpose, over another connection, or at another page."""

from __future__ import annotations

import json

from unicron_ctl.shared.protocol.wire import Register

CONTROLLER = "controller"


def of_controller(key: str) -> str:
    """Claim that this public key is the controller's."""
    return _claim(CONTROLLER, key)


def of_agent(message: Register, key: str) -> str:
    """Claim that the connection with this key belongs to the agent of this message."""
    return _claim("agent", message.job, message.element, message.node, message.agent, key)


def of_asker(key: str) -> str:
    """Claim that the connection with this key belongs to the asking user."""
    return _claim("asker", key)


def of_viewer(origin: str) -> str:
    """Claim a view of the page of `unicronctl web` that browsers know by this origin: scheme://host:port."""
    return _claim("viewer", origin)


def controller_key(payload: bytes) -> str:
    """Return the key in :func:`of_controller`; "" for another payload."""
    try:
        claim = json.loads(payload)
    except ValueError:
        return ""
    return claim[2] if isinstance(claim, list) and claim[:2] == ["unicron", CONTROLLER] and len(claim) == 3 else ""


def _claim(*words: str | int) -> str:
    return json.dumps(["unicron", *words])
