"""Unicron beside its peers: the same model, data, ranks, machine and failures, in one run, by turns.

    python -m benchmarks.leaderboard --json FILE [--quick] [--system NAME]... [--failure NAME]...

`make leaderboard` makes the peers' environments first. docs/leaderboard.md says how each system is set up. Exit status
0 when all could be run or said why not, 1 when one did not train to begin with.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.leaderboard import notes, play, rows
from benchmarks.leaderboard.failures import EVERY, FAILURES, Missed
from benchmarks.leaderboard.play import BROKE_OFF, Limits, said
from benchmarks.leaderboard.rows import Row, Share
from benchmarks.leaderboard.systems import SYSTEMS, System
from benchmarks.leaderboard.systems.base import Absent
from benchmarks.report import commit
from unicron_ctl.shared.system.errors import WRONG_USE, UserError, one_line

FULL, QUICK = Limits(120.0, 120.0), Limits(60.0, 45.0)
SEED = 1
NO_TRAINING = "did not train:"


class Board:
    """The rows so far, written at each new one: a run that is broken off keeps what it has. Raises UserError where the
    file is no place for them, and not an hour later at the first."""

    def __init__(self, path: Path, append: bool) -> None:
        self._path = path
        before = _content(path)
        if before not in (b"", b"[]") and not append:
            why = f"{path} has results"
            raise UserError(f"{why}: add to them with --append, or give another file with --json", WRONG_USE)
        self.rows = _rows(path, before)
        self._before = len(self.rows)

    def add(self, row: Row | Share) -> None:
        self.rows.append(row)
        self._path.write_text(json.dumps([rows.encode(row) for row in self.rows], indent=1) + "\n")

    @property
    def untrained(self) -> bool:
        """Whether a row of this run says that the system did not train to begin with."""
        return any(row.why.startswith(NO_TRAINING) for row in self.rows[self._before :])

    @property
    def failures(self) -> list[Row]:
        return [row for row in self.rows if isinstance(row, Row)]

    @property
    def shares(self) -> list[Share]:
        return [row for row in self.rows if isinstance(row, Share)]


def _content(path: Path) -> bytes:
    """Return the content of a file that can be written; it is made where there is none. Raises UserError."""
    try:
        with path.open("ab+") as file:
            file.seek(0)
            return file.read().strip()
    except OSError as error:
        why = f"{path} cannot be written ({error.strerror or error})"
        raise UserError(f"{why}: make its folder, or give another file with --json", WRONG_USE) from None


def _rows(path: Path, content: bytes) -> list[Row | Share]:
    """Raises UserError."""
    try:
        return rows.decode(json.loads(content or b"[]"))
    except (ValueError, msgspec.ValidationError) as error:
        why = f"{path} has no results of this benchmark ({error})"
        raise UserError(f"{why}: give another file with --json", WRONG_USE) from None


def machine() -> str:
    """On what the figures were taken."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB, Python {platform.python_version()}"


def one(kind: type[System], failure: str, folder: Path, limits: Limits, wanted: dict[int, float]) -> Row:
    """A failure of a system. wanted: the losses of an undisturbed run."""
    row = Row(kind.name, "", failure, None)
    try:
        row.version = kind.version()
        outcome = play.fail(kind, failure, folder, limits)
    except Absent as absent:
        row.why = str(absent)
    except Missed as error:
        row.why = f"not struck: {said(error)}"
    except BROKE_OFF as error:
        row.why = f"{NO_TRAINING} {said(error)}"
    else:
        figures = msgspec.structs.asdict(outcome.figures)
        row = Row(kind.name, row.version, failure, outcome.survived, why=outcome.why, **figures)
        row.loss_difference = notes.difference(outcome.losses, wanted)
        row.iterations_compared = notes.compared(outcome.losses, wanted)
    return row


def failures(board: Board, options: argparse.Namespace, folder: Path, wanted: dict[int, float]) -> None:
    """All systems by turns, each failure after the other. wanted: the losses of an undisturbed run."""
    names, limits = options.system, QUICK if options.quick else FULL
    for repetition in range(options.repetitions):
        for turn, failure in enumerate(options.failure):
            first = (repetition + turn) % len(names)
            for name in names[first:] + names[:first]:
                row = one(SYSTEMS[name], failure, folder / f"{name}.{failure}.{repetition}", limits, wanted)
                row.repetition, row.machine, row.commit = repetition, machine(), commit()
                board.add(row)
                print("  ".join(rows.lines([row])[0])[:300], flush=True)


