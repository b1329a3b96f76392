"""The abort of NCCL communicators: all of them at once, each once, those inside the replica only on demand.

Stand-ins replace torch's groups, because this machine's torch has no NCCL. They have torch's interface of 2.11 to 2.13.
"""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.support.processes import wait_for
from unicron_transition.seams.nccl import MAKING, SETTINGS, Aborter, keep_torch_from_aborting

LIMIT = 30.0


class Group:
    """A process group of NCCL; all share `calls`. until: its abort does not end before."""

    def __init__(self, name: str, calls: list[str], made: bool = True, fails: bool = False):
        self.name, self.calls, self.made, self.fails = name, calls, made, fails
        self.until = lambda: None

    def _get_backend(self, device):
        return SimpleNamespace(_is_initialized=lambda: self.made)

    def abort(self):
        self.calls.append(self.name)
        self.until()
        if self.fails:
            raise RuntimeError("the communicator is gone")


@pytest.fixture
def calls():
    return []


@pytest.fixture
def groups(monkeypatch, calls):
    """world, data and tensor, of which the last is inside the replica, and one of gloo."""
    made = {name: Group(name, calls) for name in ("world", "data", "tensor", "gloo")}
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo" if group.name == "gloo" else "nccl")
    names = {group: str(number) for number, group in enumerate(made.values())}
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_names=names))
    return made


def test_all_are_aborted_at_once_and_each_once(groups, calls):
    """Defect: aborted one after the other, the first waited for ever for the kernels of the next."""
    together = threading.Barrier(3)
    for name in ("world", "data", "tensor"):
        groups[name].until = lambda: together.wait(LIMIT)
    aborter = Aborter()
    over = 0

    def all_over() -> bool:
        nonlocal over
        over += aborter.abort(True)
        return over == 3

    wait_for(all_over, "all are aborted")
    assert sorted(calls) == ["data", "tensor", "world"] and not together.broken
    assert aborter.abort(True) == 0 and len(calls) == 3


def test_those_inside_a_healthy_replica_are_left_alone(groups, calls):
    aborter = Aborter()
    aborter.inside.add(groups["tensor"])
    assert aborter.abort(False) == 2 and "tensor" not in calls
    assert aborter.abort(True) == 1 and calls[-1] == "tensor"


def test_one_that_fails_does_not_spare_the_others(groups, calls):
    groups["data"].fails = True
    assert Aborter().abort(True) == 3 and sorted(calls) == ["data", "tensor", "world"]


def test_one_that_takes_long_keeps_nobody_and_is_not_begun_again(groups, calls):
    """torch holds a communicator's lock while it is being made."""
    goes_on = threading.Event()
    groups["data"].until = lambda: goes_on.wait(LIMIT)
    aborter = Aborter()
    began = time.monotonic()
    assert aborter.abort(True) == 2 and aborter.abort(True) == 0
    assert time.monotonic() - began < LIMIT / 2 and calls.count("data") == 1
    goes_on.set()
    wait_for(lambda: aborter.abort(True) == 1, "the last one is over")
    assert calls.count("data") == 1


def test_a_group_without_a_communicator_is_tried_again(groups, calls):
    """It gets one with its first collective, in which the main thread would wait for ever."""
    aborter = Aborter()
    groups["data"].made = False
    assert aborter.abort(True) == 2
    groups["data"].made = True
    assert aborter.abort(True) == 1 and calls.count("data") == 2


def test_new_groups_may_have_the_identities_of_old_ones(groups):
    aborter = Aborter()
    aborter.abort(True)
    assert aborter.begun
    aborter.forget_aborted()
    assert not aborter.begun and aborter.abort(True) == 3


def test_settings_that_would_end_healthy_ranks_are_overruled_and_told(monkeypatch):
    for name in (*SETTINGS, MAKING[0]):
        monkeypatch.setenv(name, "0")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    (line,) = keep_torch_from_aborting()
    assert {name: os.environ[name] for name in SETTINGS} == SETTINGS and os.environ[MAKING[0]] == MAKING[1]
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING=1 " in line


def test_a_sites_own_limit_for_making_a_communicator_stays(monkeypatch):
    for name in SETTINGS:
        monkeypatch.setenv(name, SETTINGS[name])
    monkeypatch.setenv(MAKING[0], "600")
    assert keep_torch_from_aborting() == []
    assert os.environ[MAKING[0]] == "600"
