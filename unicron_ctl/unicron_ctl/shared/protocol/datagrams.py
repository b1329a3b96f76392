"""Defines the UDP messages on the controller's port. Anybody can send them, so none of them is proof of anything."""

from __future__ import annotations

import msgspec

from unicron_ctl.shared.protocol import ranges, wire
from unicron_detector.formats import HINT


class Hint(msgspec.Struct, kw_only=True):
    """A datagram of the plugin; kind is task_exit."""

    v: ranges.Version
    kind: ranges.Kind
    job: ranges.JobId
    element: ranges.Element
    node: ranges.Kind
    status: ranges.WaitStatus


class Hello(wire.Message, tag="hello"):
    """A question for the controller's public key."""

    padding: ranges.Text = ""
    """Makes it as long as its answer may be, so that it cannot direct a flood at another host."""


class Introduction(wire.Message, tag="introduction"):
    """The answer to :class:`Hello`."""

    credential: ranges.Credential = ""  # the controller's munge credential with its public key
    plain: bool = False  # it encrypts nothing and serves one user at a loopback address
    error: ranges.Text = ""  # why it cannot answer now


def hint(data: bytes) -> Hint:
    """Decode a hint. Raises :class:`wire.BadMessage`."""
    message: Hint = wire.decode(data, Hint, HINT)
    return message
