"""With munge, as it is by default: agents and users are known by their credentials and keys, whatever they say, and
nobody has to hand out a key."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from tests.support.controller import Controller, is_alive
from tests.support.jobs import SLEEPS, Job, scripted
from tests.support.munged import MUNGE, STRANGER, Munged, controller_in
from tests.support.processes import outside_slurm, wait_for
from tests.support.scripted import ScriptedAgent, form
from unicron_ctl.agent.start.agent_main import REGISTER_TIMEOUT
from unicron_ctl.shared.protocol import claims, datagrams, ranges, structs, wire
from unicron_ctl.shared.protocol.client import ask_controller
from unicron_ctl.shared.protocol.controller_discovery import Hello
from unicron_ctl.shared.protocol.encryption import SECRET_FILE, new_pair, secure_client
from unicron_ctl.shared.system.errors import UserError

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user"),
]


@pytest.fixture(scope="module")
def munged():
    started = Munged()
    yield started
    started.close()


@pytest.fixture
def realm(munged, monkeypatch):
    """The test's own process is in munged's realm, too."""
    munged.enter(monkeypatch)
    return munged


@pytest.fixture
def controller(realm, tmp_path):
    with controller_in(realm, tmp_path, Controller) as started:
        yield started


def key_of(controller: Controller) -> str:
    """As agents learn it."""
    hello = Hello(controller.address)
    try:
        return hello.wait_for_key(30.0) or pytest.fail(hello.problem)
    finally:
        hello.close()


@pytest.fixture
def agents(controller):
    """Two agents of root's job 7, which trains."""
    key = key_of(controller)
    made = [ScriptedAgent(controller.address, element, key=key) for element in range(2)]
    form(made)
    yield made
    for agent in made:
        agent.close()


@pytest.fixture
def stranger(controller, realm):
    """An agent of another user, for whatever job and element a test gives it."""
    made = ScriptedAgent(
        controller.address, 0, key=key_of(controller), credential=lambda text: realm.credential(text, STRANGER)
    )
    yield made
    made.close()


def refused(agent: ScriptedAgent, *others: ScriptedAgent) -> wire.Refusal:
    """The next refusal; nothing is answered to it."""
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        for other in others:
            other.turn()
        if agent.socket.poll(50):
            message = wire.decode(agent.socket.recv(), wire.ToAgent)
            if isinstance(message, wire.Refusal):
                return message
            assert not isinstance(message, wire.Welcome)
    raise AssertionError("no refusal")


# ---------------------------------------------------------------- the key needs no admin
def test_everything_is_encrypted_and_nobody_hands_out_a_key(controller, realm, tmp_path):
    secret = controller.state_folder / SECRET_FILE
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    plain = ScriptedAgent(controller.address, 0)
    plain.socket.setsockopt(zmq.SNDTIMEO, 0)
    job = Job(
        tmp_path, controller.address, "21", 1, scripted(tmp_path, SLEEPS), UNICRON_MODE="session", **realm.environment
    )
    try:
        with contextlib.suppress(zmq.Again):  # it is refused already, and nothing can be sent
            plain.register()
        controller.wait(lambda: controller.job("21"), "a real agent is taken in")
        assert not plain.socket.poll(300), "an unencrypted connection gets no answer"
        (agent,) = [event for event in controller.events("agent_registered")]
        assert len(agent["key"]) == 40 and controller.job("21")["user"] == "root"
    finally:
        job.close()
        plain.close()


def test_a_controller_that_lost_its_state_folder_is_found_again(controller, realm, tmp_path):
    """It has a new key then. Its agents ask for it and go on."""
    job = Job(
        tmp_path, controller.address, "21", 1, scripted(tmp_path, SLEEPS), UNICRON_MODE="session", **realm.environment
    )
    try:
        pid = controller.wait(lambda: controller.rank(0, "21").get("pid"), "the agent is taken in, and its rank runs")
        before = key_of(controller)
        controller.kill()
        shutil.rmtree(controller.state_folder)
        controller.start()
        assert key_of(controller) != before
        controller.wait(lambda: controller.rank(0, "21"), "the agent is taken in again")
        assert controller.rank(0, "21")["pid"] == pid
    finally:
        job.close()


@pytest.mark.parametrize("made", ["by a stranger", "by root, about something else", "of nothing"])
def test_another_controller_is_not_believed(realm, made):
    """Somebody else answers the question for the key."""
    public, _ = new_pair()
    credential = {
        "by a stranger": lambda: realm.credential(claims.of_controller(public), STRANGER),
        "by root, about something else": lambda: realm.credential(claims.of_asker(public)),
        "of nothing": lambda: "MUNGE:AwQDAAB:",
    }[made]()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as rogue:
        rogue.bind(("127.0.0.1", 0))
        rogue.settimeout(20)

        def answer() -> None:
            _, where = rogue.recvfrom(4096)
            rogue.sendto(wire.encode(datagrams.Introduction(credential=credential)), where)

        thread = threading.Thread(target=answer)
        thread.start()
        hello = Hello(f"tcp://127.0.0.1:{rogue.getsockname()[1]}")
        assert hello.wait_for_key(1.0) is None
        told = {"by a stranger": "belongs to nobody", "of nothing": "Invalid credential"}.get(made, "holds no key")
        assert told in hello.problem
        hello.close()
        thread.join()


