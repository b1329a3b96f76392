"""Real agents and ranks whose controller is away: they go on without it when a rank dies."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.jobs import FOREVER, World
from tests.support.processes import wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
NODES, RANKS = 3, {"TINY_ITERATIONS": FOREVER, "TINY_SLOW": "0.02"}


class Relay:
    """Stands between agents and controller; while it holds, nothing passes and no connection ends, as when all packets
    are dropped."""

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


def generations(world: World, slot: int) -> set[int]:
    """In which the rank has taken steps."""
    return {step["generation"] for step in world.array.losses(slot)}


def go_on(world: World, slots: tuple[int, ...], generation: int) -> None:
    """Wait until these train in that generation."""
    wait_for(
        lambda: all(generation in generations(world, slot) for slot in slots),
        lambda: f"slots {slots} train in generation {generation}\n{world.array.logs}",
    )


@pytest.fixture
def world(tmp_path):
    """The agents come with the test, once it has put its relay in between."""
    started = World(tmp_path, 0, **RANKS | {"SLURM_ARRAY_TASK_COUNT": str(NODES)})
    yield started
    started.close()


@pytest.fixture
def relay(world):
    made = Relay(world.address)
    yield made
    made.close()


@pytest.mark.parametrize("how", ["stopped", "killed", "all packets dropped"])
def test_a_rank_dies_while_the_controller_is_away(world, relay, how):
    """The others go on with the iteration; the agent of the first one, whose rank it is or is not, decides."""
    world.array.environment["UNICRON_CONTROLLER"] = relay.address
    for element in range(NODES):
        world.start_agent(element)
    world.trains_on(range(NODES), limit=240)
    first = world.job()["generation"]
    pids = {slot: world.rank(slot)["pid"] for slot in range(NODES)}
    with away(world, how, relay):
        for number, (victim, rest) in enumerate(((1, (0, 2)), (0, (2,))), start=1):
            os.kill(pids[victim], signal.SIGKILL)
            go_on(world, rest, first + number)
            said = world.array.agents[2].log
            assert "agents while the controller was away" in said and f"generation {first + number}: " in said
        steps = world.array.losses(2)
        assert [step["iteration"] for step in steps] == list(range(len(steps))), "no iteration is lost or taken twice"


def test_the_controller_decides_while_it_is_there(world):
    for element in range(NODES):
        world.start_agent(element)
    world.trains_on(range(NODES), limit=240)
    os.kill(world.rank(1)["pid"], signal.SIGKILL)
    world.wait(lambda: world.events("break"), "the controller breaks the generation")
    world.trains_on(range(NODES), limit=240)
    assert "while the controller was away" not in world.array.logs
