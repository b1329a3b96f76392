"""Who made a credential; and how many are looked at, at once."""

from __future__ import annotations

import pwd
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.processes import wait_for
from tests.support.world import World
from unicron_ctl.controller.model.asker import EVERYBODY, NOBODY, Asker, Roles
from unicron_ctl.controller.server import credentials
from unicron_ctl.controller.server.credentials import Introducer, Unproven, Verifier, asker_of
from unicron_ctl.controller.server.worker import VERIFIERS, Worker
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import datagrams, munge, structs, wire
from unicron_ctl.shared.protocol.munge import Credential, MungeError
from unicron_ctl.shared.system.time_limit import TimeLimit


class Later:
    """A worker whose threads wait until the test lets them go on."""

    def __init__(self) -> None:
        self.todo: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []

    def verify(self, work: Callable[[], Any], then: Callable[[Any], None], whose: tuple[str, ...] = ()) -> bool:
        self.todo.append((work, then))
        return True

    def run(self) -> None:
        todo, self.todo = self.todo, []
        for work, then in todo:
            then(work())


def munged(monkeypatch: pytest.MonkeyPatch, found: Credential | MungeError, names: dict[int, str]) -> None:
    def unmunge(text: str) -> Credential:
        if isinstance(found, MungeError):
            raise found
        return found

    monkeypatch.setattr(credentials, "unmunge", unmunge)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name=names[uid]))


@pytest.mark.by_hand
def test_who_asks_is_a_number_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the name service is away nobody has a name, and owners are themselves all the same."""
    world = World()
    world.start_job()
    job = world.job()
    job.uid = 1000
    munged(monkeypatch, Credential(1000, b"claim"), {})
    asker = asker_of("c", "claim", Roles(["ann"]))
    assert asker == Asker(1000, "", False) and asker.owns(job) and asker.may_order(job)
    munged(monkeypatch, Credential(1001, b"claim"), {1001: "ann"})
    other = asker_of("c", "claim", Roles())
    assert other == Asker(1001, "ann", False) and not other.owns(job), "the name alone does not make an owner"
    munged(monkeypatch, Credential(0, b"claim"), {0: "root"})
    assert asker_of("c", "claim", Roles()).admin
    munged(monkeypatch, Credential(1001, b"claim"), {1001: "ann"})
    assert asker_of("c", "claim", Roles(["ann"])).admin


def test_a_name_service_that_hangs_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: four threads look at credentials, and each could wait for a name for ever."""
    munged(monkeypatch, Credential(1000, b"claim"), {})
    go_on = threading.Event()
    monkeypatch.setattr(munge, "_names", TimeLimit(0.05, 2, "test-names"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: go_on.wait(60.0))
    for _ in range(20):
        assert asker_of("c", "claim", Roles()) == Asker(1000, "", False)
    assert sum(thread.name == "test-names" for thread in threading.enumerate()) == 2
    go_on.set()


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (Credential(1000, b"other"), "about something else"),
        (Credential(1000, b"claim", replayed=True), "used before"),
        (MungeError("munge: Expired credential", outage=True), "Expired credential"),
    ],
)
def test_a_credential_that_does_not_count(
    monkeypatch: pytest.MonkeyPatch, found: Credential | MungeError, told: str
) -> None:
    munged(monkeypatch, found, {1000: "ann"})
    asker = asker_of("c", "claim", Roles())
    assert isinstance(asker, Unproven) and told in asker.reason


def test_whose_turn_a_credential_takes() -> None:
    assert credentials.path("k", "10.0.0.1") == ("10.0.0.1", "10.0.0.1", "k")
    assert credentials.path("k", "::ffff:127.1.2.3")[0] == credentials.path("k", "127.0.0.1")[0] == "loopback"
    assert credentials.path("k", "::1")[0] == "loopback"
    one, other = (credentials.path("k", f"2001:db8::{number}") for number in (1, 2))
    assert one == other, "in IPv6 a network is one host's"


