"""Messages by UDP, on the port where the controller listens: from anybody, and never trusted alone."""

from __future__ import annotations

import msgspec

from unicron.ctl.protocol import ranges, wire

HINT_VERSION = 1  # of the SPANK plugin


class Hint(msgspec.Struct, kw_only=True):
    """A datagram of the plugin: kind is task_exit (a plugin of 0.1 also sends prolog and epilog)."""

    v: ranges.Version
    kind: ranges.Kind
    job: ranges.JobId
    element: ranges.Element
    node: ranges.Kind
    status: ranges.WaitStatus


class Hello(wire.Message, tag="hello"):
    """Asks for the controller's public key. As long as its answer may be, so that nobody can have a flood sent to
    somebody else."""

    padding: ranges.Text = ""


class Introduction(wire.Message, tag="introduction"):
    """The answer. credential: a munge credential of the controller that holds its public key. plain: it encrypts
    nothing, and serves one user at a loopback address. error: it cannot say now, and why."""

    credential: ranges.Credential = ""
    plain: bool = False
    error: ranges.Text = ""


def hint(data: bytes) -> Hint:
    """The hint in `data`. Raises :class:`wire.BadMessage`."""
    found: Hint = wire.decode(data, Hint, HINT_VERSION)
    return found
