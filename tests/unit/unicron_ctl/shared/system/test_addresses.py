"""How addresses are written, and that all that a name leads to are tried, for the first may be dead."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from tests.support.processes import wait_for
from unicron_ctl.agent.connections import job_environment
from unicron_ctl.agent.connections.controller_connection import Line
from unicron_ctl.agent.snapshots.image_server import _listen
from unicron_ctl.shared.protocol import datagrams, encryption, wire
from unicron_ctl.shared.protocol.client import ask_controller
from unicron_ctl.shared.protocol.controller_discovery import Hello
from unicron_ctl.shared.protocol.reach import Door, Reach, first_open, reach
from unicron_ctl.shared.system import addresses
from unicron_ctl.shared.system.addresses import canonical, endpoint, is_loopback, join, listen_at, resolve, split
from unicron_ctl.shared.system.errors import UserError

NEEDS_IPV6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
SILENT, LIVE = "127.0.0.1", "127.0.0.2"


@pytest.mark.parametrize(
    ("written", "compared"),
    [
        ("::ffff:10.0.0.5", "10.0.0.5"),
        ("[::FFFF:10.0.0.5]", "10.0.0.5"),
        ("[2001:DB8:0::1]", "2001:db8::1"),
        ("10.0.0.5", "10.0.0.5"),
        ("node7", "node7"),
        ("", ""),
    ],
)
def test_an_address_is_compared_in_one_form(written: str, compared: str) -> None:
    assert canonical(written) == compared


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "::ffff:127.0.0.1", "[::ffff:127.8.9.1]", "localhost"])
def test_loopback_in_either_family(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "::ffff:10.0.0.1", "::", "fd00::1", "node7"])
def test_addresses_of_others(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(("host", "text"), [("fd00::1", "[fd00::1]:7"), ("10.0.0.1", "10.0.0.1:7"), ("n1", "n1:7")])
def test_host_and_port(host: str, text: str) -> None:
    assert join(host, 7) == text and split(text) == (host, 7) and endpoint(f"tcp://{text}") == (host, 7)


@pytest.mark.parametrize(
    ("text", "place"), [(":0", ("", 0)), ("head:65535", ("head", 65535)), ("[::]:7", ("::", 7)), ("*:7", ("*", 7))]
)
def test_a_place_to_listen_at(text: str, place: tuple[str, int]) -> None:
    assert split(text, listens=True) == place


@pytest.mark.parametrize("text", ["", "7", "head:", "head:-1", "head:65536", "::1:7", "[::1:7", "[]:7", "head:\u0667"])
def test_what_is_no_place_to_listen_at(text: str) -> None:
    with pytest.raises(ValueError):
        split(text, listens=True)
    if text != "::1:7":  # what agents say of each other comes without brackets
        with pytest.raises(ValueError):
            split(text.replace("[::1", ""))


@NEEDS_IPV6
def test_a_listener_at_a_named_address_or_at_all() -> None:
    with listen_at("", 1) as everywhere, listen_at("::1", 1) as here:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, everywhere.getsockname()[1]), 5).close()
        socket.create_connection(("::1", here.getsockname()[1]), 5).close()
    listening, address = _listen("::1")
    assert listening is not None and address == f"[::1]:{listening.getsockname()[1]}"
    socket.create_connection(split(address), 5).close()
    listening.close()
    assert job_environment._address("tcp://[::1]:7451") == "::1"


# ---------------------------------------------------------------- a name whose first address is dead
@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name `head` leads to an address at which nobody answers, and to one that does."""
    whole = socket.getaddrinfo

    def found(host: str, port: int, *given: object, **more: object) -> list[object]:
        names = (SILENT, LIVE) if host == "head" else (host,)
        return [one for name in names for one in whole(name, port, *given, **more)]  # type: ignore[call-overload]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", found)


@pytest.fixture
def port() -> Iterator[int]:
    """At the first address of `head` whoever connects to this port hears nothing, by TCP or UDP."""
    door = Door(SILENT)
    door.stop_answering()
    yield door.port
    door.close()


class PlainController:
    """At the second address of `head`: answers Hello without a key, and keeps what its router gets."""

    def __init__(self, port: int, says_hello: bool = True):
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.bind(f"tcp://{LIVE}:{port}")
        self.hellos = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.hellos.bind((LIVE, port))
        if says_hello:
            threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                data, where = self.hellos.recvfrom(4096)
                if not data:
                    return
                self.hellos.sendto(wire.encode(datagrams.Introduction(plain=True)), where)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.hellos.shutdown(socket.SHUT_RDWR)
        self.hellos.close()
        self.router.close()
        self.context.term()


@pytest.fixture
def controller(port: int) -> Iterator[PlainController]:
    made = PlainController(port)
    yield made
    made.close()


