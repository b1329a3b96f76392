"""Each process of a rank reads the job's standard input from its beginning."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unicron_detector.processes.job_input import JobInput

TEXT = b"print('trained')\n" * 20_000  # more than a pipe holds


def read_all(made: JobInput) -> bytes:
    descriptor = made.open()
    assert descriptor is not None
    with open(descriptor, "rb") as file:
        return file.read()


def write(descriptor: int, data: bytes) -> subprocess.Popen[bytes]:
    """Let another process write it, and close the pipe."""
    command = [sys.executable, "-c", f"import os, sys; os.write({descriptor}, sys.stdin.buffer.read())"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[descriptor])
    assert process.stdin is not None
    process.stdin.write(data)
    process.stdin.close()
    os.close(descriptor)
    return process


def test_processes_side_by_side_and_later_ones_get_the_same(pipe: tuple[int, int]) -> None:
    made = JobInput(pipe[0])
    first, second = made.open(), made.open()
    assert first is not None and second is not None
    with write(pipe[1], TEXT), open(first, "rb") as one, open(second, "rb") as other:
        assert one.read() == TEXT and other.read() == TEXT
    assert read_all(made) == TEXT == read_all(made)


def test_one_that_reads_nothing_keeps_the_others_from_nothing(pipe: tuple[int, int]) -> None:
    made = JobInput(pipe[0])
    idle = made.open()
    assert idle is not None
    with write(pipe[1], TEXT):
        assert read_all(made) == TEXT
    os.close(idle)


def test_nothing_is_taken_from_a_stream_that_nobody_reads(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    made = JobInput(pipe[0])
    descriptor = made.open()
    assert descriptor is not None

    written, deadline = 0, time.monotonic() + 0.5
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            written += os.write(pipe[1], b"y" * 4096)
    assert 0 < written < 1 << 20, "what two pipes hold"
    os.close(descriptor)


def test_a_stream_that_is_too_long_goes_on_but_no_process_gets_a_part_of_it(pipe: tuple[int, int]) -> None:
    made = JobInput(pipe[0], most=100_000)
    descriptor = made.open()
    assert descriptor is not None
    with write(pipe[1], TEXT), open(descriptor, "rb") as file:
        assert file.read() == TEXT
    with pytest.raises(OSError, match="longer than"):
        made.open()


def test_files_and_terminals(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(TEXT)
    with path.open("rb") as file:
        file.read(10)
        made = JobInput(file.fileno())
        assert read_all(made) == TEXT == read_all(made)
    ours, terminal = pty.openpty()
    with open(os.devnull, "rb") as null:
        assert JobInput(terminal).open() is None and JobInput(null.fileno()).open() is None
    os.close(terminal)
    assert JobInput(terminal).open() is None, "it is closed"
    os.close(ours)


def test_what_this_process_becomes_reads_it_from_the_beginning(pipe: tuple[int, int]) -> None:
    made = JobInput(pipe[0])
    made.give_back()  # nothing was read
    os.write(pipe[1], b"some")
    descriptor = made.open()
    assert descriptor is not None and os.read(descriptor, 4) == b"some"
    with pytest.raises(OSError, match="part of its standard input"):
        made.give_back()
    os.close(pipe[1])
    with open(descriptor, "rb") as file:
        assert file.read() == b""
    made.give_back()
    assert os.read(pipe[0], 100) == b"some"
