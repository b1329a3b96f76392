"""The watchdog of plain programs: the kernel ends them, whoever is stopped. Real processes, the kernel's own timer."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.support.processes import wait_for
from unicron_ctl.agent.connections.connections import Polling
from unicron_ctl.agent.connections.containment import Containment
from unicron_ctl.agent.ranks.fence import NO_WATCHDOG, Fence, Watchdog, clock

pytestmark = pytest.mark.process


@pytest.fixture
def dog() -> Iterator[Watchdog]:
    made = Watchdog()
    wait_for(lambda: settled(made), "its timer works")
    yield made
    made.close()


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own."""
    with subprocess.Popen(["sleep", "600"], process_group=0) as made:
        yield made
        made.kill()


def settled(dog: Watchdog) -> bool:
    dog.read_answers()
    return dog.settled


def stop(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def killed(rank: subprocess.Popen[bytes]) -> bool:
    return rank.poll() == -signal.SIGKILL


def test_a_lease_that_is_renewed_ends_nothing(dog: Watchdog, rank: subprocess.Popen[bytes]) -> None:
    assert dog.tie([rank.pid])
    for _ in range(10):
        dog.set_end(clock() + 30.0)
        time.sleep(0.05)
        assert rank.poll() is None
    assert not dog.child.ended()


def test_it_ends_processes_that_are_stopped_and_is_stopped_itself(dog: Watchdog, rank: subprocess.Popen[bytes]) -> None:
    """As after `scontrol suspend`: nobody of the step runs again before they are dead."""
    assert dog.tie([rank.pid])
    until = clock() + 5.0
    dog.set_end(until)
    wait_for(lambda: settled(dog), "its timer is set")
    stop(dog.child.pid, rank.pid)
    wait_for(lambda: killed(rank), "the kernel has killed it")
    assert clock() >= until


def test_its_own_end_is_theirs(dog: Watchdog, rank: subprocess.Popen[bytes]) -> None:
    assert dog.tie([rank.pid])
    stop(rank.pid)
    os.kill(dog.child.pid, signal.SIGKILL)
    wait_for(lambda: killed(rank), "the kernel has killed it")
    with subprocess.Popen(["sleep", "600"], process_group=0) as later:
        assert not dog.tie([later.pid]), "who is tied too late is said to be"
        later.kill()


def test_who_is_let_go_lives_on_and_an_order_in_the_past_counts_at_once(
    dog: Watchdog, rank: subprocess.Popen[bytes]
) -> None:
    with subprocess.Popen(["sleep", "600"], process_group=0) as other:
        assert dog.tie([rank.pid, other.pid]) and dog.tie([other.pid])
        dog.set_end(clock() - 100.0)
        wait_for(lambda: killed(other), "the kernel has killed it")
    assert rank.poll() is None
    assert dog.tie([]), "nobody is left"


def test_the_controller_may_count_on_a_lease_only_when_the_kernel_knows_of_it(
    rank: subprocess.Popen[bytes],
) -> None:
    """Defect: it did so as soon as the watchdog ran, also if that was stopped before it had taken the order."""
    fence = Fence(Polling(Containment(print)))
    fence.begin_world(["127.0.0.1:1"])
    try:
        wait_for(lambda: fence.check_lease(False, False, []) or fence.pid, "it starts")
        wait_for(lambda: fence.check_lease(False, False, []) or fence._dog.ready, "its timer works")  # type: ignore[union-attr]
        assert fence.pid is not None
        stop(fence.pid)
        fence.lease.on_controller(clock())
        fence.lease.on_doors(1, clock())
        assert fence.lease.armed and not fence.check_lease(False, False, [rank.pid])
        assert not fence.holds, "the order is on its way"
        os.kill(fence.pid, signal.SIGCONT)
        wait_for(lambda: fence.check_lease(False, False, [rank.pid]) or fence.holds, "it has taken the order")
        stop(fence.pid)
        fence.lease.on_controller(clock())
        fence.check_lease(False, False, [rank.pid])
        assert fence.holds, "the order before this one ends the processes, though too early"
        assert not fence.ended
        os.kill(fence.pid, signal.SIGKILL)
        wait_for(lambda: fence.ended == NO_WATCHDOG, "whoever finds the rank dead knows why, before the next look")
        assert fence.check_lease(False, False, [rank.pid]) == fence.ended == NO_WATCHDOG
        fence.begin_world(["127.0.0.1:1"])
        assert not fence.ended
    finally:
        fence.close()
