"""What the server does with messages before the core hears of them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest
import zmq
from syrupy.assertion import SnapshotAssertion

from tests.support.processes import wait_for
from tests.support.world import FakeAgent, World
from unicron_ctl.controller.api import answers
from unicron_ctl.controller.model.asker import NOBODY, Asker
from unicron_ctl.controller.model.quotas import OF_A_USER, SECONDS_OF_ONE
from unicron_ctl.controller.model.view import Send
from unicron_ctl.controller.server.fair_queue import OF_ALL, OF_ONE, AnswerCache, FairQueue, Question, add_question
from unicron_ctl.controller.server.log_upkeep import FORGET_AGAIN_SECONDS, FORGET_FIRST_SECONDS, FORGET_SECONDS
from unicron_ctl.controller.server.server import Server
from unicron_ctl.controller.server.sockets import bind
from unicron_ctl.shared.log.store import LogTakenOver, Store
from unicron_ctl.shared.notices.notify_targets import Hooks
from unicron_ctl.shared.protocol import structs, wire
from unicron_ctl.shared.settings.config import Config, ControllerConfig
from unicron_detector.failures.classify import Classifier


def started(folder: Path) -> Server:
    config = Config(controller=ControllerConfig(auth="none"))
    return Server(config, Store(folder / "events.db"), bind("tcp://127.0.0.1:0"), None, Classifier())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = started(tmp_path)
    yield server
    server.close()


@pytest.fixture
def clock(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The server's time in a list of one."""
    now = [server.now()]
    monkeypatch.setattr(server, "now", lambda: now[0])
    return now


def test_its_end_ends_the_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[Hooks]()
    monkeypatch.setattr(Hooks, "close", lambda self: ended.append(self))
    started(tmp_path).close()
    assert len(ended) == 1


@contextlib.contextmanager
def crowded(server: Server, peers: int, each: int) -> Iterator[tuple[zmq.Context, threading.Thread]]:
    """So many agents that have each sent as many messages to the server, and its loop, which is still to be started."""
    context, loop = zmq.Context(), threading.Thread(target=server.run)
    context.setsockopt(zmq.LINGER, 0)
    try:
        message = wire.encode(FakeAgent(World(), "1", 0, "n1").registration())
        dealers = [context.socket(zmq.DEALER) for _ in range(peers)]
        for dealer in dealers:
            dealer.connect(server.address)
            for _ in range(each):
                dealer.send(message)
        yield context, loop
    finally:
        server.stop()
        loop.join(20.0)
        context.destroy()


@pytest.mark.parametrize(
    ("address", "host"), [("10.0.0.5", "10.0.0.5"), ("::ffff:10.0.0.5", "10.0.0.5"), ("", "127.0.0.1")]
)
def test_an_agents_door_is_where_its_connection_comes_from(server: Server, address: str, host: str) -> None:
    """Defect: it could be any host and port, or a name for which everybody's threads waited."""
    message = FakeAgent(World(), "1", 0, "n1").registration()
    message.door = "a.name.that.takes.long:70"
    server._on_message((b"route",), wire.encode(message), "", address)
    assert server.core.state.jobs["1"].agents[0].door == f"{host}:70"


def test_a_configuration_that_is_read_again_or_refused_is_in_the_log(
    server: Server, caplog: pytest.LogCaptureFixture, snapshot: SnapshotAssertion
) -> None:
    with caplog.at_level("INFO", "unicron"):
        server.apply_config(server.config, Classifier())
        server.keep_config("offer_delay: a number is needed")
        server.flush()
    told = [(record.levelname, record.getMessage().partition(":")[0]) for record in caplog.records]
    assert told == [("INFO", "configured"), ("ERROR", "config_refused")]
    assert [event.kind for event in server.store.tail().events] == ["configured", "config_refused"]
    assert caplog.records[1].getMessage() == snapshot


def test_what_a_reload_does_not_change_is_named(server: Server, snapshot: SnapshotAssertion) -> None:
    """Defect: a port for metrics was "read again" and never opened."""
    controller = msgspec.structs.replace(server.config.controller, metrics=":7453", offer_delay=0.3)
    server.apply_config(msgspec.structs.replace(server.config, controller=controller), Classifier())
    server.flush()
    (told,) = server.store.tail().events
    assert told.record.reason == snapshot


