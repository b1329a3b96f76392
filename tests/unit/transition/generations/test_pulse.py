"""The progress of a collective's network, with real connections: bytes that move, a peer that hangs, lost packets."""

from __future__ import annotations

import os
import socket
import time

import pytest

from tests.support.processes import wait_for
from unicron_detector.chaos.blackhole import deafen, undeafen
from unicron_transition.generations.pulse import RETRY_SECONDS, Pulse


@pytest.fixture
def ends():
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        yield near, far


def pulse_of(*sockets: socket.socket) -> Pulse:
    return Pulse(lambda: {os.fstat(s.fileno()).st_ino: s.fileno() for s in sockets})


def settled(near: socket.socket, pulse: Pulse) -> None:
    """Wait until all that was sent is acknowledged."""
    wait_for(lambda: not pulse.measure(False), "nothing moves")


def test_bytes_that_move_are_seen_at_both_ends(ends):
    near, far = ends
    pulses = pulse_of(near), pulse_of(far)
    for pulse in pulses:
        pulse.measure(True)
        settled(near, pulse)
    near.sendall(b"x" * 1000)
    assert far.recv(1000)
    assert wait_for(lambda: pulses[0].measure(False), "the sender")
    assert wait_for(lambda: pulses[1].measure(False), "the receiver")


def test_each_report_of_progress_is_another_number(ends):
    near, far = ends
    pulse, numbers = pulse_of(near, far), set()
    pulse.measure(True)
    settled(near, pulse)
    for _ in range(20):
        near.sendall(b"x")
        far.recv(1)
        numbers.add(wait_for(lambda: pulse.measure(False), "it moved"))
        settled(near, pulse)
    assert len(numbers) == 20


def test_what_moved_while_the_main_thread_was_busy_says_nothing(ends):
    near, far = ends
    pulse = pulse_of(near)
    pulse.measure(True)
    near.sendall(b"x" * 1000)
    assert far.recv(1000)
    assert pulse.measure(True) == 0


def test_a_peer_that_hangs_is_no_progress(ends):
    """Its kernel accepts and acknowledges data until its buffer is full."""
    near, _ = ends
    pulse = pulse_of(near)
    near.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            near.send(b"x" * 65536)
    quiet = time.monotonic()

    def rests() -> bool:
        nonlocal quiet
        quiet = time.monotonic() if pulse.measure(False) else quiet
        return time.monotonic() - quiet > 1.5

    wait_for(rests, "nothing moves, however often the kernel asks for room")


def test_packets_that_are_lost_are_progress_for_a_while(ends):
    near, far = ends
    pulse = pulse_of(near)
    pulse.measure(True)
    settled(near, pulse)
    deafen(far)  # packets are dropped as if they had never come
    near.sendall(b"x")
    assert wait_for(lambda: pulse.measure(False), "it is sent again")
    now = time.monotonic()
    first, second = pulse.measure(False, now), pulse.measure(False, now)
    assert first and second and first != second
    assert pulse.measure(False, now + RETRY_SECONDS) == 0, "a link that is cut, perhaps"
    undeafen(far)
    assert far.recv(1) == b"x"
    assert wait_for(lambda: pulse.measure(False), "it is through")


def test_no_connections_no_progress():
    assert pulse_of().measure(True) == 0 and pulse_of().measure(False) == 0
