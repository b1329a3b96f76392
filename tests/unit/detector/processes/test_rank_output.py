"""The output of one rank, in the job's log and in a file of its own."""

from __future__ import annotations

import os
import re
from pathlib import Path

from unicron_detector.processes.job_output import JobOutput
from unicron_detector.processes.rank_output import LogFile, RankOutput

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} "


class Pipe(JobOutput):
    """A stream of the job's log, which is read at once."""

    def __init__(self) -> None:
        self._reading, writing = os.pipe()
        os.set_blocking(self._reading, False)
        super().__init__(writing)

    def read(self) -> bytes:
        assert self.flush(10.0)
        try:
            return os.read(self._reading, 1 << 16)
        except BlockingIOError:
            return b""


def test_whole_lines_get_the_time_and_the_job_s_log_gets_all_as_it_comes(tmp_path: Path) -> None:
    path = tmp_path / "made" / "rank-3.log"
    file, out, err = LogFile(path), Pipe(), Pipe()
    output = RankOutput(file)
    output.write(b"first\nsec", out)
    assert out.read() == b"first\nsec"
    output.write(b"an error\n", err)
    output.write(b"ond\n 10%\r 20%\r100%\nrest", out)
    output.write(b"", out)
    output.write(b"", err)
    file.close(10.0)
    lines = path.read_text().splitlines()
    assert [re.sub(f"^{TIME}", "", line) for line in lines] == ["first", "an error", "second", "100%", "rest"]
    assert all(re.match(TIME, line) for line in lines) and err.read() == b"an error\n"


def test_a_rank_that_is_not_shown_is_in_its_file_alone(tmp_path: Path) -> None:
    file, out = LogFile(tmp_path / "rank-0.log"), Pipe()
    RankOutput(file, shown=False).write(b"text\n", out)
    file.close(10.0)
    assert out.read() == b"" and (tmp_path / "rank-0.log").read_text().endswith(" text\n")
    assert RankOutput(shown=False).piped and RankOutput(file).piped and not RankOutput().piped


def test_a_line_without_an_end_is_cut(tmp_path: Path) -> None:
    file, out = LogFile(tmp_path / "rank-0.log"), Pipe()
    RankOutput(file, shown=False).write(b"x" * 200_000, out)
    file.close(10.0)
    assert (tmp_path / "rank-0.log").stat().st_size > 200_000


def test_a_folder_that_cannot_be_made_keeps_nobody_from_writing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file, out = LogFile(tmp_path / "file" / "rank-0.log"), Pipe()
    RankOutput(file).write(b"text\n", out)
    file.close(10.0)
    assert out.read() == b"text\n"