def test_the_time_that_a_question_takes_counts_for_who_asks(
    server: Server, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect: a small answer that takes long to make cost as much as a ping."""
    monkeypatch.setattr(server, "_munge", True)

    def slow(*given: Any) -> dict[str, Any]:
        clock[0] += 0.05
        return {}

    monkeypatch.setattr(answers, "answer", slow)
    began, asked = clock[0], 0
    ann = Asker(1000, "ann")
    while server._quotas.may_ask("1000", "10.0.0.1", clock[0]):
        server._answer(Question((b"route",), wire.Ask(what="events"), ann, "10.0.0.1"))
        asked += 1
    spent = clock[0] - began
    assert spent < OF_A_USER[1] * SECONDS_OF_ONE / (1 - OF_A_USER[0] * SECONDS_OF_ONE) + 0.05 and asked > 10
    assert server._quotas.may_ask("1001", "10.0.0.1", clock[0])


def test_an_answer_that_takes_long_is_made_once_for_all_who_may_hear_the_same(
    server: Server, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect: `watch unicronctl status` on each node of a large job took all of the controller's time."""
    made, sent = list[Asker](), list[bytes]()
    monkeypatch.setattr(server, "_send_bytes", lambda route, data: sent.append(data))

    def slow(core: Any, store: Any, what: str, args: Any, asker: Asker) -> str:
        clock[0] += 0.015
        made.append(asker)
        return f"{what} for {asker}"

    monkeypatch.setattr(answers, "answer", slow)
    ann, bob = Asker(1000, "ann"), Asker(1001, "bob")
    for asker in (ann, ann, bob, ann, bob):
        server._answer(Question((b"route",), wire.Ask(what="status"), asker, "10.0.0.1"))
    assert made == [ann, bob] and sent[0] == sent[1] == sent[3] != sent[2] == sent[4]
    server._answer(Question((b"route",), wire.Ask(what="inject"), bob, "10.0.0.1"))
    server._answer(Question((b"route",), wire.Ask(what="status"), ann, "10.0.0.1"))
    assert made == [ann, bob, bob, ann], "after an order nothing old is told"
    server.record_start()
    server._answer(Question((b"route",), wire.Ask(what="status"), ann, "10.0.0.1"))
    assert made[4:] == [ann], "nor after a record"
    clock[0] += AnswerCache.KEPT_SECONDS
    server._answer(Question((b"route",), wire.Ask(what="status"), ann, "10.0.0.1"))
    assert made[5:] == [ann]


def test_who_asks_much_waits_for_himself() -> None:
    asked, ann, bob = FairQueue[Question](OF_ALL), Asker(1000, "ann"), Asker(1001, "bob")

    def add(asker: Asker, address: str) -> bool:
        return add_question(asked, Question((b"r",), wire.Ask(what="ping"), asker, address))

    added = [add(ann, f"10.0.0.{n}") for n in range(30)]
    assert added.count(True) == OF_ONE and add(bob, "10.0.0.1")
    order = [asked.next().asker.uid for _ in range(len(asked))]
    assert order[:3] == [1000, 1001, 1000] and not asked
    for n in range(2 * OF_ALL):
        add(NOBODY, f"10.0.{n // 250}.{n % 250}")
    assert len(asked) == OF_ALL


def test_old_records_go_piece_by_piece_and_not_at_once_after_a_start(
    server: Server, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect: a piece that took longer than the time between two made every turn of the loop take one."""
    begun = list[float]()

    def pieces(*what: Any) -> Iterator[int]:
        begun.append(clock[0])
        for _ in range(2):
            clock[0] += 2.5 * FORGET_SECONDS
            yield 0

    monkeypatch.setattr(server.store, "forget", pieces)
    server.flush()
    assert not begun
    clock[0] = start = clock[0] + FORGET_FIRST_SECONDS
    server.flush()
    assert begun == [start] and server._upkeep._forget_at == clock[0] + FORGET_SECONDS
    server.flush()
    assert clock[0] == start + 2.5 * FORGET_SECONDS, "the next piece has its pause before it"
    for _ in range(2):
        clock[0] += FORGET_SECONDS
        server.flush()
    assert begun == [start] and server._upkeep._forget_at == clock[0] + FORGET_AGAIN_SECONDS


def test_a_controller_that_is_behind_goes_on_hearing_and_answers_before_all_is_heard(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect: with 2,048 agents a tick took longer than the time until the next one, so only 30 ms of each turn were
    left to hear them, and a question waited for up to 32 messages of each of them: it had no answer within 60 s."""
    spent, heard, peers, each = {"tick": 0.0, "receive": 0.0}, [0], 40, 32

    def slow(kind: str, seconds: float) -> Any:
        def work(*given: Any, **more: Any) -> None:
            began = time.monotonic()
            time.sleep(seconds)
            spent[kind] += time.monotonic() - began
            heard[0] += kind == "receive"

        return work

    monkeypatch.setattr(server.core, "tick", slow("tick", 0.1))
    monkeypatch.setattr(server.core, "receive", slow("receive", 0.002))
    with crowded(server, peers, each) as (context, loop):
        asker = context.socket(zmq.DEALER)
        asker.connect(server.address)
        loop.start()
        wait_for(lambda: heard[0], "the first message is heard", 120.0)
        asker.send(wire.encode(wire.Ask(what="ping")))
        assert asker.poll(120_000), "no answer"
        assert heard[0] < peers * each / 2
        wait_for(lambda: heard[0] == peers * each, "all are heard", 120.0)
        assert spent["tick"] < 2 * spent["receive"]


def test_where_a_turn_takes_long_more_is_heard_before_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: when all ranks of 2,048 agents died at once each 30 ms of hearing were followed by half a second of what
    comes of it, for all of the job anew, and the last rank was told to start again after 28 s."""
    heard, hearing, settled, peers, each = [0], [0.0], [0], 40, 10

    def settle() -> None:
        settled[0] += 1
        time.sleep(0.1 if heard[0] < peers * each else 0.0)

    def receive(*given: Any) -> None:
        began = time.monotonic()
        heard[0] += 1
        time.sleep(0.002)
        hearing[0] += time.monotonic() - began

    monkeypatch.setattr(server.core, "advance_jobs", settle)
    monkeypatch.setattr(server.core, "tick", lambda now: None)
    monkeypatch.setattr(server.core, "receive", receive)
    with crowded(server, peers, each) as (_, loop):
        time.sleep(0.5)
        loop.start()
        wait_for(lambda: heard[0], "the first message is heard", 120.0)
        before, at = hearing[0], settled[0]
        wait_for(lambda: heard[0] == peers * each, "all are heard", 120.0)
        # In seconds, not messages: a busy machine takes longer for each.
        assert (hearing[0] - before) / (settled[0] - at) > 0.05, "a turn heard for 30 ms"


def test_what_one_agent_is_told_at_once_goes_out_in_its_order(server: Server) -> None:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.connect(server.address)
        dealer.send(wire.encode(wire.Ask(what="ping")))
        wait_for(lambda: (server._receive(), server._asked)[1], "it has asked", 20.0)
        route = server._asked.next().route
        told = [wire.Ping(over=number) for number in range(3)]
        server.core.outbox += [Send(route, message) for message in told]
        server.flush()
        said = [wire.decode(dealer.recv(), wire.ToAgent) for _ in told if dealer.poll(5000)]
        assert said == told
    finally:
        context.destroy(linger=0)


def test_of_strangers_only_what_is_heeded_is_decoded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: a status of 4 MiB took 0.1 s to decode before anybody asked whether its key is known."""
    sent, decoded, received = list[Any](), list[Any](), list[wire.Message]()
    decode, receive = wire.decode, server.core.receive

    def counted(data: bytes, kind: Any = wire.ToController, *more: Any) -> Any:
        decoded.append(kind)
        return decode(data, kind, *more)

    def heard(route: Any, message: wire.Message, *more: Any) -> None:
        received.append(message)
        receive(route, message, *more)

    monkeypatch.setattr(server, "_munge", True)
    monkeypatch.setattr(wire, "decode", counted)
    monkeypatch.setattr(server.core, "receive", heard)
    monkeypatch.setattr(
        server, "_send_bytes", lambda route, *data: sent.extend(decode(one, wire.ToAgent) for one in data)
    )

    def tell(message: wire.Message, key: str) -> None:
        for log in (sent, decoded, received):
            log.clear()
        server._on_message((b"route",), wire.encode(message), key, "10.0.0.1")
        server.flush()

    def status(ranks: int) -> wire.Status:
        each = structs.RankStatus(state="running", done=list(range(200)))
        return wire.Status(job="1", element=0, agent="a", sent=1.0, ranks=dict.fromkeys(range(ranks), each))

    tell(status(1000), "stranger's")
    assert not decoded and not received and "register first" in sent[0].reason
    tell(status(8), "stranger's")
    assert wire.ToController not in decoded and [one.reason for one in sent] == ["register first"]
    assert isinstance(received[0], wire.Status) and not received[0].ranks
    steps = wire.Steps(job="1", element=0, agent="a", reports=[structs.StepReport(1, 1, total=1, at=1.0, ranks=[])])
    tell(steps, "stranger's")
    assert decoded == [wire.Envelope] and not received and not sent
    server.core.view.live.keys.add("agent's")
    for message in (status(1000), steps):
        tell(message, "agent's")
        assert decoded == [wire.ToController] and received == [message]
    monkeypatch.setattr(server, "_munge", False)
    tell(status(1000), "")
    assert decoded == [wire.ToController] and len(received) == 1, "there is one user"


def test_what_strangers_may_say_are_the_kinds_that_are_not_the_agents() -> None:
    kinds = {kind.__struct_config__.tag for kind in get_args(wire.ToController)}
    assert kinds - wire.OF_AGENTS == {"register", "ask", "status", "going"} and wire.OF_AGENTS < kinds


def test_the_longest_registration_of_an_agent_is_heard_of_a_stranger() -> None:
    message = FakeAgent(World(), "1", 0, "n1").registration()
    message.settings.ranks_per_node = 1024
    message.slots = list(range(1024))
    message.settings.layouts = [f"TP{number} PP{number} EP{number} CP{number} DP{number}" for number in range(64)]
    message.settings.model = {f"hidden_size_of_part_{number}": 1 << 40 for number in range(256)}
    message.settings.mode_reason = "reason " * 2000
    message.credential = "MUNGE:" + "A" * 4096
    assert len(wire.encode(message)) < wire.STRANGER_BYTES / 2


class Lost:
    """A right to act that is over."""

    valid, lease = False, 2.5

    def assure(self) -> None:
        raise LogTakenOver("n2 has taken it over")


def test_whoever_was_taken_over_sends_nothing_and_asks_nothing_of_slurm(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = list[bytes]()
    monkeypatch.setattr(server, "_send_bytes", lambda route, *data: sent.extend(data))
    monkeypatch.setattr(server.worker, "submit", lambda *given: pytest.fail("Slurm is asked"))
    server.core.outbox.append(Send((b"route",), wire.Note(text="before")))
    server.flush()
    server.core.outbox.append(Send((b"route",), wire.Note(text="after")))
    server.core.requests.append(object())  # type: ignore[arg-type]
    monkeypatch.setattr(server, "_tenure", Lost())
    with pytest.raises(LogTakenOver):
        server.flush()
    with pytest.raises(LogTakenOver):
        server.run()
    assert [wire.decode(data, wire.ToAgent).text for data in sent] == ["before"]
    hellos = list[bytes]()
    server._answer_hello(b"key", (SimpleNamespace(sendto=lambda data, where: hellos.append(data)), None))  # type: ignore[arg-type]
    assert not hellos, "no agent finds it any more"
    server.core.requests.clear()


def test_agents_hear_the_controllers_term(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[bytes]()
    monkeypatch.setattr(server, "_send_bytes", lambda route, *data: sent.extend(data))
    server.store.term = 1_764_000_000
    server._send((b"route",), wire.Ping())
    server.core.outbox += [Send((b"a",), message := wire.Ping(number=3)), Send((b"b",), message)]
    server._tenure.assure()
    server.store.term = 0
    server.flush()
    assert [wire.decode(data, wire.ToAgent).term for data in sent] == [1_764_000_000, 0, 0]


def test_a_datagram_of_another_release_is_complained_of_once(server: Server) -> None:
    """Defect: it ended the controller."""
    host, _, port = server.address.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plugin:
        for _ in range(2):
            plugin.sendto(msgspec.msgpack.encode({"v": 99, "kind": "task_exit"}), (host, int(port)))
            wait_for(lambda: server._receive_datagrams(server._hints[0]) or server.dropped["hint"], "it has come")
    wait_for(lambda: server._receive_datagrams(server._hints[0]) or server.dropped["hint"] == 2, "both have")
    (said,) = [event.record.reason for event in server.core.events if event.kind == "bad_message"]
    assert "the plugin at 127.0.0.1" in said
