"""How long the agent waits for forks of its zygote. The test has the zygote's end of the line, and the clock."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence

import pytest

from unicron_ctl.agent.ranks import zygote_client
from unicron_ctl.agent.ranks.zygote_client import Coming, ZygoteClient
from unicron_detector.processes.zygote import ANSWER_BYTES

ANSWER, HUNG = 2.0, 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Standing:
    """In place of the zygote's process."""

    pid = 4242

    def __init__(self, command: Sequence[str], environment: object, keep: Sequence[int]) -> None:
        self.line = socket.socket(fileno=os.dup(keep[0]))
        self.line.setblocking(False)
        self.stderr = os.open(os.devnull, os.O_RDONLY)
        self.signals: list[int] = []

    def requests(self) -> list[dict]:
        """What it has been asked for."""
        found = []
        while True:
            try:
                data, files, _, _ = socket.recv_fds(self.line, ANSWER_BYTES, 5)
            except BlockingIOError:
                return found
            for file in files:
                os.close(file)
            found.append(json.loads(data))

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def reap(self, seconds: float) -> int:
        return -9

    def close(self) -> None:
        self.line.close()
        os.close(self.stderr)


class Made:
    """A zygote, asked for ranks."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.comings = clock, []
        ways = (lambda descriptor, call: None), (lambda descriptor: None)
        self.zygote = ZygoteClient(["python"], ["script.py"], {}, [], [], *ways, ANSWER, HUNG)
        self.zygote.start_process()
        self.process = self.zygote._child
        self.process.line.recv(ANSWER_BYTES)  # its task

    def ask(self, count: int = 1) -> list[Coming]:
        asked = [self.zygote.request_fork({}) for _ in range(count)]
        self.comings += asked
        return asked

    def says(self, **message: object) -> None:
        """The zygote does."""
        self.process.line.send(json.dumps(message).encode())
        self.zygote.read()

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.zygote.on_timer(self.clock.now)

    @property
    def due(self) -> float:
        return self.zygote.timeout(self.clock.now)


@pytest.fixture
def made(monkeypatch) -> Iterator[Made]:
    clock = Clock()
    monkeypatch.setattr(zygote_client, "time", clock)
    monkeypatch.setattr(zygote_client, "Child", Standing)
    one = Made(clock)
    yield one
    one.zygote.close()
    for coming in one.comings:
        coming.drop()


@pytest.mark.parametrize("ready_before", [False, True])
def test_each_of_those_that_are_asked_for_together_has_its_time_after_the_one_before(made: Made, ready_before: bool):
    """Defect: two seconds for one fork were counted for all of a node's, and ten until a working one was killed."""
    if ready_before:
        made.says(ready=True)
    comings = made.ask(9)
    if not ready_before:
        made.wait(30.0)
        made.says(ready=True)
    for number in range(1, 10):
        made.wait(1.5)
        assert made.due == 0.5
        made.says(number=number, pid=1000 + number)
    assert [coming.pid for coming in comings] == list(range(1001, 1010)) and not any(coming.late for coming in comings)
    assert not made.process.signals and made.due == float("inf") and not made.zygote.why


def test_a_zygote_that_stops_answering_is_waited_for_no_longer_than_before(made: Made, snapshot):
    made.says(ready=True)
    one, *others = made.ask(3)
    made.wait(1.5)
    made.says(number=1, pid=1001)
    made.wait(1.5)
    assert one.pid == 1001 and made.due == 0.5 and not any(coming.settled for coming in others)
    made.wait(0.5)
    assert [coming.cold for coming in others] == snapshot
    assert made.zygote.request_fork({}) is None and made.due == HUNG - ANSWER
    made.wait(7.5)
    assert not made.process.signals
    made.wait(0.5)
    assert made.process.signals == [9]


def test_one_that_is_asked_for_later_has_its_time_from_then_on(made: Made):
    made.says(ready=True)
    made.ask()
    made.wait(0.5)
    made.says(number=1, pid=1001)
    made.wait(60.0)
    (coming,) = made.ask()
    made.wait(1.5)
    assert not coming.settled and made.due == 0.5
    made.wait(0.5)
    assert coming.late


def test_requests_say_when_and_those_that_go_together_say_the_same(made: Made):
    """So that one look at the files, which begins after that, is enough for them."""
    made.ask(2)
    made.wait(5.0)
    made.says(ready=True)
    made.wait(0.5)
    made.ask()
    assert [request["asked"] for request in made.process.requests()] == [105.0, 105.0, 105.5]


class Gone(Standing):
    """An interpreter that has ended before its agent had the next look."""

    def __init__(self, *about: object, **more: object) -> None:
        super().__init__(*about, **more)
        self.line.close()

    def tail(self) -> str:
        return "no module named encodings"


def test_an_interpreter_that_ends_before_it_has_its_task_is_one_that_died(made: Made, monkeypatch):
    """Defect: a broken pipe ended the agent."""
    made.zygote.close()
    monkeypatch.setattr(zygote_client, "Child", Gone)
    made.zygote.start_process()
    made.zygote.read()
    assert made.zygote.request_fork({}) is None and made.zygote.why.endswith("no module named encodings")
    assert made.due == zygote_client.REST_SECONDS, "it is tried again"
