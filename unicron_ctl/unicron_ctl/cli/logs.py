"""`unicronctl logs JOB`: the output of a job's ranks, from the file that each rank has in the job's log folder."""

from __future__ import annotations

import heapq
import io
import re
import time
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from unicron_ctl.shared.commands.options import controller_option, print_json
from unicron_ctl.shared.protocol.client import ask_controller
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_ctl.shared.system.printable import print_text
from unicron_transition.snapshot.reading import behind_hole, open_plain

POLL_SECONDS = 0.3
MOST_LINE = 1 << 18  # bytes; an agent ends each line after at most a quarter of this
TIME = len("2026-11-26T13:11:12.123")
_FILE = re.compile(r"rank-(\d+)\.log")


class LogLine(msgspec.Struct, kw_only=True):
    """One line of a rank's output, with the time at which its agent read it (the node's local time)."""

    time: str
    rank: int
    text: str


class RankFile:
    """Reads the lines of one rank's file as they come."""

    def __init__(self, rank: int, path: Path) -> None:
        self.rank, self._path, self._position = rank, path, 0
        self._cut = False  # whether the position is within a line whose beginning was shown

    def new_lines(self) -> Iterator[LogLine]:
        """Yield each whole line once; of a line longer than MOST_LINE, the beginning. Raises UserError."""
        try:
            with open_plain(self._path, holes=True) as opened, io.BufferedReader(opened, MOST_LINE) as file:  # type: ignore[type-var]
                file.seek(self._position)
                while line := file.readline(MOST_LINE):
                    ended, shown = line.endswith(b"\n"), not self._cut
                    if not ended and len(line) < MOST_LINE:
                        return  # the agent has not written the rest yet
                    self._position += len(line)
                    self._cut = not ended
                    if not ended:
                        self._position = behind_hole(opened.fileno(), self._position)
                        file.seek(self._position)
                    if shown:
                        text = line.decode(errors="replace").rstrip("\n") + ("" if ended else " ...")
                        yield LogLine(time=text[:TIME], rank=self.rank, text=text[TIME + 1 :])
        except OSError as error:
            raise UserError(f"cannot read {self._path}: {error.strerror}") from None


def rank_files(folder: Path, rank: int | None, files: dict[int, RankFile]) -> None:
    """Add the files in the folder to the known ones; only that of `rank`, unless it is None."""
    for path in folder.glob("rank-*.log"):
        match = _FILE.fullmatch(path.name)
        if match and rank in (None, number := int(match[1])):
            files.setdefault(number, RankFile(number, path))


@click.command(name="logs")
@click.argument("job")
@click.option("--rank", type=click.IntRange(0), metavar="N", help="Only this rank.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Read FOLDER/JOB without asking the controller: the job's UNICRON_LOG_DIR, or torchrun's --log-dir.",
)
@controller_option()
def command(
    job: str, rank: int | None, follow: bool, as_json: bool, folder: Path | None, controller: str | None
) -> None:
    """Show the output of a job's ranks, in the order of time. JOB is an id or a name."""
    where = folder / job if folder is not None else _log_folder(job, controller)
    files: dict[int, RankFile] = {}
    rank_files(where, rank, files)
    if not files and not follow:
        which = f"rank-{rank}.log" if rank is not None else "rank-N.log"
        raise UserError(
            f"no {which} in {where}: see that this machine has the job's file system, and that it has begun"
        )
    try:
        while True:
            lines = (files[rank].new_lines() for rank in sorted(files))
            for line in heapq.merge(*lines, key=lambda line: line.time):
                if as_json:
                    print_json(line)
                else:
                    origin = "" if rank is not None else f"[rank {line.rank}] "
                    print_text(f"{line.time} {origin}{line.text}", lines=True)
            if not follow:
                return
            time.sleep(POLL_SECONDS)
            rank_files(where, rank, files)
    except KeyboardInterrupt:
        return


def _log_folder(job: str, controller: str | None) -> Path:
    """Return the job's log folder. Raises UserError."""
    folder = ask_controller({"kind": "explain", "job": job}, controller)["log_dir"]
    if not folder:
        advice = "submit it with UNICRON_LOG_DIR=FOLDER, or with --log-dir among torchrun's options"
        raise UserError(f"job {job} has no file for each rank: {advice}", WRONG_USE)
    return Path(folder)
