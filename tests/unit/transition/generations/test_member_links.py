"""The connections over which all members of a generation exchange a few numbers."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from unicron_detector.tcp_sockets import tcp_sockets
from unicron_transition.generations import member_links
from unicron_transition.generations.member_links import HELLO
from unicron_transition.generations.unblock import Unblocker

LIMIT = 20.0


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as made:
        yield made


@pytest.fixture
def connected(pool):
    """connected(size) -> the links of each member but the silent ones, which only listen. Another socket stands for
    gloo's."""
    with contextlib.ExitStack() as opened:

        def connected(size, announced=None, lost=lambda: False, silent=(), address=(socket.AF_INET, "127.0.0.1")):
            store, before = dist.HashStore(), set(tcp_sockets())
            gloo = opened.enter_context(socket.socket(address[0]))
            gloo.bind((address[1], 0))
            gloo.listen()
            for rank in silent:
                store.set(member_links.PLACE.format(rank), f"{'00' * 16} {gloo.getsockname()[1]} 127.0.0.1")
            for _ in range(size if announced is None else announced):
                member_links.announce(store, "gloo", {})
            members = [rank for rank in range(size) if rank not in silent]
            made = pool.map(lambda rank: member_links.connect(store, rank, size, lost, before, LIMIT), members)
            links = list(made)
            for each in filter(None, links):
                opened.callback(each.close)
            return links

        yield connected


def largest(pool, links, values):
    return list(pool.map(lambda pair: pair[0].largest(pair[1]).tolist(), zip(links, values, strict=True)))


@pytest.mark.parametrize("size", [2, 3, 5, 8, 11])
def test_all_members_get_the_largest_of_each_number(connected, pool, size):
    links = connected(size)
    for turn in range(3):
        own = [torch.tensor([rank, -rank, (rank + turn) % size], dtype=torch.float64) for rank in range(size)]
        assert largest(pool, links, own) == [[size - 1, 0, size - 1]] * size
    whole = [torch.tensor([2**62 + rank]) for rank in range(size)]
    assert largest(pool, links, whole) == [[2**62 + size - 1]] * size, "whole numbers stay exact"


def test_a_member_whose_release_knows_no_links_leaves_all_of_them_without(connected):
    assert connected(4, announced=3) == [None] * 4
    assert connected(1) == [None], "nobody to connect with"


@pytest.mark.parametrize(
    ("backend", "environment"), [("gloo", {member_links.LAZY: "1"}), ("nccl", {})], ids=["lazy gloo", "nccl"]
)
def test_who_wants_no_links_still_says_that_it_can_refuse_a_commit(backend, environment):
    store = dist.HashStore()
    for size in (1, 2):
        member_links.announce(store, backend, environment)
        assert store.add(member_links.COUNT, 0) != size and member_links.all_tell(store, size)
    assert not member_links.all_tell(store, 3), "a member of release 0.2 says nothing"


def test_what_a_member_said_arrives_after_its_end(connected, pool):
    """It has heard from all others by then; a slow one reads its word only now."""
    first, second, third = connected(3)
    values, receive = [torch.tensor([float(rank)]) for rank in range(3)], third._receive

    def late(coming, size):
        for each in ended:
            each.result(LIMIT)
        return receive(coming, size)

    calls = iter([receive, late])
    third._receive = lambda coming, size: next(calls)(coming, size)

    def end_after(links, value):
        found = links.largest(value)
        links.close()
        return found

    ended = [pool.submit(end_after, links, value) for links, value in zip((first, second), values, strict=False)]
    assert third.largest(values[2]).tolist() == [2.0]
    assert [each.result(LIMIT).tolist() for each in ended] == [[2.0], [2.0]]


@pytest.mark.parametrize("how", ["its end", "a Break"])
def test_the_end_of_a_connection_ends_the_wait(connected, pool, how):
    unblocker = Unblocker()
    with unblocker.building():
        links = connected(4)
    waiting = pool.submit(links[0].largest, torch.zeros(1))
    time.sleep(0.1)
    assert not waiting.done()
    if how == "a Break":
        unblocker.unblock()
    else:
        links[3].close()
    with pytest.raises(RuntimeError, match="a member is gone"):
        waiting.result(LIMIT)


def test_members_of_different_exchanges_do_not_mix_their_numbers(connected, pool):
    first, second = connected(2)
    second._count = 1
    both = [pool.submit(each.largest, torch.zeros(1)) for each in (first, second)]
    for each in both:
        with pytest.raises(RuntimeError, match="another exchange"):
            each.result(LIMIT)


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET6, "::1"), (socket.AF_INET6, "::ffff:127.0.0.1")])
def test_the_links_are_at_the_address_of_gloo_whatever_its_family(connected, pool, family, host):
    links = connected(3, address=(family, host))
    assert largest(pool, links, [torch.tensor([float(rank)]) for rank in range(3)]) == [[2.0]] * 3
    at = {each.getsockname()[0] for made in links for pair in made._steps for each in pair}
    assert at == {host.removeprefix("::ffff:")}


def test_a_lost_member_ends_the_connecting(connected):
    """Its system accepts connections, but it makes none."""
    heard = time.monotonic() + 0.3
    with pytest.raises(ConnectionError, match="did not connect"):
        connected(3, lost=lambda: time.monotonic() > heard, silent=(2,))


def test_a_stranger_is_not_taken_for_a_member(connected, pool, monkeypatch):
    """Strangers come before each member: one says nothing that is right, one names a wrong token, one begins to say
    something and stays, one goes at once."""
    dial, came = member_links._dial, []

    def strangers_first(place, step, check):
        _, port, host = place.split(" ", 2)
        for said in (b"GET / HTTP/1.1\r\n\r\n--", HELLO.pack(bytes(16), step), b"GET", b""):
            stranger = socket.create_connection((host, int(port)))
            stranger.sendall(said)
            came.append(stranger)  # of all members' threads
            if not said:
                stranger.close()
        return dial(place, step, check)

    monkeypatch.setattr(member_links, "_dial", strangers_first)
    links = connected(3)
    assert largest(pool, links, [torch.tensor([float(rank)]) for rank in range(3)]) == [[2.0]] * 3
    for each in came:
        each.close()


def test_a_stranger_that_says_little_holds_nobody_up():
    """A hello in single bytes is read as they come, between two looks at what else happens."""
    with contextlib.closing(socket.socket()) as peer, socket.create_server(("127.0.0.1", 0)) as listener:
        peer.connect(listener.getsockname())
        came, _ = listener.accept()
        came.setblocking(False)
        said = bytearray()
        assert member_links._says_more(came, said) and not said
        peer.sendall(b"G")
        assert select.select([came], [], [], LIMIT)[0]
        assert member_links._says_more(came, said) and said == b"G"
        came.close()


def test_more_than_the_kernel_takes_is_refused(connected):
    links = connected(2)
    with pytest.raises(ValueError, match="an exchange of 80000 bytes"):
        links[0].largest(torch.zeros(10_000, dtype=torch.float64))
