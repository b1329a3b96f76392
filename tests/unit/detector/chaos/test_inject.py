"""The rank's side of fault injection; what would end or stop a process does so in one of its own."""

from __future__ import annotations

import errno
import os

import pytest

from unicron_detector.chaos import memory_cage
from unicron_detector.chaos.inject import EXCEPTIONS, FAULTS, InjectError, Injector, duration, parse
from unicron_detector.failures.classify import default_classifier

EXPECTED = {
    "python": ("application", 2),
    "cuda": ("unknown", 2),
    "cuda-oom": ("application", 2),
    "ecc": ("hardware", 1),
    "nccl": ("network", 2),
    "connection-reset": ("network", 2),
    "file-system": ("storage", 2),
    "disk-full": ("storage", 2),
}


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_an_injected_exception_is_what_the_table_takes_it_for(kind):
    """An exception ends the process, so it is never milder than SEV2."""
    error, text = EXCEPTIONS[kind]
    verdict = default_classifier().exit(1, f"{error.__name__}: {text}")
    assert (verdict.scope, int(verdict.severity)) == EXPECTED[kind], verdict


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("", "no fault is called ''"),
        ("typo", "use one of rank-kill, exception"),
        ("exception", "exception:cuda"),
        ("exception:typo", "exception:ecc"),
        ("slow", "write a factor above 1"),
        ("slow:0.5", "write a factor above 1"),
        ("slow:nan", "write a factor above 1"),
        ("rank-kill:9", "write rank-kill"),
        ("full-disk:2", "write full-disk"),
        ("flip", "use one of flip:forward"),
        ("flip:card", "use one of flip:forward"),
        ("flip:forward:64", "a bit from 0 (the lowest) to 63"),
        ("flip:forward:-1", "a bit from 0"),
        ("flip:forward:3:twice", "a bit from 0"),
        ("flip:forward:once:3", "a bit from 0"),
        ("nan:file", "use one of nan:forward"),
        ("nan:forward:3", "write nan:forward"),
    ],
)
def test_wrong_faults_say_what_is_right(fault, says):
    with pytest.raises(InjectError, match=None) as caught:
        parse(fault)
    assert says in str(caught.value)


def test_every_fault_can_be_named():
    details = {"exception": ":ecc", "slow": ":2", "flip": ":wire:3:once", "nan": ":forward"}
    assert [parse(name + details.get(name, ""))[0] for name in FAULTS] == list(FAULTS)


def test_an_exception_strikes_once_at_the_next_micro_batch():
    injector = Injector()
    injector.point()
    injector.on_order({"kind": "inject", "fault": "exception:connection-reset"})
    with pytest.raises(ConnectionResetError, match="Connection reset by peer"):
        injector.point()
    injector.point()


def test_a_slow_rank_takes_so_many_times_as_long_for_a_while():
    slept, now = [], [100.0]
    injector = Injector(clock=lambda: now[0], sleep=slept.append)
    injector.slow_down(0.2)
    injector.on_order({"fault": "slow:2.5", "seconds": 10.0})
    injector.slow_down(0.2)
    now[0] = 110.5
    injector.slow_down(0.2)
    assert slept == [pytest.approx(0.3)]


def test_a_lost_network_breaks_the_connections():
    injector, broken = Injector(), []
    injector.break_connections = lambda: broken.append(1)
    injector.on_order({"fault": "lost-network"})
    assert broken == [1]


def test_a_full_disk_is_the_kernels_own_error():
    injector = Injector()
    injector.on_order({"fault": "full-disk"})
    with pytest.raises(OSError, match="No space left on device") as caught:
        injector.point()
    assert caught.value.errno == errno.ENOSPC
    assert default_classifier().text(f"OSError: {caught.value}").cause == "disk_full"
    injector.point()


def test_a_corrupted_checkpoint_is_sent_once_for_every_order():
    injector = Injector()
    assert not injector.spoils_transfer()
    injector.on_order({"fault": "corrupt-checkpoint"})
    injector.on_order({"fault": "corrupt-checkpoint"})
    assert [injector.spoils_transfer() for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        ("flip:forward", 60.0),
        ("flip:wire:3", 60.0),
        ("flip:gradient:once", 0.0),
        ("flip:weight:63", 0.0),
        ("flip:file", 0.0),
        ("nan:forward", 0.0),
        ("rank-kill", 0.0),
    ],
)
def test_a_defective_unit_lasts_and_what_strikes_once_takes_no_time(fault, seconds):
    assert duration(fault, 0.0) == seconds
    assert duration(fault, 5.0) == (5.0 if seconds or fault == "rank-kill" else 0.0)


def test_a_silent_fault_is_due_until_its_time_is_over_or_until_it_has_struck():
    now = [100.0]
    injector = Injector(clock=lambda: now[0])
    assert injector.flip_due("wire") is None
    injector.on_order({"fault": "flip:wire", "seconds": 10.0})
    injector.on_order({"fault": "flip:weight:3"})
    unit = injector.flip_due("wire")
    injector.flip_done(unit)
    assert injector.flip_due("wire") is unit and 0 <= unit.bit_of(16) == unit.bit_of(16) < 16
    now[0] = 110.5
    assert injector.flip_due("wire") is None
    injector.flip_done(injector.flip_due("weight"))
    assert injector.flip_due("weight") is None


def test_without_a_memory_cgroup_there_is_no_cage(monkeypatch):
    monkeypatch.setattr(memory_cage, "counter_file", lambda: None)
    with pytest.raises(memory_cage.CageError, match="no memory cgroup"):
        memory_cage.Cage(os.getpid())
