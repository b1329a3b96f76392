"""How a program ends: one line for each error, and none where nobody reads any more."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
import click
from unicron_ctl.shared.system.program import run

@click.command()
@click.argument("how")
def main(how):
    if how == "another pipe":
        reading, writing = os.pipe()
        os.close(reading)
        os.write(writing, b"x")
    for _ in range(1 << 16):
        click.echo("a line")

sys.exit(run("program", main))
"""


@pytest.mark.parametrize("how", ["a reader that goes", "another pipe"])
def test_only_a_reader_that_is_gone_ends_a_program_without_a_word(how: str) -> None:
    """Defect: a controller would have ended without a word, had one of its own pipes been closed."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None and program.stderr is not None
        if how != "another pipe":
            assert program.stdout.readline() == "a line\n"
            program.stdout.close()
        said = program.stderr.read()
        assert program.wait(60.0) == 1
    assert said == ("program: Broken pipe\n" if how == "another pipe" else "")
