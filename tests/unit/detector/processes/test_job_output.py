"""Output to a job's log that may accept nothing, by real pipes."""

from __future__ import annotations

import os
import re
import threading
import time

from tests.support.processes import wait_for
from unicron_detector.processes.job_output import FULL_BYTES, MOST_BYTES, JobOutput


def test_what_is_written_comes_in_its_order(pipe):
    reading, writing = pipe
    output = JobOutput(writing)
    for number in range(100):
        output.write(f"{number}\n".encode())
    assert output.flush(10.0)
    assert os.read(reading, 1000).split() == [str(number).encode() for number in range(100)]


def test_a_log_that_takes_nothing_is_not_waited_for_and_what_is_lost_is_said(pipe):
    reading, writing = pipe
    output = JobOutput(writing, stall=0.2)
    piece = b"x" * (1 << 16)
    began, written = time.monotonic(), 0
    while written <= MOST_BYTES:
        output.write(piece)
        written += len(piece)
    output.write(piece * 3)
    assert not output.flush(0.1) and time.monotonic() - began < 30.0
    wait_for(lambda: not output.full, "writers do not hold back for a log that stands still")
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.extend(iter(lambda: os.read(reading, 1 << 16), b"")), daemon=True)
    reader.start()
    assert output.flush(30.0)
    output.write(b"again\n")
    assert output.flush(30.0)
    os.close(writing)
    reader.join(30.0)
    text = b"".join(found)
    lost = re.search(rb"WARNING unicron: (\d+) bytes of output were lost here", text)
    assert lost is not None and text.endswith(b"again\n")
    assert text.count(b"x" * 1000) * 1000 + int(lost[1]) >= written + 2 * len(piece)


def test_while_the_log_takes_something_a_full_buffer_asks_for_patience(pipe):
    _, writing = pipe
    output = JobOutput(writing, stall=60.0)
    output.write(b"x" * (FULL_BYTES + (1 << 17)))
    assert output.full


def test_a_log_that_refuses_costs_what_it_refuses(pipe):
    reading, writing = pipe
    output = JobOutput(writing)
    os.close(reading)
    output.write(b"lost\n")
    assert output.flush(10.0)
    output.write(b"lost, too\n")
    assert output.flush(10.0)