def test_a_newcomer_overtakes_strangers_that_wait_for_munge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: all credentials waited in one line, and a newcomer's registration took as long as 4,096 of strangers."""
    munged(monkeypatch, Credential(1000, b"claim"), {1000: "ann"})
    go_on, read = threading.Event(), list[str]()

    def unmunge(text: str) -> Credential:
        go_on.wait(60.0)
        read.append(text)
        return Credential(1000, b"claim")

    monkeypatch.setattr(credentials, "unmunge", unmunge)
    worker = Worker(None, 1.0)
    try:
        verifier, found = Verifier(worker, Roles), list[Asker | Unproven]()
        peers = ((f"bad {number}", f"10.0.0.{number % 60}") for number in range(6000))
        taken = [verifier.verify(bad, "claim", "k", peer, found.append) for bad, peer in peers]
        assert taken.count(True) > 2000, "strangers fill it"
        assert verifier.verify("good", "claim", "new", "10.0.1.1", found.append)
        go_on.set()
        wait_for(lambda: "good" in read, "the newcomer's is read")
        assert read.index("good") < 60 + 2 * VERIFIERS
    finally:
        go_on.set()
        worker.close()


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (Credential(1000, b"claim", replayed=True), "used before"),
        (Credential(1000, b"other"), "used before"),
        (MungeError("munge: Invalid credential", outage=False), "Invalid credential"),
    ],
)
def test_a_spent_credential_is_not_shown_to_munge_again(
    monkeypatch: pytest.MonkeyPatch, first: Credential | MungeError, again: str
) -> None:
    """Defect: munge was asked about one credential as often as strangers sent it."""
    munged(monkeypatch, first, {1000: "ann"})
    later, found = Later(), list[Asker | Unproven]()
    verifier = Verifier(later, Roles)  # type: ignore[arg-type]
    assert verifier.verify("c", "claim", "k", "10.0.0.1", found.append)
    later.run()
    for _ in range(100):
        assert verifier.verify("c", "claim", "other", "10.0.0.2", found.append)
    assert not later.todo and len(found) == 101
    assert all(isinstance(one, Unproven) and again in one.reason for one in found[1:])
    assert verifier.verify("d", "claim", "k", "10.0.0.1", found.append) and len(later.todo) == 1


def test_a_credential_that_munge_could_not_read_may_be_good_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    munged(monkeypatch, MungeError("munge: Socket communication error", outage=True), {1000: "ann"})
    later, found = Later(), list[Asker | Unproven]()
    verifier = Verifier(later, Roles)  # type: ignore[arg-type]
    verifier.verify("c", "claim", "k", "10.0.0.1", found.append)
    later.run()
    munged(monkeypatch, Credential(1000, b"claim"), {1000: "ann"})
    verifier.verify("c", "claim", "k", "10.0.0.1", found.append)
    later.run()
    assert found[1:] == [Asker(1000, "ann", False)]


def test_the_memory_of_spent_credentials_is_bounded() -> None:
    spent = credentials.SpentCredentials()
    for number in range(credentials.MOST_SPENT + 100):
        spent.note(f"{number}", credentials.USED)
    assert spent.get("0") is None and spent.get(f"{credentials.MOST_SPENT + 99}") is not None
    assert len(spent._known) == credentials.MOST_SPENT


def test_one_credential_tells_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def make(claim: str) -> str:
        made.append(claim)
        if len(made) == 2:
            raise MungeError("munge: Socket communication error", outage=True)
        return f"credential {len(made)}"

    monkeypatch.setattr(credentials, "make_credential", make)
    later, sent = Later(), list[tuple[bytes, Any]]()
    introducer = Introducer(later, "k" * 40, lambda data, where: sent.append((data, where)))  # type: ignore[arg-type]

    def answers() -> list[datagrams.Introduction]:
        found = [wire.decode(data, datagrams.Introduction) for data, _ in sent]
        sent.clear()
        return found

    for port in range(5000):
        introducer.on_hello(("10.0.0.1", port), 100.0)
    assert len(later.todo) == 1 and not sent
    later.run()
    assert {answer.credential for answer in answers()} == {"credential 1"} and len(made) == 1
    introducer.on_hello(("10.0.0.1", 1), 159.0)
    assert [answer.credential for answer in answers()] == ["credential 1"] and not later.todo
    introducer.on_hello(("10.0.0.1", 1), 161.0)
    later.run()
    (answer,) = answers()
    assert not answer.credential and "Socket communication error" in answer.error
    introducer.on_hello(("10.0.0.1", 1), 162.5)
    later.run()
    assert [answer.credential for answer in answers()] == ["credential 3"]


