"""What is kept of a process's standard error."""

from __future__ import annotations

import os
import sys

from tests.support.processes import wait_for
from unicron.detector.processes.supervise import LINE_BYTES, TAIL_LINES, Child

BARS = """
import sys
for number in range(20000):
    sys.stderr.write(f"\\r{number}/20000 it/s")
sys.stderr.write("\\rdone\\nRuntimeError: " + "x" * 50000 + " the end\\n")
sys.stderr.write("".join(f"line {number}\\n" for number in range(50)))
"""


def test_a_progress_bar_and_a_long_line_are_kept_as_a_terminal_shows_them():
    child = Child([sys.executable, "-c", BARS], dict(os.environ))
    wait_for(lambda: not child.pass_stderr(), "all was read")
    assert child.reap(60.0) == 0
    lines = child.tail().splitlines()
    child.close()
    assert lines[0] == "done" and len(lines) == 52 <= TAIL_LINES
    assert lines[1].startswith("RuntimeError: xxx") and lines[1].endswith("xxx the end")
    assert len(lines[1]) == LINE_BYTES