def streams(board: Board, options: argparse.Namespace, folder: Path, wanted: dict[int, float]) -> None:
    """A failure every half minute, for each system by itself. wanted: the losses of an undisturbed run."""
    for name in options.system:
        kind, minutes = SYSTEMS[name], options.stream_minutes
        share = Share(name, None, minutes=minutes)
        try:
            share.version = kind.version()
            undisturbed = 20.0 if options.quick else 60.0
            found = play.stream(kind, 60 * minutes, undisturbed, SEED, folder / f"{name}.stream")
        except Absent as absent:
            share.why = str(absent)
        except BROKE_OFF as error:
            share.why = f"{NO_TRAINING} {said(error)}"
        else:
            share.useful_share = found.share(statistics.mean(found.undisturbed))
            share.undisturbed, share.share_of_first = found.undisturbed, found.share(found.undisturbed[0])
            share.operator, share.struck, share.missed = found.operator, found.struck, found.missed
            share.loss_difference = notes.difference(found.losses, wanted)
            share.iterations_compared = notes.compared(found.losses, wanted)
            share.why = found.why
        share.machine, share.commit = machine(), commit()
        board.add(share)
        print("  ".join(rows.shares([share])[0])[:300], flush=True)


def show(board: Board, markdown: bool) -> None:
    """The tables."""
    tables = [
        (f"one failure; {rows.taken(board.failures)}", rows.heads(), rows.lines(board.failures)),
        (f"a failure every {EVERY:g} s; {rows.taken(board.shares)}", rows.SHARE_HEADS, rows.shares(board.shares)),
    ]
    for title, heads, body in tables:
        if not body:
            continue
        if markdown:
            print(f"\n{title}\n\n{rows.markdown(heads, body)}")
        else:
            Console(width=200).print(rows.table(title, heads, body))
    versions = {row.system: row.version for row in board.rows if row.version}
    for name, version in versions.items():  # earlier rows may be of a system that is here no more
        print(f"{name}: {version}" + (f"; {SYSTEMS[name].settings}" if name in SYSTEMS else ""))


def arguments() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.leaderboard",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", required=True, help="where the results are written")
    parser.add_argument("--append", action="store_true", help="to what the file has already")
    parser.add_argument("--quick", action="store_true", help="once, with shorter limits, and a stream of a minute")
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="only these; may be said several times")
    parser.add_argument("--failure", action="append", choices=FAILURES, help="only these")
    parser.add_argument("--repetitions", type=int, help="of each failure, 5 or with --quick 1; 0: none")
    parser.add_argument("--stream-minutes", type=float, help="20, or with --quick 1; 0: no stream")
    parser.add_argument("--markdown", action="store_true", help="print the tables for a document")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs' files there")
    return parser


def completed(options: argparse.Namespace) -> argparse.Namespace:
    """With what was not given. Raises UserError for what cannot be."""
    options.system, options.failure = options.system or list(SYSTEMS), options.failure or list(FAILURES)
    if options.repetitions is None:
        options.repetitions = 1 if options.quick else 5
    if options.stream_minutes is None:
        options.stream_minutes = 1.0 if options.quick else 20.0
    if options.repetitions < 0 or not 0 <= options.stream_minutes < math.inf:
        raise UserError("--repetitions and --stream-minutes are at least 0", WRONG_USE)
    if options.keep:
        options.keep = _new(options.keep.resolve())  # the systems run in folders of their own
    return options


def _new(folder: Path) -> Path:
    """Made, and empty. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = any(folder.iterdir())
    except OSError as error:
        raise UserError(f"--keep {folder} cannot be made ({error.strerror}): name another", WRONG_USE) from None
    if used:
        raise UserError(f"--keep {folder} has files: name another", WRONG_USE)
    return folder


def main() -> int:
    parser = arguments()
    try:
        options = completed(parser.parse_args())
        board = Board(options.json, options.append)
    except UserError as error:
        parser.exit(error.exit_code, f"{one_line(str(error))}\n")
    with tempfile.TemporaryDirectory(prefix="leaderboard-") as name:
        folder = options.keep or Path(name)
        wanted: dict[int, float] = {}
        if options.repetitions or options.stream_minutes:
            wanted = play.reference(folder / "reference", 400 if options.quick else 1200)
        if options.repetitions:
            failures(board, options, folder, wanted)
        if options.stream_minutes:
            streams(board, options, folder, wanted)
    show(board, options.markdown)
    return int(board.untrained)


if __name__ == "__main__":
    sys.exit(main())
