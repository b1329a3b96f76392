"""A checkpoint that was asked for, in another format as well: by a real process, or a line that says why not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.kept import training
from tests.support.processes import wait_for
from tests.support.texts import masked, raises_text
from unicron_transition.snapshot.checkpoint import Checkpoints, Writer
from unicron_transition.snapshot.formats import exports, opening


def test_a_checkpoint_is_exported_when_it_is_whole_by_a_process_of_its_own(tmp_path: Path, capfd) -> None:
    checkpoints = Checkpoints(tmp_path / "saves", export="safetensors")
    assert checkpoints.exports is not None
    mark = Writer().mark
    checkpoints.exports.start(7, mark)  # before a file is there
    checkpoints.exports.start(8, mark)
    assert "iteration 8 is not exported" in capfd.readouterr().err
    for iteration in (7, 8, 9, 10):  # more than are kept
        checkpoints.save_last(training(), iteration)
    process = checkpoints.exports._process
    assert process is not None and process.wait(60.0) == 0
    index, wrong = opening.verify(tmp_path / "saves/safetensors/iteration-00000007")
    assert wrong == [] and index is not None and index.iteration == 7
    assert "was exported to" in capfd.readouterr().err
    checkpoints.save_last(training(), 11)
    left = sorted(each.name for each in (tmp_path / "saves").glob("iteration-*"))
    assert left == ["iteration-00000010", "iteration-00000011"]


def test_an_export_that_does_not_start_holds_nothing(tmp_path: Path, capfd, monkeypatch) -> None:
    checkpoints = Checkpoints(tmp_path, export="dcp")
    assert checkpoints.exports is not None
    monkeypatch.setattr(exports.sys, "executable", "/no/python")
    checkpoints.exports.start(7, Writer().mark)
    assert "7 is not exported: [Errno 2]" in capfd.readouterr().err
    assert list((tmp_path / "iteration-00000007").iterdir()) == []


def test_what_cannot_be_exported_is_one_line_with_the_command_for_later(
    tmp_path: Path, capfd, monkeypatch, snapshot
) -> None:
    monkeypatch.setattr(exports.os, "nice", lambda _: 0)
    monkeypatch.setattr(exports.signal, "signal", lambda *_: None)
    monkeypatch.setattr(exports, "ignore_step_signals", lambda: None)
    Checkpoints(tmp_path).save_last(training(), 3)
    (tmp_path / "dcp/iteration-00000003").mkdir(parents=True)
    (tmp_path / "dcp/iteration-00000003/file").touch()
    assert exports.main(str(tmp_path), "3", Writer().mark, "dcp", "", "me") == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert masked(line, tmp_path) == snapshot


def test_a_checkpoint_that_never_becomes_whole_is_not_waited_for_without_end(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(exports.BadCheckpoint, match=r"not whole after 0\.1 s"):
        exports.export(tmp_path, 3, "12345678", "dcp", seconds=0.1)
    assert time.monotonic() - began >= 0.1


def test_the_variable_takes_the_place_of_the_scripts_word_and_both_are_checked(
    tmp_path: Path, monkeypatch, snapshot
) -> None:
    assert Checkpoints(tmp_path).exports is None
    with raises_text(ValueError, snapshot, tmp_path):
        Checkpoints(tmp_path, export="gguf")
    monkeypatch.setenv("UNICRON_CHECKPOINT_EXPORT", "onnx")
    with pytest.raises(ValueError, match="'onnx'"):
        Checkpoints(tmp_path, export="dcp")


def test_another_checkpoint_of_the_same_iteration_is_not_taken_for_it(tmp_path: Path) -> None:
    """Defect: that of a run before, or of another job in the folder, was exported in its place."""
    Checkpoints(tmp_path).save_last(training(), 3, Writer(loss=1.0))
    with pytest.raises(exports.BadCheckpoint, match="not whole"):
        exports.export(tmp_path, 3, Writer(loss=2.0).mark, "dcp", seconds=0.0)
    Checkpoints(tmp_path).save_last(training(), 4)
    with pytest.raises(exports.BadCheckpoint, match="a later one"):
        exports.export(tmp_path, 3, Writer(loss=2.0).mark, "dcp")


def test_signals_to_all_processes_of_a_step_do_not_end_an_export_but_sigterm_does(tmp_path: Path) -> None:
    words = [sys.executable, "-m", exports.__name__, str(tmp_path), "3", Writer().mark, "dcp", "", "me"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: caught(process.pid, signal.SIGTERM), "it waits for its checkpoint")
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT):
            process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.terminate()
        said = process.communicate(timeout=30.0)[1]
        assert process.returncode == 1 and "SIGTERM has ended it" in said and len(said.splitlines()) == 1
    finally:
        process.kill()
        process.wait()


def caught(pid: int, number: int) -> bool:
    """Whether the process has a handler for it (proc(5))."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(mask >> (number - 1) & 1)
