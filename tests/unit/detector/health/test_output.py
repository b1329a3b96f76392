"""A program's output is read up to a bound."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from unicron_detector.health.program_output import MOST_BYTES, TooMuchOutput, run_program

WRITER = "import os; [os.write({}, b'x' * 65536) for _ in range({})]"


def test_output_and_status_are_those_of_the_program() -> None:
    done = run_program(["sh", "-c", "echo out; echo err >&2; exit 3"], 30.0)
    assert (done.stdout, done.stderr, done.returncode) == (b"out\n", b"err\n", 3)
    done = run_program([sys.executable, "-c", WRITER.format(1, 160)], 30.0, 16 << 20)
    assert done.stdout == b"x" * (10 << 20) and done.returncode == 0
    with pytest.raises(FileNotFoundError):
        run_program(["/no/such/program"], 30.0)


@pytest.mark.parametrize("stream", [1, 2])
def test_a_program_that_prints_without_end_is_killed(stream: int, tmp_path: Path) -> None:
    """Defect: everything was kept, 1.2 GiB within 3 s."""
    pid, began = tmp_path / "pid", time.monotonic()
    script = f"import os; open({str(pid)!r}, 'w').write(str(os.getpid())); {WRITER.format(stream, 10**9)}"
    with pytest.raises(TooMuchOutput, match="more than 1 MiB"):
        run_program([sys.executable, "-c", script], 60.0, MOST_BYTES)
    assert time.monotonic() - began < 50.0 and not Path(f"/proc/{pid.read_text()}").exists()


def test_a_program_that_takes_too_long_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_program(["sleep", "60"], 0.2)
    with pytest.raises(subprocess.TimeoutExpired):
        run_program(["sh", "-c", "exec >&- 2>&-; exec sleep 60"], 0.2)