def test_plain_answers_are_for_loopback_addresses_only():
    hello = Hello("tcp://192.0.2.1:7451")
    assert hello.open() and not hello.local
    assert hello._understand(datagrams.Introduction(plain=True)) is None and "loopback" in hello.problem
    hello.close()


# ---------------------------------------------------------------- whose word counts
def test_a_status_of_another_connection_changes_nothing(controller, agents, stranger):
    """It would take the agent over, name its own store in the next plan, and end the job."""
    before = controller.job("7")
    for key in (0, 1):
        stranger.element, stranger.name = key, agents[key].name
        stranger.send(
            wire.Status(
                job="7",
                element=key,
                agent=agents[key].name,
                sent=ranges.MOST_TIME,
                number=ranges.MOST_COUNT,
                store="192.0.2.1:1",
                leaving="finished",
                ranks={key: structs.RankStatus(state="finished", changed=ranges.MOST_TIME, generation=1)},
            )
        )
        assert refused(stranger, *agents).reason == "register first"
        step = wire.Steps(
            job="7",
            element=key,
            agent=agents[key].name,
            reports=[structs.StepReport(generation=1, iteration=9, total=4, at=0.0, ranks=[])],
        )
        for message in (
            step,
            wire.StackTrace(job="7", slot=key, incarnation=0, how="none", state="Z", text="forged"),
            wire.NodeEvent(
                job="7", element=key, agent=agents[key].name, number=1, source="kernel", text="xid 79", at=0.0
            ),
        ):
            stranger.send(message)
    for agent in agents:
        agent.status(phase="reducing")
    controller.wait(lambda: controller.rank(1)["phase"] == "reducing", "the true agents are heard")
    after = controller.job("7")
    assert (after["generation"], after["state"], after["failures"]) == (1, before["state"], 0)
    assert not controller.events("stacks", "node_event")


def test_an_agent_is_known_by_its_key_on_a_new_connection(controller, agents):
    """Its connection broke; it has a new one, and the controller answers there."""
    agents[0].socket.disconnect(controller.address)
    agents[0].socket.connect(controller.address)
    agents[0].status(phase="reducing")
    controller.wait(lambda: controller.rank(0)["phase"] == "reducing", "it is heard at once")
    assert len(controller.events("agent_registered")) == 2


def test_another_user_cannot_register_for_a_job(controller, agents, stranger):
    stranger.name = "another"
    stranger.register(user="root")
    answer = refused(stranger, *agents)
    assert answer.final and answer.reason == "job 7: nobody is not its owner ann"
    assert len(controller.events("agent_registered")) == 2


def test_a_job_is_whoever_s_credential_began_it(controller, stranger):
    """Whatever user the message names."""
    stranger.job = "8"
    stranger.register(user="ann")
    stranger.expect(wire.Welcome)
    assert controller.job("8")["user"] == "nobody"
    (event,) = controller.events("job_registered", job="8")
    assert event["uid"] == STRANGER


def test_a_credential_serves_once_and_for_one_connection(controller, realm, stranger):
    """Who hears one, or is given one for another purpose, cannot use it."""
    key = key_of(controller)
    true = ScriptedAgent(controller.address, 0, job="9", key=key)
    relayed: list[str] = []

    def overheard(text: str) -> str:
        relayed.append(realm.credential(text))
        return relayed[-1]

    true.credential = overheard
    try:
        true.register()
        true.expect(wire.Welcome)
        stranger.job, stranger.name = "9", true.name
        stranger.credential = lambda text: relayed[0]
        stranger.register()
        assert not (found := refused(stranger, true)).final and "used before" in found.reason
        stranger.credential = lambda text: realm.credential(claims.of_asker(stranger.key))
        stranger.register()
        assert "about something else" in refused(stranger, true).reason
        stranger.credential = lambda text: realm.credential(text.replace(stranger.key, true.key))
        stranger.register()
        assert "of another connection" in refused(stranger, true).reason
    finally:
        true.close()
    assert len(controller.events("agent_registered")) == 1


# ---------------------------------------------------------------- outages
def test_an_outage_of_munge_is_never_final(tmp_path):
    munge = Munged()
    controller = Controller(tmp_path, MUNGE, outside_slurm() | munge.environment)
    munge.stop()
    settings = munge.environment | {"UNICRON_MODE": "session", "UNICRON_REGISTER_TIMEOUT": "80"}
    job = Job(tmp_path, controller.address, "21", 1, ["sleep", "600"], **settings)
    try:
        time.sleep(2.0)  # it tries in vain meanwhile
        assert job.agents[0].alive and controller.alive
        munge.start()
        wait_for(lambda: "session mode" in job.agents[0].log, "the agent is taken in", now=lambda: job.agents[0].log)
    finally:
        job.close()
        controller.close()
        munge.close()