# ---------------------------------------------------------------- in the core
def register(element: int = 0, agent: str = "a", user: str = "ann") -> wire.Register:
    settings = structs.Settings(name="j", user=user, max_nodes=2)
    return wire.Register(
        job="1", element=element, agent=agent, node="n1", address="x", slots=[element], settings=settings
    )


def told(world: World) -> list[wire.Message]:
    world.core.advance_jobs()
    found = [send.message for send in world.core.outbox]
    world.deliver()
    return found


ANN, BOB = Asker(1000, "ann"), Asker(1001, "bob")


def test_a_refusal_while_names_are_away_is_not_final() -> None:
    world = World()
    world.core.receive((b"r",), register(), world.now, "key1", ANN)
    assert isinstance(told(world)[0], wire.Welcome) and world.job().uid == 1000
    for asker, final in ((BOB, True), (Asker(1001, ""), False), (NOBODY, False)):
        world.core.receive((b"s",), register(1, "b"), world.now, "key2", asker)
        (refused,) = told(world)
        assert isinstance(refused, wire.Refusal) and refused.final == final and not refused.replaced
    world.core.receive((b"s",), register(1, "b"), world.now, "key2", Asker(1000, ""))
    assert isinstance(told(world)[0], wire.Welcome), "the owner is known by number"


def test_an_admin_begins_a_job_for_its_user() -> None:
    world = World()
    world.core.receive((b"r",), register(), world.now, "", EVERYBODY)
    assert world.job().uid is None and ANN.owns(world.job()) and not BOB.owns(world.job())


def test_an_agent_is_its_key() -> None:
    """Not its id, which others may know, nor its connection, which may break."""
    world = World()
    world.core.receive((b"r",), register(), world.now, "key1", ANN)
    told(world)
    assert world.job().agents[0].key == "key1" and world.core.view.live.keys == {"key1"}

    def status(route: bytes, key: str, number: int, store: str) -> None:
        message = wire.Status(job="1", element=0, agent="a", sent=0.0, number=number, store=store)
        world.core.receive((route,), message, world.now, key)

    status(b"r", "key1", 1, "n1:1")
    for key in ("key2", ""):
        status(b"thief", key, 2**60, "thief:1")
        (refused,) = told(world)
        assert isinstance(refused, wire.Refusal) and not refused.final
    agent = world.core.view.live.agent("1", 0)
    assert agent is not None and (agent.route, agent.number, agent.status.store) == ((b"r",), 1, "n1:1")
    status(b"new", "key1", 2, "n1:2")
    assert (agent.route, agent.status.store) == ((b"new",), "n1:2")
    world.core.receive((b"t",), register(), world.now, "key2", ANN)
    (refused,) = told(world)
    assert isinstance(refused, wire.Refusal) and "another key" in refused.reason, "not even its owner takes it over"


def test_the_end_of_a_job_is_told_to_its_agents_only() -> None:
    world = World()
    world.core.receive((b"r",), register(), world.now, "key1", ANN)
    told(world)
    world.core.append("1", 1, records.JobEnded(code=0, reason="finished"))
    message = wire.Status(job="1", element=0, agent="a", sent=0.0, number=9)
    world.core.receive((b"r",), message, world.now, "key1")
    assert [type(one) for one in told(world)][-1] is wire.End
    world.core.receive((b"s",), message, world.now, "key2")
    assert [type(one) for one in told(world)] == [wire.Refusal]
