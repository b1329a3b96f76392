"""Whether something answers at an address, and what says nothing of it."""

from __future__ import annotations

import errno
import socket
from types import SimpleNamespace
from typing import NoReturn

import pytest

from unicron_ctl.shared.protocol import reach as module
from unicron_ctl.shared.protocol.reach import Door, Reach, door_at, reach


@pytest.fixture
def door():
    door = Door()
    yield door
    door.close()


def test_a_door_answers_is_silent_and_answers_again(door: Door) -> None:
    address = f"127.0.0.1:{door.port}"
    for _ in range(300):  # more than wait in its queue at once
        assert reach(address, 5.0) is Reach.REACHED
        door.answer()
    door.stop_answering()
    assert reach(address, 0.3) is Reach.SILENT
    door.open()
    assert reach(address, 5.0) is Reach.REACHED


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_a_door_answers_at_addresses_of_both_families(door: Door) -> None:
    assert reach(f"::1:{door.port}", 5.0) is Reach.REACHED
    assert reach(f"127.0.0.1:{door.port}", 5.0) is Reach.REACHED


@pytest.mark.parametrize(
    ("host", "door", "there"),
    [("10.0.0.1", "n1:7", "10.0.0.1:7"), ("fd00::1", "[fd00::2]:7", "fd00::1:7"), ("10.0.0.1", "", "")],
)
def test_a_door_keeps_its_port_wherever_it_is(host: str, door: str, there: str) -> None:
    assert door_at(host, door) == there


def test_a_port_without_a_listener_refuses(door: Door) -> None:
    address = f"127.0.0.1:{door.port}"
    door.close()
    assert reach(address, 5.0) is Reach.REFUSED


@pytest.mark.parametrize("address", ["", "n1", "n1:", "n1:port", "127.0.0.1:99999", "x" * 300 + ":1", "\x00:1"])
def test_an_address_that_is_none_says_nothing(address: str) -> None:
    assert reach(address, 0.2) is Reach.UNKNOWN


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("socket", OSError(errno.EMFILE, "Too many open files")),
        ("socket", OSError(errno.ENFILE, "Too many open files in system")),
        ("getaddrinfo", socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")),
        ("getaddrinfo", UnicodeError("label too long")),
    ],
)
def test_our_own_trouble_is_no_word_about_the_node(
    monkeypatch: pytest.MonkeyPatch, error: Exception, name: str
) -> None:
    def fail(*words: object, **more: object) -> NoReturn:
        raise error

    monkeypatch.setattr(module.socket, name, fail)
    assert reach("127.0.0.1:6818", 0.1) is Reach.UNKNOWN


@pytest.mark.parametrize("code", [errno.EADDRNOTAVAIL, errno.ENETUNREACH, errno.EACCES, errno.ECONNRESET])
def test_an_error_on_this_side_and_a_reset_say_nothing(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A firewall, or a listener that has just ended with somebody in its queue, resets a connection."""
    monkeypatch.setattr(module.socket.socket, "connect_ex", lambda self, target: code, raising=False)
    assert reach("127.0.0.1:6818", 0.1) is Reach.UNKNOWN


def test_after_a_reset_the_next_connection_may_tell(monkeypatch: pytest.MonkeyPatch, door: Door) -> None:
    whole, codes = socket.socket.connect_ex, iter([errno.ECONNRESET])
    monkeypatch.setattr(
        module.socket.socket, "connect_ex", lambda self, to: next(codes, None) or whole(self, to), raising=False
    )
    assert reach(f"127.0.0.1:{door.port}", 5.0) is Reach.REACHED


def test_a_flood_at_the_door_keeps_nobody_for_long() -> None:
    """Defect: as long as others came faster than they were let go, the agent did nothing else."""
    door, count = Door("127.0.0.1"), []

    class Endless:
        def accept(self) -> tuple[SimpleNamespace, None]:
            count.append(1)
            assert len(count) < 100_000, "it never comes to an end"
            return SimpleNamespace(close=lambda: None), None

    listening, door._socket = door._socket, Endless()  # type: ignore[assignment]
    door.answer()
    assert 0 < len(count) <= 1000
    listening.close()
