"""A rank's line to its agent: the main thread sends by itself, and the thread receives, with the real ZeroMQ."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from unicron_detector.formats import RANKS
from unicron_detector.processes import rank_channel
from unicron_detector.processes.rank_channel import RankChannel
from unicron_detector.processes.rank_messages import FROM_RANK, Fault, Status, Step, ToRank, encode

LIMIT_MS = 30_000
MANY = 3_000  # more than ZeroMQ takes for an agent that is not there


class StubAgent:
    """The other end of the line."""

    def __init__(self, endpoint: str):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)

    def hear(self, milliseconds: int = LIMIT_MS) -> dict[str, Any]:
        """Return the next message."""
        assert self.socket.poll(milliseconds), "no message"
        self.sender, data = self.socket.recv_multipart()
        found: dict[str, Any] = msgpack.unpackb(data)
        return found

    def say(self, **fields: object) -> None:
        """Send the rank a message."""
        self.socket.send_multipart([self.sender, msgpack.packb(fields | {"v": RANKS.number})])

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/ranks"


@pytest.fixture
def heard() -> list[ToRank]:
    return []


@pytest.fixture
def channel(endpoint: str, heard: list[ToRank]) -> Iterator[RankChannel]:
    made = RankChannel(endpoint, 3, 1, heard.append)
    yield made
    made.close()


@pytest.fixture
def agent(endpoint: str) -> Iterator[StubAgent]:
    made = StubAgent(endpoint)
    yield made
    made.close()


def step(iteration: int) -> Step:
    return Step(1, iteration, [0], [0], 1, 0.5, 2.0, time.time())


def until(there: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_MS / 1000
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_step_goes_with_the_status_that_follows_it(agent: StubAgent, channel: RankChannel) -> None:
    channel.progress = lambda: None
    channel.send_with_status(step(4))
    channel.send(Status("running", iteration=5))
    found = agent.hear()
    assert (found["kind"], found["iteration"], found["slot"], found["incarnation"]) == ("step", 4, 3, 1)
    assert (found["status"]["state"], found["status"]["iteration"]) == ("running", 5)
    channel.send(Status("running", iteration=6))
    assert agent.hear()["kind"] == "rank"


def test_a_step_that_no_status_follows_goes_alone(agent: StubAgent, channel: RankChannel) -> None:
    channel.send_with_status(step(4))
    found = agent.hear()
    assert (found["kind"], found["iteration"], found["status"]) == ("step", 4, None)


def test_a_step_comes_before_the_fault_that_follows_it(agent: StubAgent, channel: RankChannel) -> None:
    channel.send_with_status(step(4))
    channel.send_with_status(step(5))
    channel.send(Fault("E", "text", 1.0))
    found = [agent.hear() for _ in range(3)]
    assert [(each["kind"], each.get("iteration")) for each in found] == [("step", 4), ("step", 5), ("fault", None)]


def test_of_several_steps_the_last_has_the_status(agent: StubAgent, channel: RankChannel) -> None:
    channel.send_with_status(step(4))
    channel.send_with_status(step(5))
    channel.send(Status("running", iteration=6))
    first, last = agent.hear(), agent.hear()
    assert first["status"] is None and last["status"]["iteration"] == 6


def test_the_main_thread_sends_without_the_other_one(
    agent: StubAgent, channel: RankChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel.send(Status("waiting"))
    agent.hear()
    woken: list[None] = []
    monkeypatch.setattr(channel, "_wake", lambda: woken.append(None))
    for number in range(50):
        channel.send(Status("running", iteration=number))
        assert agent.hear()["iteration"] == number
    assert len(woken) <= 5  # unless the thread has the lock just then


def test_messages_are_sent_while_the_thread_has_the_lock(agent: StubAgent, channel: RankChannel) -> None:
    with channel._lock:
        channel.send(Status("running", iteration=7))
    assert agent.hear()["iteration"] == 7


def test_nothing_is_lost_when_both_sides_send_at_once(
    agent: StubAgent, channel: RankChannel, heard: list[ToRank]
) -> None:
    channel.send(Status("waiting"))
    agent.hear()
    for number in range(MANY):
        agent.say(kind="withdraw", generation=number)
        channel.send(Status("running", iteration=number))
    assert [agent.hear()["iteration"] for _ in range(MANY)] == list(range(MANY))
    until(lambda: len(heard) == MANY)
    assert [message.generation for message in heard] == list(range(MANY))  # type: ignore[union-attr]


def test_what_no_agent_takes_waits_in_order(endpoint: str, channel: RankChannel) -> None:
    for number in range(MANY):
        channel.send(Status("running", iteration=number))  # never blocks
    assert not channel.flush(0.0)
    agent = StubAgent(endpoint)
    assert [agent.hear()["iteration"] for _ in range(MANY)] == list(range(MANY))
    assert channel.flush(LIMIT_MS / 1000)
    agent.close()


def test_progress_is_looked_up_only_while_the_main_thread_is_silent(agent: StubAgent, channel: RankChannel) -> None:
    channel.progress = lambda: Status("running", phase="reducing")
    channel.send(Status("running"))
    began = time.monotonic()
    assert agent.hear()["phase"] == "computing"
    assert agent.hear()["phase"] == "reducing"
    assert time.monotonic() - began >= rank_channel.PROGRESS_SECONDS / 2


def test_a_closed_channel_takes_messages_and_drops_them(agent: StubAgent, channel: RankChannel) -> None:
    channel.send_with_status(step(1))
    channel.send(Status("finished"))
    channel.close()
    assert agent.hear()["kind"] == "step"
    channel.send(Status("finished"))
    channel.close()


def test_no_field_of_a_message_takes_the_place_of_its_sender():
    head = msgpack.unpackb(encode(Fault("E", "", 0.0), 3, 1)).keys() - {each.name for each in dataclasses.fields(Fault)}
    assert head == {"v", "kind", "slot", "incarnation", "pid"}
    assert not any(each.name in head for kind in FROM_RANK.values() for each in dataclasses.fields(kind))
