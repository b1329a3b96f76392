"""Whoever reaches the controller's port may send what he likes: what it holds in memory is bounded, it never ends, and
whoever else asks is answered meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.controller import COMMAND, Controller, is_alive
from tests.support.processes import call
from tests.support.stranger import MORE, Stranger, framed, resident
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.protocol.client import ask_controller
from unicron_ctl.shared.protocol.encryption import make_key
from unicron_ctl.shared.protocol.wire import MAX_BYTES

pytestmark = pytest.mark.process
MOST_GROWTH = 150  # MiB
SECONDS, AT_MOST = 3.0, 60.0  # of one attack: enough for more than a gigabyte where nothing bounds it
CONNECTIONS = 300


class Attacked(Controller):
    """A controller in a process of its own, with a key or without."""

    def __init__(self, folder: Path, encrypted: bool) -> None:
        self.key, settings = "", ""
        if encrypted:
            settings = call(*COMMAND, "--make-key", "--state-dir", folder / "state").stdout
            self.key = make_key(folder / "state")
        super().__init__(folder, settings)

    def stranger(self, identity: bytes = b"", until: str = "ready") -> Stranger:
        return Stranger(self.address, self.key, identity, until)


@pytest.fixture(params=[pytest.param(True, id="encrypted"), pytest.param(False, id="plain", marks=pytest.mark.wide)])
def controller(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attacked]:
    started = Attacked(tmp_path, request.param)
    if started.key:
        monkeypatch.setenv("UNICRON_PUBLIC_KEY", started.key)
    yield started
    started.close()


def attacked(
    controller: Attacked, attack: Callable[[], None], workers: int = 1, enough: Callable[[], bool] = lambda: True
) -> int:
    """MiB by which the controller grows at most while `attack` runs again and again; it answers all the time."""
    before = most = resident(controller.process.pid)
    until, last = (time.monotonic() + seconds for seconds in (SECONDS, AT_MOST))

    def goes_on() -> bool:
        return time.monotonic() < until or (not enough() and time.monotonic() < last)

    def work() -> None:
        while goes_on():
            with contextlib.suppress(OSError):
                attack()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    asked = time.monotonic()
    while goes_on():
        most = max(most, resident(controller.process.pid))
        time.sleep(0.02)
        if time.monotonic() - asked > 1.0:
            assert is_alive(ask_controller({"kind": "ping"}, controller.address, timeout=20.0))
            asked = time.monotonic()
    for thread in threads:
        thread.join(30.0)
    assert controller.alive, controller.log[-3000:]
    assert is_alive(ask_controller({"kind": "ping"}, controller.address, timeout=20.0))
    return most - before


def frames_without_end(controller: Attacked, size: int) -> Callable[[], None]:
    """A message of which no frame is the last one."""

    def attack() -> None:
        stranger, sent = controller.stranger(), 0
        try:
            while sent < 1 << 30:
                many = b"".join(stranger.frame(bytes(size), MORE) for _ in range(max(1, (1 << 19) // (size + 32))))
                stranger.socket.sendall(many)
                sent += len(many)
        finally:
            stranger.close()

    return attack


@pytest.mark.parametrize("size", [1000, *(pytest.param(size, marks=pytest.mark.wide) for size in (0, 1 << 20))])
def test_a_message_of_endless_frames_is_not_held(controller: Attacked, size: int) -> None:
    assert attacked(controller, frames_without_end(controller, size)) < MOST_GROWTH
    assert "more than one frame" in controller.log, "it is said once why the connection was closed"
    assert controller.log.count("more than one frame") == 1


@pytest.mark.parametrize("until", ["ready", "greeting"])
def test_messages_that_are_never_complete_are_held_up_to_a_bound(controller: Attacked, until: str) -> None:
    """Of very many connections, in the handshake and before it, too."""
    held: list[Stranger] = []

    def attack() -> None:
        if len(held) >= CONNECTIONS:
            time.sleep(0.1)
            return
        one = controller.stranger(until=until)
        held.append(one)
        one.socket.sendall(framed(0, bytes(MAX_BYTES - 64))[:-1])

    try:
        grown = attacked(controller, attack, 4, lambda: len(held) * MAX_BYTES >> 20 > 2 * MOST_GROWTH)
        assert len(held) * MAX_BYTES >> 20 > 2 * MOST_GROWTH, "there was an attack"
        assert grown < MOST_GROWTH
    finally:
        for one in held:
            one.close()


def test_answers_that_nobody_reads_are_held_up_to_a_bound(controller: Attacked) -> None:
    question = wire.encode(wire.Ask(what="x" * 19_000))
    held: list[Stranger] = []

    def attack() -> None:
        one = controller.stranger()
        held.append(one)
        one.socket.settimeout(1.0)
        for _ in range(2000):
            one.send(question)

    try:
        assert attacked(controller, attack, workers=4) < MOST_GROWTH
    finally:
        for one in held:
            one.close()


def test_nobody_is_called_what_another_will_be_called(controller: Attacked) -> None:
    """Defect: libzmq numbers its connections from a number that is the same in each process, takes a peer at its own
    name, and ended its process where both were the same."""
    held = []
    first = 1804289383  # rand() of the C library, never seeded
    for base in (first, first + 846930886, 846930886, 1681692777):
        for number in range(base, base + 40):
            held.append(controller.stranger(identity=b"\0" + (number % 2**32).to_bytes(4, "big")))
            held[-1].send(wire.encode(wire.Ask(what="ping")))
    for _ in range(20):
        held.append(controller.stranger())
        held[-1].send(wire.encode(wire.Ask(what="ping")))
        assert held[-1].frame_in()
    assert controller.alive and is_alive(ask_controller({"kind": "ping"}, controller.address))
    for one in held:
        one.close()
