"""UDP messages, on the port where the controller listens: they come from anybody and are never trusted alone."""

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
    """A question for the controller's public key. It is as long as its answer may be, so that nobody can direct a flood
    at somebody else."""

    padding: ranges.Text = ""


class Introduction(wire.Message, tag="introduction"):
    """The answer. credential: a munge credential of the controller that holds its public key. plain: the controller
    encrypts nothing and serves one user at a loopback address. error: why it cannot answer now."""

    credential: ranges.Credential = ""
    plain: bool = False
    error: ranges.Text = ""


def hint(data: bytes) -> Hint:
    """The hint in `data`. Raises :class:`wire.BadMessage`."""
    found: Hint = wire.decode(data, Hint, HINT)
    return found