def test_the_key_comes_from_whichever_address_answers(two: None, controller: PlainController, port: int) -> None:
    """Defect: with a head of two addresses every job was unprotected, and the problem was an empty text."""
    hello = Hello(f"tcp://head:{port}")
    assert hello.wait_for_key(20.0) == encryption.PLAIN
    assert hello.reached is not None and hello.reached.host == LIVE and hello.problem == ""
    hello.close()


def test_where_nobody_answers_the_problem_says_whom_it_asked(two: None, port: int, snapshot) -> None:
    hello = Hello(f"tcp://head:{port}")
    assert hello.problem == "" and hello.wait_for_key(0.4) is None
    assert hello.problem.replace(str(port), "PORT") == snapshot
    hello.close()


def test_a_name_that_nobody_knows_is_a_problem_with_words() -> None:
    hello = Hello("tcp://no-such-host.invalid:7451")
    assert (
        hello.wait_for_key(0.4) is None
        and hello.problem.startswith("no-such-host.invalid: ")
        and len(hello.problem) > 30
    )
    hello.close()


@pytest.mark.parametrize("known", [None, "none"])
def test_an_agent_finds_the_address_that_answers(
    two: None, controller: PlainController, port: int, known: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it need not ask for the key, so that only connecting tells."""
    monkeypatch.setenv("UNICRON_PUBLIC_KEY", known or "")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    line = Line(context, f"tcp://head:{port}")
    line.socket.setsockopt(zmq.LINGER, 0)

    def connected() -> bool:
        line.find_controller()
        line.learn(lambda: None)
        line.notice()
        for result in line.results.take_all():
            result()
        return line.up

    try:
        wait_for(connected, "the line is up")
        line.socket.send(b"here")
        assert controller.router.poll(20_000) and controller.router.recv_multipart()[-1] == b"here"
        line.hang_up()
        line.call_again()
        line.socket.send(b"again")
        assert controller.router.poll(20_000) and controller.router.recv_multipart()[-1] == b"again"
    finally:
        line.close()
        context.term()


def test_a_command_finds_the_address_that_answers(
    two: None, controller: PlainController, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNICRON_PUBLIC_KEY", "none")

    def answer() -> None:
        *route, _ = controller.router.recv_multipart()
        controller.router.send_multipart([*route, wire.encode(wire.Answer(ok=True, data="all is well"))])

    thread = threading.Thread(target=answer)
    thread.start()
    assert ask_controller({"kind": "status"}, f"tcp://head:{port}", timeout=30.0) == "all is well"
    thread.join()


@NEEDS_IPV6
def test_a_node_has_the_address_by_which_it_reaches_the_controller(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = socket.getaddrinfo
    both = [*whole(SILENT, port, type=socket.SOCK_STREAM), *whole("::1", port, type=socket.SOCK_STREAM)]
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *given, **more: both)
    with socket.create_server(("::1", port), family=socket.AF_INET6):
        assert job_environment._address(f"tcp://head:{port}") == "::1"


def test_something_is_there_when_any_address_answers(two: None, controller: PlainController, port: int) -> None:
    began = time.monotonic()
    assert reach(f"head:{port}", 20.0) is Reach.REACHED and time.monotonic() - began < 10
    target = first_open(resolve("head", port), 20.0)
    assert target is not None and target.endpoint == f"tcp://{LIVE}:{port}"


def test_a_host_refuses_only_after_all_its_addresses_could_have_answered(two: None, port: int) -> None:
    """One refuses, the other is silent: the host lives. It is not known at once: the silent one might have answered."""
    began = time.monotonic()
    assert reach(f"head:{port}", 0.5) is Reach.REFUSED and time.monotonic() - began >= 0.5
    assert first_open(resolve("head", port), 0.3) is None


@NEEDS_IPV6
def test_a_daemon_of_one_family_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: slurmd without EnableIPv6, on a node whose name has addresses of both families."""
    with socket.create_server(("127.0.0.1", 0)) as slurmd:
        both = [(socket.AF_INET6, ("::1", slurmd.getsockname()[1], 0, 0)), (socket.AF_INET, slurmd.getsockname())]
        found = [(family, socket.SOCK_STREAM, 6, "", address) for family, address in both]
        monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *given, **more: found)
        assert reach("n1:6818", 20.0) is Reach.REACHED


def test_of_several_hosts_the_one_that_answers_is_the_controller(
    two: None, controller: PlainController, port: int
) -> None:
    hello = Hello(f"tcp://no-such-host.invalid:7451,tcp://{SILENT}:1,tcp://head:{port}")
    assert hello.several and hello.wait_for_key(20.0) == encryption.PLAIN
    assert hello.reached is not None and (hello.reached.host, hello.reached.port) == (LIVE, port)
    hello.close()


def test_lists_of_addresses() -> None:
    assert addresses.endpoints("tcp://a:1, tcp://b:2") == [("a", 1), ("b", 2)]
    for bad in ("", "tcp://a:1,b:2", ","):
        with pytest.raises(UserError, match="write tcp://HOST:PORT"):
            addresses.endpoints(bad)
