"""The abort of NCCL communicators: all of them in one group call, each once, those inside the replica only if so.

torch's groups are stood in for: this machine's torch has no NCCL. What they must do is torch's interface of 2.13.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from unicron.transition.seams.nccl import SETTINGS, Aborter, keep_torch_from_aborting


class Group:
    """A process group of NCCL; `calls` is common to all."""

    def __init__(self, name: str, calls: list[str], made: bool = True, fails: bool = False):
        self.name, self.calls, self.made, self.fails = name, calls, made, fails

    def _get_backend(self, device):
        return SimpleNamespace(
            _is_initialized=lambda: self.made,
            _group_start=lambda: self.calls.append("start"),
            _group_end=lambda: self.calls.append("end"),
        )

    def abort(self):
        self.calls.append(self.name)
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


def test_all_are_aborted_in_one_group_call_and_once(groups, calls):
    aborter = Aborter()
    assert aborter.abort(True) == 3
    assert calls == ["start", "tensor", "data", "world", "end"]
    assert aborter.abort(True) == 0 and calls.count("start") == 1


def test_those_inside_a_healthy_replica_are_left_alone(groups, calls):
    aborter = Aborter()
    aborter.inside.add(groups["tensor"])
    assert aborter.abort(False) == 2 and "tensor" not in calls
    assert aborter.abort(True) == 1 and calls[-2] == "tensor"


def test_one_that_fails_does_not_spare_the_others(groups, calls):
    groups["data"].fails = True
    assert Aborter().abort(True) == 3 and calls[-2:] == ["world", "end"]


def test_a_group_without_a_communicator_is_tried_again(groups, calls):
    """It gets one with its first collective, in which the main thread would wait for ever."""
    aborter = Aborter()
    groups["data"].made = False
    assert aborter.abort(True) == 2
    groups["data"].made = True
    assert aborter.abort(True) == 1 and calls[-3:] == ["start", "data", "end"]


def test_new_groups_may_have_the_identities_of_old_ones(groups):
    aborter = Aborter()
    aborter.abort(True)
    aborter.forget_aborted()
    assert aborter.abort(True) == 3


def test_settings_that_would_end_healthy_ranks_are_overruled_and_told(monkeypatch):
    for name in SETTINGS:
        monkeypatch.setenv(name, "0")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    (line,) = keep_torch_from_aborting()
    assert {name: os.environ[name] for name in SETTINGS} == SETTINGS
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING=1 would end healthy ranks" in line
