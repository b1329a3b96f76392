"""The agent's line: whatever munge, the name service and Slurm take, its loop goes on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import zmq
from syrupy.assertion import SnapshotAssertion

from tests.support.processes import wait_for
from unicron_ctl.agent.connections import controller_connection
from unicron_ctl.agent.connections.controller_connection import OUTLIVED_SECONDS, Line
from unicron_ctl.agent.connections.job_environment import Place
from unicron_ctl.shared.protocol import claims, controller_discovery, datagrams, structs, wire
from unicron_ctl.shared.protocol.client import ask_controller
from unicron_ctl.shared.protocol.encryption import PLAIN, new_pair
from unicron_ctl.shared.protocol.munge import Credential, MungeError
from unicron_ctl.shared.system.errors import UserError

PLACE = Place(job="7", element=0, node="n1", address="127.0.0.1", settings=structs.Settings(name="a", user="b"))


class Slow:
    """A program that answers when the test lets it."""

    def __init__(self, answer: object) -> None:
        self.go, self.answer, self.calls = threading.Event(), answer, 0

    def __call__(self, *given: object) -> object:
        self.calls += 1
        assert self.go.wait(10), "the loop waits for it"
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def controller() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.bind(("127.0.0.1", 0))
        made.settimeout(10)
        yield made


@pytest.fixture
def lines(controller: socket.socket) -> Iterator[Line]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = Line(context, f"tcp://127.0.0.1:{controller.getsockname()[1]}")
    made.socket.setsockopt(zmq.LINGER, 0)
    yield made
    made.close()
    context.term()


def served(lines: Line) -> bool:
    """As the agent's loop does."""
    results = lines.results.take_all()
    for result in results:
        result()
    return bool(results)


def register(lines: Line, sent: list[wire.Message]) -> None:
    fields = {name: getattr(PLACE, name) for name in ("job", "element", "node", "address", "slots", "settings")}
    lines.register(wire.Register(agent="agent", **fields), sent.append)


