"""The state of a job that nobody leads any more is saved by one of its ranks."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from transition import checkpoint
from transition.checkpoint import CheckpointError, Checkpoints


class State:
    """A training state of one tensor."""

    def header(self, iteration: int) -> bytes:
        return iteration.to_bytes(4, "big")

    def tensors(self):
        return iter([torch.ones(3)])


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(checkpoint, "RESCUE_SECONDS", 0.4)
    monkeypatch.setattr(checkpoint, "LOOK_SECONDS", 0.01)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_first_member_writes_at_once(tmp_path, capsys):
    Checkpoints(tmp_path).rescue(State(), 7, 0)
    assert names(tmp_path) == ["iteration-00000007.pt"]
    assert "to go on with iteration 7" in capsys.readouterr().err


def test_the_others_write_what_those_before_them_did_not(tmp_path):
    began = time.monotonic()
    Checkpoints(tmp_path).rescue(State(), 7, 2)
    assert names(tmp_path) == ["iteration-00000007.pt"] and time.monotonic() - began >= 0.8


def test_what_is_there_is_not_written_again(tmp_path):
    Checkpoints(tmp_path).rescue(State(), 8, 0)
    Checkpoints(tmp_path).rescue(State(), 7, 0)
    Checkpoints(tmp_path).rescue(State(), 8, 5)
    assert names(tmp_path) == ["iteration-00000008.pt"]


def test_who_is_further_saves_what_it_knows(tmp_path):
    """It has stepped, the first member has not."""
    Checkpoints(tmp_path).rescue(State(), 7, 0)
    Checkpoints(tmp_path).rescue(State(), 8, 1)
    assert names(tmp_path) == ["iteration-00000007.pt", "iteration-00000008.pt"]


@pytest.mark.parametrize("ahead", [0.0, 60.0, -2.0])
def test_a_file_in_the_making_is_waited_for(tmp_path, ahead):
    """Whatever the file server's clock says: ahead of this node's, seconds."""
    new = tmp_path / "iteration-00000007.pt.n1.99.new"
    done = threading.Event()

    def another() -> None:
        for _ in range(10):
            os.utime(new, (time.time() + ahead,) * 2)
            time.sleep(0.1)
        done.set()
        new.replace(tmp_path / "iteration-00000007.pt")

    thread = threading.Thread(target=another)
    new.touch()
    os.utime(new, (time.time() + ahead,) * 2)
    thread.start()
    Checkpoints(tmp_path).rescue(State(), 7, 1)
    assert done.is_set()
    thread.join()
    assert names(tmp_path) == ["iteration-00000007.pt"]


@pytest.mark.parametrize("age", [0.0, 3600.0])
def test_a_writer_that_died_is_not_waited_for(tmp_path, age):
    left = tmp_path / "iteration-00000007.pt.n1.99.new"
    left.touch()
    os.utime(left, (time.time() - age,) * 2)
    Checkpoints(tmp_path).rescue(State(), 7, 1)
    assert "iteration-00000007.pt" in names(tmp_path)


def test_what_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="make room"):
        Checkpoints(tmp_path / "file" / "folder").rescue(State(), 7, 0)
