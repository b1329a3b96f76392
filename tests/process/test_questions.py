"""Questions in a flood, and registrations, over real connections: the controller's loop turns, and a Break goes out."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.support.processes import wait_for
from tests.support.scripted import ScriptedAgent, form
from unicron_ctl.controller.api import answers
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.server import credentials
from unicron_ctl.controller.server.server import Server
from unicron_ctl.controller.server.sockets import bind
from unicron_ctl.shared.log.store import Store
from unicron_ctl.shared.protocol import structs, wire
from unicron_ctl.shared.protocol.encryption import new_pair
from unicron_ctl.shared.settings.config import Config, ControllerConfig
from unicron_detector.failures.classify import Classifier

pytestmark = pytest.mark.process
ANSWER_SECONDS = 0.01  # of one answer: some 1,000 nodes, or a job of 16,384 ranks
QUESTIONS = 250  # of each address, in one moment
# Answers, or messages, between two turns of the loop, and before a Break: a busy machine makes them fewer. With nothing
# else to do they are 9 and 2. They were all of them.
MOST_IN_A_TURN, MOST_BEFORE_BREAK = 60, 60


class Running:
    """A controller in a thread of this process. Munge is a stub: a credential is the name of who made it."""

    def __init__(self, folder: Path) -> None:
        self.turns = 0
        self.server: Server | None = None
        self._thread = threading.Thread(target=self._run, args=(folder,), daemon=True)
        self._thread.start()
        wait_for(lambda: self.turns, "its loop turns")
        assert self.server is not None
        self.key = self.server.key
        self.port = self.server.address.rpartition(":")[2]
        self.address = f"tcp://127.0.0.1:{self.port}"

    def _run(self, folder: Path) -> None:
        config = Config(controller=ControllerConfig(auth="munge", slurm="none"))
        self.server = server = Server(config, Store(folder / "e.sqlite"), bind("tcp://127.0.0.1:0"), None, Classifier())
        server.watchdog = lambda now: setattr(self, "turns", self.turns + 1)
        server.run()
        server.close()

    def close(self) -> None:
        assert self.server is not None
        self.server.stop()
        self._thread.join(30.0)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    users = {"ann": 1001, "mallory": 1000}
    monkeypatch.setattr(
        credentials, "asker_of", lambda credential, claim, roles: Asker(users.get(credential, 0), credential)
    )
    started = Running(tmp_path)
    yield started
    started.close()


def dealers(running: Running, context: zmq.Context[zmq.Socket[bytes]], count: int) -> list[zmq.Socket[bytes]]:
    """Each at an address of its own."""
    made: list[zmq.Socket[bytes]] = []
    for number in range(count):
        dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        public, secret = new_pair()
        dealer.curve_publickey, dealer.curve_secretkey = public.encode(), secret.encode()
        dealer.curve_serverkey = running.key.encode()
        dealer.connect(f"tcp://127.0.0.{number + 2}:0;127.0.0.1:{running.port}")
        made.append(dealer)
    return made


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.mark.parametrize("credential", ["mallory", ""])
def test_an_asking_user_delays_no_break(
    running: Running, context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch, credential: str
) -> None:
    """Defect: answers had no limit of time, and a user had a bucket at each address: 10 s without a turn."""
    answered = list[int]()  # in which turn of the loop

    def slow(*given: Any) -> dict[str, Any]:
        answered.append(running.turns)
        time.sleep(ANSWER_SECONDS)
        return {}

    monkeypatch.setattr(answers, "answer", slow)
    agents = [
        ScriptedAgent(running.address, element, key=running.key, credential=lambda text: "ann") for element in range(2)
    ]
    form(agents)
    flood = dealers(running, context, 12)
    question = wire.encode(wire.Ask(what="events", credential=credential, user="mallory"))
    began = time.monotonic()
    for dealer in flood:
        for _ in range(QUESTIONS):
            dealer.send(question)
    wait_for(lambda: answered, "they are being answered")
    agents[0].status(state="exited", generation=1, exit=structs.Exit(code=-9, at=time.time(), lived=100.0))
    told = len(answered)
    agents[1].expect(wire.Break, agents[0])
    before = len(answered) - told
    while time.monotonic() - began < 3.0:
        for agent in agents:
            agent.turn()
        time.sleep(0.01)
    seconds = time.monotonic() - began
    most = max(Counter(answered).values())
    print(f"{len(answered)} answered in {seconds:.1f} s; at most {most} in a turn; {before} before the Break")
    assert most <= MOST_IN_A_TURN and before <= MOST_BEFORE_BREAK
    assert len(answered) < 0.7 * seconds / ANSWER_SECONDS, "answers leave the controller time"
    for agent in agents:
        agent.close()


def test_agents_that_come_all_at_once_do_not_stop_the_loop(
    running: Running, context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs the controller some time, as a large job's do."""
    assert running.server is not None
    core, taken = running.server.core, list[int]()
    receive: Callable[..., None] = core.receive

    def slow(*given: Any) -> None:
        taken.append(running.turns)
        time.sleep(0.002)
        receive(*given)

    monkeypatch.setattr(core, "receive", slow)
    settings = structs.Settings(name="gpt", user="ann", max_nodes=256)
    channels = dealers(running, context, 64)
    for element in range(256):
        message = wire.Register(
            job="7",
            element=element,
            agent=f"agent{element}",
            node=f"n{element}",
            address="127.0.0.1",
            slots=[element],
            settings=settings,
            credential="ann",
        )
        channels[element % 64].send(wire.encode(message))
    wait_for(lambda: len(taken) >= 256, "all are taken in")
    most = max(Counter(taken).values())
    print(f"at most {most} in a turn")
    assert most <= MOST_IN_A_TURN
