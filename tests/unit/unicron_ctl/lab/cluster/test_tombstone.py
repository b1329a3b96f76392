"""The ports of a virtual node that is switched off are silent: who connects hears nothing, not even a refusal."""

from __future__ import annotations

import os
import socket

import pytest

from unicron_ctl.lab.cluster.tombstone import hold_port, ports_of


def test_a_held_port_answers_nobody():
    with socket.create_server(("", 0)) as before:
        port = before.getsockname()[1]
        assert port in ports_of([os.getpid()])
        assert hold_port(port) == (), "it is still somebody's"
    held = hold_port(port)
    try:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), timeout=0.2)
    finally:
        for one in held:
            one.close()
