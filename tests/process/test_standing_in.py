"""Real agents and ranks whose controller is away: they go on without it when a rank dies."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.jobs import FOREVER, TINY_PLAIN, World
from tests.support.processes import wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
NODES, RANKS = 3, {"TINY_ITERATIONS": FOREVER, "TINY_SLOW": "0.02"}


class Relay:
    """Stands between agents and controller; while it holds, nothing passes and no connection ends, as when all packets
    are dropped. It passes no datagrams: agents have to know that the controller encrypts nothing."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._port = int(port)
        self._open = threading.Event()
        self._open.set()
        self._loop = asyncio.new_event_loop()
        server = self._loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.address = "tcp://{}:{}".format(*server.sockets[0].getsockname())
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            other_reader, other_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:  # nobody listens there
            writer.close()
            return
        await asyncio.gather(self._pass(reader, other_writer), self._pass(other_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                while not self._open.is_set():
                    await asyncio.sleep(0.01)
                writer.write(data)
        except OSError:
            pass
        writer.close()

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def close(self) -> None:
        async def end() -> None:
            others = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            self._loop.call_soon(self._loop.stop)

        asyncio.run_coroutine_threadsafe(end(), self._loop)
        self._thread.join()
        self._loop.close()


@contextmanager
def away(world: World, how: str, relay: Relay) -> Iterator[None]:
    if how == "stopped":
        world.process.send_signal(signal.SIGSTOP)
    elif how == "killed":
        world.kill()
    else:
        relay.hold()
    try:
        yield
    finally:
        if how == "stopped":
            world.process.send_signal(signal.SIGCONT)
        relay.release()


def generations(world: World, slot: int) -> set[int]:
    """In which the rank has taken steps."""
    return {step["generation"] for step in world.array.losses(slot)}


def go_on(world: World, slots: list[int], generation: int) -> None:
    """Wait until these train in that generation."""
    wait_for(
        lambda: all(generation in generations(world, slot) for slot in slots),
        lambda: f"slots {slots} train in generation {generation}\n{world.array.logs}",
    )


@pytest.fixture
def world(tmp_path):
    """The agents come with the test, once it has put its relay in between."""
    settings = RANKS | {"SLURM_ARRAY_TASK_COUNT": str(NODES), "UNICRON_PUBLIC_KEY": "none"}
    started = World(tmp_path, 0, command=TINY_PLAIN, **settings)
    yield started
    started.close()


@pytest.fixture
def relay(world):
    made = Relay(world.address)
    yield made
    made.close()


def test_ranks_die_while_the_controller_is_away(world, relay):
    """The others go on with the iteration, whoever of them leads; the controller, when it is back, adopts what they
    agreed on and brings the dead rank back. One job, one after the other: each start of a rank costs seconds."""
    world.array.environment["UNICRON_CONTROLLER"] = relay.address
    for element in range(NODES):
        world.start_agent(element)
    for how, victims in (("stopped", (1,)), ("all packets dropped", (0,)), ("killed", (1, 0))):
        world.trains_on(range(NODES), limit=240)
        generation, rest = world.job()["generation"], set(range(NODES))
        pids = {slot: world.rank(slot)["pid"] for slot in range(NODES)}
        with away(world, how, relay):
            for victim in victims:
                generation += 1
                rest.remove(victim)
                os.kill(pids[victim], signal.SIGKILL)
                go_on(world, sorted(rest), generation)
                said = world.array.agents[2].log
                assert "agents while the controller was away" in said and f"generation {generation}: " in said
    steps = world.array.losses(2)
    assert [step["iteration"] for step in steps] == list(range(len(steps))), "no iteration is lost or taken twice"