def test_the_loop_goes_on_while_munge_makes_a_credential(lines: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: a munged that hangs stopped the agent for 3 s at each try."""
    slow, sent = Slow("MUNGE:x:"), list[wire.Message]()
    monkeypatch.setattr(controller_connection, "make_credential", slow)
    register(lines, sent)
    assert not slow.calls, "it is not known yet whom to tell"
    lines._connect(new_pair()[0])
    for _ in range(3):
        register(lines, sent)
    assert not sent
    slow.go.set()
    wait_for(lambda: served(lines), "the credential is made")
    assert [message.credential for message in sent if isinstance(message, wire.Register)] == ["MUNGE:x:"]
    assert slow.calls == 1, "one at a time"
    register(lines, sent)
    wait_for(lambda: served(lines), "another one is made")
    assert len(sent) == 2


def test_without_munge_it_registers_all_the_same_and_says_why(lines: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, sent = Slow(MungeError("munged is away", outage=True)), list[wire.Message]()
    monkeypatch.setattr(controller_connection, "make_credential", slow)
    slow.go.set()
    lines._connect(new_pair()[0])
    register(lines, sent)
    wait_for(lambda: served(lines), "it was tried")
    assert len(sent) == 1 and lines.problem == "munged is away"


def test_a_credential_for_a_key_that_is_no_more_is_not_sent(lines: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, sent = Slow("MUNGE:x:"), list[wire.Message]()
    monkeypatch.setattr(controller_connection, "make_credential", slow)
    lines._connect(new_pair()[0])
    register(lines, sent)
    lines.key = "another"
    slow.go.set()
    wait_for(lambda: served(lines), "the credential is made")
    assert not sent


def test_the_loop_goes_on_while_slurm_says_whom_to_believe(
    lines: Line, controller: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect: scontrol may take 5 s, and munge 3 s."""
    theirs, learned = new_pair()[0], list[bool]()
    slow = Slow(True)
    monkeypatch.setattr(
        controller_discovery, "unmunge", lambda text: Credential(4242, claims.of_controller(theirs).encode())
    )
    monkeypatch.setattr(controller_discovery, "trusted", slow)
    lines.find_controller()
    _, where = controller.recvfrom(4096)
    controller.sendto(wire.encode(datagrams.Introduction(credential="MUNGE:x:")), where)
    wait_for(lambda: lines.learn(lambda: learned.append(True)) or slow.calls, "the answer is looked at")
    assert lines.key is None and not learned
    slow.go.set()
    wait_for(lambda: served(lines), "it is believed")
    assert lines.key == lines.pair[0] and learned == [True]


def test_a_line_that_was_encrypted_once_is_never_unencrypted(lines: Line, controller: socket.socket) -> None:
    """Who takes the controller's port on this machine when it is down could have the agent's messages by saying so."""
    lines.find_controller()
    _, where = controller.recvfrom(4096)
    theirs, learned = new_pair()[0], list[bool]()
    lines._connect(theirs)
    connected = lines._endpoint
    controller.sendto(wire.encode(datagrams.Introduction(plain=True)), where)
    wait_for(lambda: lines.learn(lambda: learned.append(True)) or served(lines), "the answer is looked at")
    assert lines._theirs == theirs and lines.key == lines.pair[0] and not learned and lines._endpoint == connected


@pytest.mark.parametrize(("host", "plain"), [("127.0.0.1", True), ("192.0.2.1", False)])
def test_nothing_is_unencrypted_over_a_network(monkeypatch: pytest.MonkeyPatch, host: str, plain: bool) -> None:
    """Whatever the environment of a job says: the line asks for the key then."""
    asked = list[bool]()
    monkeypatch.setattr(controller_discovery.Hello, "send_questions", lambda hello: asked.append(True))
    monkeypatch.setenv("UNICRON_PUBLIC_KEY", "none")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    line = Line(context, f"tcp://{host}:9")
    line.socket.setsockopt(zmq.LINGER, 0)
    assert (line.key == PLAIN, bool(line._endpoint)) == (plain, plain)
    line.find_controller()
    assert bool(asked) is not plain
    line.close()
    context.term()


def test_a_command_asks_nobody_unencrypted_over_a_network(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setenv("UNICRON_PUBLIC_KEY", "none")
    with pytest.raises(UserError) as refused:
        ask_controller({"kind": "status"}, "tcp://192.0.2.1:9", timeout=0.3)
    assert str(refused.value) == snapshot


def test_what_a_controller_says_after_another_has_taken_over_does_not_count(lines: Line) -> None:
    lines.up = True
    assert lines.is_current(7) and lines.is_current(7) and lines.is_current(9) and lines.up
    assert not lines.is_current(7) and not lines.up, "another is looked for"
    assert lines.is_current(9)


def test_a_controller_that_outlives_its_end_counts_again(lines: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock was far ahead in the other's time, and the log is from a backup of before: no term will be as high."""
    clock = [1000.0]
    monkeypatch.setattr(controller_connection.time, "monotonic", lambda: clock[0])
    assert lines.is_current(4_000_000_000) and not lines.is_current(7)
    clock[0] += OUTLIVED_SECONDS / 2
    assert lines.is_current(4_000_000_000), "it lives"
    clock[0] += OUTLIVED_SECONDS * 10
    assert not lines.is_current(7), "who was silent for long may be frozen"
    clock[0] += OUTLIVED_SECONDS - 0.1
    assert not lines.is_current(7)
    clock[0] += 0.2
    assert lines.is_current(7) and lines.is_current(8) and not lines.is_current(7)
    assert lines.is_current(4_000_000_000), "it may come back"


def test_the_line_goes_to_whichever_controller_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that it was connected to is frozen: it takes connections, and answers nothing."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    frozen, other = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    ports = [one.getsockname()[1] for one in (frozen, other)]
    line = Line(context, ",".join(f"tcp://127.0.0.1:{port}" for port in ports))
    line.socket.setsockopt(zmq.LINGER, 0)
    key = new_pair()[0]
    line._connect(key, next(target for target in line._hello.targets if target.port == ports[0]))
    assert line._endpoint.endswith(f":{ports[0]}")
    answers = [controller_discovery.Answer(datagrams.Introduction(), line._hello.targets[1])]
    monkeypatch.setattr(line._hello, "read", lambda: answers)
    monkeypatch.setattr(
        line._hello,
        "first_believed",
        lambda found: controller_discovery.ControllerKey(key, found[0].reached) if found else None,
    )
    line.learn(lambda: pytest.fail("the key is the same"))
    wait_for(lambda: served(line), "the answer is believed")
    assert line._endpoint.endswith(f":{ports[1]}")
    found_key = controller_discovery.ControllerKey(new_pair()[0], None)
    monkeypatch.setattr(line._hello, "first_believed", lambda found: found_key)
    line._known, line._theirs = key, key
    line.learn(lambda: pytest.fail("only the pinned key counts"))
    wait_for(lambda: served(line), "the answer is not believed")
    assert line._theirs == key
    line.close()
    for one in (frozen, other):
        one.close()
    context.term()
