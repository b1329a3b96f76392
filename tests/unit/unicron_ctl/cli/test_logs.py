"""`unicronctl logs`, from files alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.support.processes import wait_for
from unicron_ctl.cli.logs import MOST_LINE, RankFile
from unicron_ctl.cli.unicronctl import unicronctl
from unicron_ctl.shared.system.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    job = tmp_path / "7"
    job.mkdir()
    (job / "rank-0.log").write_text("2026-11-26T10:00:00.100 a\n2026-11-26T10:00:00.300 c\n2026-11-26T10:00:00.9")
    (job / "rank-1.log").write_text("2026-11-26T10:00:00.200 b  b\n2026-11-26T10:00:00.400 \n")
    (job / "rank-x.log").write_text("no file of a rank\n")
    return tmp_path


def logs(*words: object) -> Result:
    return CliRunner().invoke(unicronctl, ["logs", *map(str, words)])


def test_the_ranks_lines_are_merged_by_time(folder: Path) -> None:
    done = logs(7, "--dir", folder)
    assert done.output.splitlines() == [
        "2026-11-26T10:00:00.100 [rank 0] a",
        "2026-11-26T10:00:00.200 [rank 1] b  b",
        "2026-11-26T10:00:00.300 [rank 0] c",
        "2026-11-26T10:00:00.400 [rank 1] ",
    ]


def test_one_rank_and_json(folder: Path) -> None:
    assert logs(7, "--dir", folder, "--rank", 1).output.splitlines()[0] == "2026-11-26T10:00:00.200 b  b"
    lines = [json.loads(line) for line in logs(7, "--dir", folder, "--json").output.splitlines()]
    assert lines[1] == {"time": "2026-11-26T10:00:00.200", "rank": 1, "text": "b  b"}


def test_nobody_waits_for_a_pipe(folder: Path) -> None:
    os.mkfifo(folder / "7" / "rank-2.log")
    done = logs(7, "--dir", folder)
    assert isinstance(done.exception, UserError) and f"{folder}/7/rank-2.log: " in str(done.exception)


def test_of_a_line_without_an_end_the_beginning_is_shown(folder: Path) -> None:
    endless, text = folder / "7" / "rank-0.log", b"2026-11-26T10:00:00.100 "
    with endless.open("wb") as file:
        file.write(text + b"a" * MOST_LINE * 3 + b"\n" + text + b"b\n" + text)
        file.truncate(60 << 30)  # what follows is a hole
    file, tracing = RankFile(0, endless), tracemalloc.start()
    lines = list(file.new_lines())
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert tracing is None and most < 8 * MOST_LINE, "it is not read whole"
    assert [line.text[:3] for line in lines] == ["aaa", "b", "\0\0\0"] and len(lines[0].text) < MOST_LINE
    assert lines[0].text.endswith("a ...") and not list(file.new_lines())
    with endless.open("ab") as more:
        more.write(b"the rest of it\n" + text + b"c\n")
    assert [line.text for line in file.new_lines()] == ["c"]


@pytest.mark.parametrize("words", [["8"], ["7", "--rank", "5"]])
def test_what_is_not_there_is_one_line(folder: Path, words: list[str]) -> None:
    done = logs(*words, "--dir", folder)
    assert isinstance(done.exception, UserError) and "in " + str(folder) in str(done.exception)


def test_it_follows_old_and_new_files(folder: Path) -> None:
    code = "import sys; from unicron_ctl.cli.unicronctl import main; main()"
    command = [sys.executable, "-u", "-c", code, "logs", "7", "--dir", str(folder), "-f"]
    out = folder / "out"
    with out.open("wb") as file:
        following = subprocess.Popen(command, stdout=file)
    try:
        wait_for(lambda: "[rank 1] b" in out.read_text(), "the old lines", now=out.read_text)
        with (folder / "7" / "rank-0.log").open("a") as file:
            file.write("00 late\n")
        (folder / "7" / "rank-2.log").write_text("2026-11-26T10:00:01.000 new\n")
        wait_for(lambda: "[rank 2] new" in out.read_text(), "a new file", now=out.read_text)
        assert "10:00:00.900 [rank 0] late" in out.read_text()
    finally:
        following.terminate()
        following.wait()
