"""The line between agents: over real sockets, those that a plan named hear each other, and nobody else is heard."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from tests.support.processes import wait_for
from unicron_ctl.agent.connections.peer_connections import Peers
from unicron_ctl.shared.protocol import peer_messages, structs, wire
from unicron_ctl.shared.protocol.encryption import new_pair

pytestmark = pytest.mark.process
QUIET = 1.0  # seconds: what is let in comes within milliseconds


class Talker:
    """A line in a context of its own, as in an agent's process."""

    def __init__(self, element: int) -> None:
        self.context, keys = zmq.Context(), new_pair()
        self.line = Peers(self.context, "127.0.0.1", keys)
        self.peer = structs.Peer(element, f"agent{element}", self.line.address, keys[0])
        self.heard: list[peer_messages.AnyPeer] = []
        self.dropped: list[str] = []

    def listen(self) -> None:
        self.line.receive(self.heard.append, lambda who, why: self.dropped.append(f"{who}: {why}"))

    def say(self, other: Talker, element: int | None = None) -> None:
        own = self.peer.element if element is None else element
        self.line.send(other.peer, peer_messages.PlanRequest(generation=3, element=own))

    def close(self) -> None:
        self.line.close()
        self.context.term()


@pytest.fixture
def talkers():
    made = [Talker(element) for element in range(3)]
    yield made
    for talker in made:
        talker.close()


def listening(talkers: list[Talker], look: Callable[[], object]) -> Callable[[], object]:
    def turn() -> object:
        for talker in talkers:
            talker.listen()
        return look()

    return turn


def quiet(talkers: list[Talker], look: Callable[[], object]) -> None:
    deadline = time.monotonic() + QUIET
    while time.monotonic() < deadline:
        assert not listening(talkers, look)()
        time.sleep(0.01)


def test_those_who_know_each_other_talk(talkers):
    for talker in talkers:
        talker.line.allow_only(other.peer for other in talkers)
    for talker in talkers:
        for other in talkers:
            if other is not talker:
                talker.say(other)
    wait_for(listening(talkers, lambda: all(len(t.heard) == 2 for t in talkers)), "all hear both others")
    assert {message.element for message in talkers[0].heard} == {1, 2}


def test_a_stranger_is_not_let_in_until_a_plan_names_it(talkers):
    first, stranger, _ = talkers
    stranger.line.allow_only([first.peer])
    stranger.say(first)
    quiet(talkers, lambda: first.heard)
    first.line.allow_only([stranger.peer])
    wait_for(listening(talkers, lambda: stranger.say(first) or first.heard), "it is heard now")


def test_one_that_a_later_plan_does_not_name_is_not_heard_any_more(talkers):
    first, second, third = talkers
    first.line.allow_only([second.peer, third.peer])
    second.line.allow_only([first.peer])
    second.say(first)
    wait_for(listening(talkers, lambda: first.heard), "it is heard")
    first.line.allow_only([third.peer])
    first.heard.clear()
    second.say(first)
    quiet(talkers, lambda: first.heard)


def test_nobody_speaks_for_another(talkers):
    first, second, third = talkers
    for talker in talkers:
        talker.line.allow_only(other.peer for other in talkers)
    second.say(first, element=third.peer.element)
    wait_for(listening(talkers, lambda: first.dropped), "it is dropped")
    assert first.dropped == ["the agent of element 1: speaks for element 2"] and not first.heard


def test_what_is_no_message_of_agents_is_dropped(talkers):
    first, second, _ = talkers
    first.line.allow_only([second.peer])
    second.line.allow_only([first.peer])
    second.line.send(first.peer, wire.Ping())
    wait_for(listening(talkers, lambda: first.dropped), "it is dropped")
    assert not first.heard


FLOOD = """
import socket, sys, time
port, held = int(sys.argv[1]), []
until = time.time() + 60
while time.time() < until:
    one = socket.socket()
    one.setblocking(False)
    one.connect_ex(("127.0.0.1", port))
    held = [*held, one][-800:]
    time.sleep(0.0003)
"""


@pytest.fixture
def few_files() -> Iterator[int]:
    """This process may have no more open files than most users' processes have by default."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    yield 512
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_strangers_at_the_port_leave_the_agent_its_open_files_and_its_peers(few_files, talkers):
    """One who has no key opens hundreds of connections, each anew as soon as it is closed."""
    first, other, _ = talkers
    first.line.allow_only([other.peer])
    other.line.allow_only([first.peer])
    count = len(os.listdir("/proc/self/fd"))
    port = first.line.address.rpartition(":")[2]
    flood = subprocess.Popen([sys.executable, "-c", FLOOD, port])
    most = 0
    try:
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            listening(talkers, lambda: None)()
            most = max(most, len(os.listdir("/proc/self/fd")))
            ends = os.pipe()  # as each start of a rank does
            for end in ends:
                os.close(end)
            time.sleep(0.01)
        other.say(first)
        wait_for(listening([first, other], lambda: first.heard), "a peer is heard in the midst of it")
    finally:
        flood.kill()
        flood.wait()
    assert count + 50 < most < few_files - 100, "it was a flood, and left room"
