"""The error texts that torch 2.13's own libraries hold (gloo, TCPStore, c10d) become network faults, never a restart of
everybody: they are what the survivors of a dead rank see."""

from __future__ import annotations

import pytest

from unicron.detector.failures.classify import default_classifier
from unicron.detector.failures.severity import Severity

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
TEXTS = {
    f"{GLOO}pair.cc:547] Connection closed by peer [127.0.0.1]:1234": "connection_reset",
    f"{GLOO}pair.cc:589] Read error [127.0.0.1]:1234: Connection reset by peer": "connection_reset",
    f"{GLOO}pair.cc:430] writev [127.0.0.1]:1234: Broken pipe": "connection_reset",
    f"{GLOO}pair.cc:144] Connect timeout [none]": "other_network_error",
    f"{GLOO}device.cc:330] timed out connecting: SO_ERROR: Connection refused, remote=[::1]": "connection_refused",
    f"{GLOO}unbound_buffer.cc:81] Timed out waiting 2000ms for recv operation to complete": "nccl_timeout",
    f"{GLOO}unbound_buffer.cc:136] Timed out waiting 2000ms for send operation to complete": "nccl_timeout",
    f"{GLOO}pair.cc:780] Application timeout caused pair closure": "nccl_timeout",
    "Gloo connectFullMesh failed with [pair.cc:144] no error": "other_network_error",
    "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms": "nccl_timeout",
    "Rank 1 timed out in monitoredBarrier after 2000 ms": "nccl_timeout",
    "The client socket has timed out after 60000ms while trying to connect to (n1, 29500).": "other_network_error",
    "TCP client failed to connect/validate to host n1:29500 - timed out (try=1, timeout=9ms)": "other_network_error",
    "Timed out after 61 seconds waiting for clients. 1/2 clients joined.": "other_network_error",
    "wait timeout after 300000ms, keys: /default_pg/0//cpu//0/1": "other_network_error",
    "waitForInput: socket SocketImpl(fd=9) timed out after 300000ms": "other_network_error",
    "Failed to recv, got 0 bytes. Connection was likely closed.": "connection_reset",
}


@pytest.mark.parametrize("text", TEXTS)
def test_torch_texts(text):
    verdict = default_classifier().text(f"RuntimeError: {text}")
    assert (verdict.cause, verdict.severity) == (TEXTS[text], Severity.SEV3)
    assert default_classifier().match(text) is not None