# ---------------------------------------------------------------- floods
def test_invented_identities_do_not_fill_the_disk(controller):
    context, key = zmq.Context(), key_of(controller)
    try:
        for number in range(300):
            with context.socket(zmq.DEALER) as peer:
                peer.setsockopt(zmq.LINGER, 2000)
                secure_client(peer, key)
                peer.connect(controller.address)
                peer.send(b"\xc1 %d" % number)
    finally:
        context.term()
    controller.wait(lambda: controller.events("bad_message"), "some are on record")
    time.sleep(1.0)
    assert len(controller.events("bad_message")) <= 100


def test_one_peer_cannot_keep_the_controller_busy(controller, agents):
    """Ten thousand orders at once; each would cost a look at its credential. The others are served meanwhile."""
    context, key = zmq.Context(), key_of(controller)
    peer = context.socket(zmq.DEALER)
    try:
        secure_client(peer, key)
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.SNDHWM, 0)
        peer.connect(controller.address)
        order = wire.Ask(what="inject", args={"job": "7", "fault": "rank-kill", "slot": 0}, credential="MUNGE:no:")
        for _ in range(10_000):
            peer.send(wire.encode(order))
        agents[0].status(phase="reducing")
        agents[1].status(phase="reducing")
        wait_for(lambda: "too many" in controller.log, "the flood is seen")
        deadline = time.monotonic() + 60.0
        while True:  # this address has used up its share, and gets it again
            try:
                assert is_alive(ask_controller({"kind": "ping"}, controller.address))
                break
            except UserError:
                assert time.monotonic() < deadline
        assert controller.rank(0)["phase"] == "reducing"
    finally:
        peer.close()
        context.term()


@contextlib.contextmanager
def invented_credentials(controller: Controller, addresses: int) -> Iterator[threading.Event]:
    """Questions with ever new credentials that are none, from so many addresses at once, as a stranger with so many
    nodes can send them. The event is set when the controller has taken as many as it does."""
    key, port = key_of(controller), controller.address.rpartition(":")[2]
    stop, full = threading.Event(), threading.Event()
    context = zmq.Context()

    def flood() -> None:
        peers = []
        for number in range(addresses):
            peer = context.socket(zmq.DEALER)
            secure_client(peer, key)
            peer.setsockopt(zmq.LINGER, 0)
            peer.connect(f"tcp://127.3.0.{1 + number}:0;127.0.0.1:{port}")
            peers.append(peer)
        while not stop.wait(0.005):
            for peer in peers:
                question = wire.Ask(what="status", user="x", credential=f"MUNGE:{os.urandom(40).hex()}:")
                with contextlib.suppress(zmq.Again):
                    peer.send(wire.encode(question), zmq.NOBLOCK)
                while peer.poll(0):
                    if "too much" in wire.decode(peer.recv(), wire.Answer).error:
                        full.set()
        for peer in peers:
            peer.close()

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    try:
        yield full
    finally:
        stop.set()
        thread.join(60.0)
        context.term()


def test_invented_credentials_of_many_addresses_keep_no_newcomer_waiting(controller):
    """Defect: all credentials waited in one line of 4,096. Registrations took up to 11 s, so jobs began unprotected,
    and root's questions were refused."""
    with invented_credentials(controller, 60) as full:
        wait_for(full.is_set, "as many credentials wait as may")
        time.sleep(1.0)
        newcomers = [
            ScriptedAgent(controller.address, element, job="8", key=key_of(controller)) for element in range(2)
        ]
        try:
            for newcomer in newcomers:
                newcomer.register()
                newcomer.expect(wire.Welcome, *newcomers, limit=float(REGISTER_TIMEOUT))
                assert is_alive(controller.ask("ping")), "root's questions find room"
            full.clear()
            wait_for(full.is_set, "as many wait still")
        finally:
            for newcomer in newcomers:
                newcomer.close()


class ShortOfFiles(Controller):
    """A unicrond that may open 300 files."""

    lent = False

    @property
    def command(self) -> list[str]:
        return ["prlimit", "--nofile=300:300", *super().command]


def test_idle_connections_do_not_keep_others_out(realm, tmp_path):
    """And a registered agent keeps its connection, whatever comes from the same address."""
    controller = ShortOfFiles(tmp_path, MUNGE, outside_slurm() | realm.environment)
    host, port = "127.0.0.1", int(controller.address.rpartition(":")[2])
    idle: list[socket.socket] = []
    agents = [ScriptedAgent(controller.address, element, key=key_of(controller)) for element in range(2)]
    closed: list[zmq.Socket[bytes]] = []
    try:
        closed += [agent.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) for agent in agents]
        form(agents)
        idle += [socket.create_connection((host, port)) for _ in range(400)]
        assert is_alive(controller.ask("ping"))
        assert len(os.listdir(f"/proc/{controller.process.pid}/fd")) < 300
        agents[0].status(phase="reducing")
        controller.wait(lambda: controller.rank(0)["phase"] == "reducing", "the agent is heard")
        assert not any(events.poll(0) for events in closed)
    finally:
        for one in (*idle, *closed, *agents):
            one.close()
        controller.close()
