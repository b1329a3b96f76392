"""Freeing a main thread: only connections of the present generation are broken, and never a listening socket."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from unicron_detector.tcp_sockets import tcp_sockets
from unicron_transition.generations.unblock import Unblocker


class Connection:
    """Both ends of a TCP connection in this process, and the socket that listened for it."""

    def __init__(self, stack: contextlib.ExitStack):
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.near = stack.enter_context(socket.create_connection(self.listener.getsockname(), timeout=5))
        self.far = stack.enter_context(self.listener.accept()[0])

    def works(self) -> bool:
        """Whether a byte gets through."""
        try:
            self.far.sendall(b"x")
            return self.near.recv(1) == b"x"
        except OSError:
            return False

    def listens(self) -> bool:
        """Whether a new connection is accepted."""
        with socket.create_connection(self.listener.getsockname(), timeout=5), self.listener.accept()[0]:
            return True


@pytest.fixture
def connect():
    with contextlib.ExitStack() as stack:
        yield lambda: Connection(stack)


def test_only_what_was_opened_while_building_is_broken(connect):
    unblocker, before = Unblocker(), connect()
    with unblocker.building():
        own = connect()
    after = connect()
    assert unblocker.unblock() == 2
    assert not own.works() and before.works() and after.works()
    assert own.listens() and before.listens() and after.listens()
    unblocker.unblock()  # again, without harm
    assert before.works() and after.works() and own.listens()


def test_in_the_middle_of_the_building(connect):
    unblocker, before = Unblocker(), connect()
    with unblocker.building():
        own = connect()
        assert unblocker.unblock() == 2
        assert not own.works() and before.works() and own.listens()
        late = connect()
        unblocker.unblock()
        assert not late.works()
    assert unblocker.unblock() <= 4 and before.works()


def test_a_building_that_fails_leaves_its_sockets_known(connect):
    unblocker = Unblocker()
    with pytest.raises(RuntimeError), unblocker.building():
        own = connect()
        raise RuntimeError("a peer is gone")
    assert unblocker.unblock() == 2 and not own.works()


def test_the_next_generation_forgets_the_last(connect):
    unblocker = Unblocker()
    with unblocker.building():
        old = connect()
    with unblocker.building():
        new = connect()
    assert unblocker.unblock() == 2 and old.works() and not new.works()


def test_nothing_is_broken_before_the_first_generation_nor_after_the_end(connect):
    unblocker, connection = Unblocker(), connect()
    assert unblocker.unblock() == 0
    with unblocker.building():
        own = connect()
    unblocker.disarm()
    assert unblocker.unblock() == 0 and own.works() and connection.works()


def test_it_knows_the_generations_own_connections(connect):
    unblocker, before = Unblocker(), connect()
    with unblocker.building():
        own = connect()
        assert unblocker.own() == {}, "not yet"
    assert {own.near.fileno(), own.far.fileno()} <= set(unblocker.own().values())
    assert before.near.fileno() not in unblocker.own().values()
    unblocker.disarm()
    assert unblocker.own() == {}


def test_a_thread_that_waits_for_its_peer_is_freed(connect):
    unblocker, got = Unblocker(), []
    with unblocker.building():
        own = connect()
    own.near.settimeout(30)
    thread = threading.Thread(target=lambda: got.append(own.near.recv(1)))
    thread.start()
    unblocker.unblock()
    thread.join(10)
    assert got == [b""]


def test_other_kinds_of_sockets_are_not_looked_at(connect):
    pair, datagram = socket.socketpair(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with pair[0], pair[1], datagram:
        connection = connect()
        found = set(tcp_sockets().values())
        assert {connection.near.fileno(), connection.far.fileno(), connection.listener.fileno()} <= found
        assert not found & {pair[0].fileno(), pair[1].fileno(), datagram.fileno()}
        unblocker = Unblocker()
        with unblocker.building():
            inner = socket.socketpair()
        with inner[0], inner[1]:
            unblocker.unblock()
            inner[0].sendall(b"x")
            assert inner[1].recv(1) == b"x"
