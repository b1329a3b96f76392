"""A checkpoint that was asked for, in another format as well: by a real process, or a line that says why not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.kept import training
from unicron.transition.snapshot import exports
from unicron.transition.snapshot.checkpoint import Checkpoints
from unicron.transition.snapshot.formats import verify


def test_a_checkpoint_is_exported_when_it_is_whole_by_a_process_of_its_own(tmp_path: Path, capfd) -> None:
    checkpoints = Checkpoints(tmp_path / "saves", export="safetensors")
    assert checkpoints.exports is not None
    checkpoints.exports.start(7)  # before a file is there
    checkpoints.exports.start(8)
    assert "iteration 8 is not exported: the export before it is not over" in capfd.readouterr().err
    checkpoints.save_last(training(), 7)
    process = checkpoints.exports._process
    assert process is not None and process.wait(60.0) == 0
    index, wrong = verify.problems(tmp_path / "saves/safetensors/iteration-00000007")
    assert wrong == [] and index is not None and index.iteration == 7
    assert "was exported to" in capfd.readouterr().err


def test_what_cannot_be_exported_is_one_line_with_the_command_for_later(tmp_path: Path, capfd, monkeypatch) -> None:
    monkeypatch.setattr(exports.os, "nice", lambda _: 0)
    monkeypatch.setattr(exports.signal, "signal", lambda *_: None)
    Checkpoints(tmp_path).save_last(training(), 3)
    (tmp_path / "dcp/iteration-00000003").mkdir(parents=True)
    (tmp_path / "dcp/iteration-00000003/file").touch()
    assert exports.main(str(tmp_path), "3", "dcp", "") == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "is there already" in line and f"unicronctl checkpoint export {tmp_path} OUT --format dcp" in line


def test_a_checkpoint_that_never_becomes_whole_is_not_waited_for_without_end(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(exports.BadCheckpoint, match=r"not whole after 0\.1 s"):
        exports.export(tmp_path, 3, "dcp", seconds=0.1)
    assert time.monotonic() - began >= 0.1


def test_the_variable_takes_the_place_of_the_scripts_word_and_both_are_checked(tmp_path: Path, monkeypatch) -> None:
    assert Checkpoints(tmp_path).exports is None
    with pytest.raises(ValueError, match="write one of torch_dist, dcp, safetensors"):
        Checkpoints(tmp_path, export="gguf")
    monkeypatch.setenv("UNICRON_CHECKPOINT_EXPORT", "onnx")
    with pytest.raises(ValueError, match="'onnx'"):
        Checkpoints(tmp_path, export="dcp")
