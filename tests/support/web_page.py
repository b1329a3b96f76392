"""The page of `unicronctl web`, served over a controller's core without processes."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.questions import told
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.api.answers import Unanswerable
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.model.job_state import Phase
from unicron_ctl.shared.log.store import Store
from unicron_ctl.shared.protocol.audience import Viewer
from unicron_ctl.shared.system.errors import UserError
from unicron_ctl.web.page import Page
from unicron_ctl.web.page_server import HALF, Server
from unicron_ctl.web.page_sessions import Sessions
from unicron_ctl.web.page_source import Source

ROOT = Asker(0, "root", admin=True)
HOSTILE = "<img src=x onerror=document.title='taken'>"


def busy_world(nodes: int, jobs: int, ranks: int, names: Sequence[str] = ("llama", f"moe {HOSTILE}", "vit")) -> World:
    """Jobs of several users on most nodes; a drained node and one that is down. names: of the first jobs."""
    slurm = FakeSlurm(nodes)
    slurm.node_states["n5"], slurm.reasons["n5"] = {"IDLE", "DRAIN"}, "memory test"
    slurm.node_states["n7"], slurm.reasons["n7"] = {"DOWN"}, "power supply"
    world = World(slurm)
    share = (nodes - 2) * 4 // 5 // jobs
    names = [*names, *(f"ablation-{number}" for number in range(len(names) + 1, jobs + 1))]
    for number in range(jobs):
        job, user = str(4200 + number), ("ann", "bob", "eve")[number % 3]
        slurm.submit(job, share, uid=1000 + number % 3, user=user, name=names[number])
        for (label, element), entry in sorted(slurm.queue.items()):
            if label == job and entry["node"]:
                agent = FakeAgent(world, job, element, entry["node"], ranks, nodes=share)
                agent.settings.name = names[number]
                agent.register()
                agent.ready()
    slurm.submit("4300", 4, uid=1002, user="eve", name="notebooks")
    train(world, 3)
    return world


def train(world: World, iterations: int) -> None:
    """All jobs train, with all their ranks."""
    until = world.now + 60.0
    while any(job.phase is not Phase.RUNNING for job in world.core.state.jobs.values()):
        assert world.now < until, {name: job.phase for name, job in world.core.state.jobs.items()}
        for agent in world.agents:
            agent.take_offer()
        world.run(0.5)
    for _ in range(iterations):
        for name in world.core.state.jobs:
            world.iterate(name, world.iteration(name))
        world.run(0.5)


def hurt(world: World, job: str, element: int, line: str, iterations: int = 3) -> None:
    """A rank dies, and its job goes on, by so many iterations."""
    agent = next(agent for agent in world.agents if agent.job == job and agent.element == element)
    agent.die(agent.slots[0], 1, last_line=line)
    world.run(1.0)
    agent.ready()
    train(world, iterations)


class Site:
    """A page at a port of its own. asked: what the controller was asked. asker: as whom the page asks. viewers: where
    there are several users. close() ends it."""

    def __init__(self, world: World, folder: Path, viewers: bool = True, asker: Asker = ROOT) -> None:
        self.world, self.asker = world, asker
        self.asked: list[str] = []
        self.down = ""  # why the controller does not answer
        self.store = Store(folder / "events.sqlite")
        self.store.append(world.log + world.core.events)
        self.server = Server("127.0.0.1", 0, lambda origins: self._page(origins, viewers), [])
        self._thread = threading.Thread(target=self.server.serve)
        self._thread.start()

    def _page(self, origins: Collection[str], viewers: bool) -> Page:
        return Page(Source(self.ask), Sessions(origins) if viewers else None)

    def begin_anew(self) -> None:
        """As if the page had just been started."""
        self.asked.clear()
        self.down = ""
        self.server.page = self._page(self.server.origins, self.server.page.sessions is not None)

    def ask(self, question: Mapping[str, Any]) -> Any:
        """What the controller answers the page."""
        self.asked.append(question["kind"])
        if self.down:
            raise UserError(self.down)
        arguments = {name: value for name, value in question.items() if name != "kind"}
        try:
            return told(self.world.core, question["kind"], self.asker, self.store, **arguments)
        except Unanswerable as error:
            raise UserError(str(error)) from None

    def token(self, viewer: Viewer, monkeypatch: Any) -> str:
        """The token of a session of this user's, without munge."""
        sessions = self.server.page.sessions
        assert sessions is not None
        with monkeypatch.context() as patch:
            patch.setattr(sessions, "_viewer", lambda credential: viewer)
            return sessions.open_session("")[0]

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def get(self, path: str, token: str = "", **headers: str) -> tuple[int, Any, Mapping[str, str]]:
        """HTTP's status, the answer (JSON as data), and its headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=20)
        try:
            halves = token.split(".")
            cookie = {"Cookie": f"unicron{self.server.port}={halves[0]}", HALF: halves[-1]} if token else {}
            connection.request("GET", path, headers={**cookie, **headers})
            answer = connection.getresponse()
            data = answer.read()
            is_json = data and answer.headers["Content-Type"] == "application/json"
            return answer.status, json.loads(data) if is_json else data, answer.headers
        finally:
            connection.close()

    def close(self) -> None:
        self.server.stop()
        self._thread.join(10)
        self.server.server_close()
        self.store.close()
