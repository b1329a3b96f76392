"""Unicron beside its peers: the same model, data, ranks, machine and failures, in one run, by turns.

    python -m benchmarks.leaderboard --json FILE [--quick] [--system NAME]... [--failure NAME]...

`make leaderboard` makes the peers' environments first. docs/leaderboard.md describes how each system is set up. Exit
status 1 if a system did not train to begin with.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.leaderboard import notes, play, rows
from benchmarks.leaderboard.failures import EVERY, FAILURES, Missed
from benchmarks.leaderboard.play import BROKE_OFF, Limits, describe
from benchmarks.leaderboard.rows import Row, Share
from benchmarks.leaderboard.systems import MODELS, System
from benchmarks.leaderboard.systems.base import Absent
from benchmarks.report import commit, machine
from unicron_ctl.shared.system.errors import WRONG_USE, UserError, one_line

FULL, QUICK = Limits(120.0, 120.0), Limits(60.0, 45.0)
SEED = 1
NO_TRAINING = "did not train:"


class Results:
    """The rows so far. They are written at each new one, so a run that is interrupted keeps its results."""

    def __init__(self, path: Path) -> None:
        """Make the file. Raises UserError if it cannot be made or has results."""
        self._path, self.rows = path, list[Row | Share]()
        try:
            with path.open("ab") as file:
                used = file.tell() > 0
        except OSError as error:
            why = f"{path} cannot be written ({error.strerror or error})"
            raise UserError(f"{why}: make its folder, or give another file with --json", WRONG_USE) from None
        if used:
            raise UserError(f"{path} has results: give another file with --json", WRONG_USE)

    def add(self, row: Row | Share) -> None:
        """Write and print a row."""
        row.machine, row.commit = machine(), commit()
        self.rows.append(row)
        data = msgspec.json.encode([rows.encode(row) for row in self.rows])
        self._path.write_bytes(msgspec.json.format(data, indent=1) + b"\n")
        (cells,) = rows.lines([row]) if isinstance(row, Row) else rows.shares([row])
        print("  ".join(cells)[:300], flush=True)

    @property
    def untrained(self) -> bool:
        """Whether a system did not train to begin with."""
        return any(row.why.startswith(NO_TRAINING) for row in self.rows)

    def tables(self) -> str:
        """Return the tables, and the versions of the systems."""
        failed = [row for row in self.rows if isinstance(row, Row)]
        streamed = [row for row in self.rows if isinstance(row, Share)]
        text = f"\n{machine()}; commit {commit()}\n"
        if failed:
            text += f"\none failure\n\n{rows.markdown(rows.HEADS, rows.lines(failed))}\n"
        if streamed:
            table = rows.markdown(rows.SHARE_HEADS, rows.shares(streamed))
            text += f"\na failure every {EVERY:g} s\n\n{table}\n"
        versions = {row.system: row.version for row in self.rows if row.version}
        return text + "".join(f"\n{name}: {word}" for name, word in versions.items())


def one(kind: type[System], failure: str, folder: Path, limits: Limits, wanted: dict[int, float]) -> Row:
    """Return the row of one failure of a system; `wanted` are the losses of an undisturbed run."""
    row = Row(kind.name, "", failure, None)
    try:
        row.version = kind.version()
        outcome = play.fail(kind, failure, folder, limits)
    except Absent as absent:
        row.why = str(absent)
    except Missed as error:
        row.why = f"not struck: {describe(error)}"
    except BROKE_OFF as error:
        row.why = f"{NO_TRAINING} {describe(error)}"
    else:
        figures = msgspec.structs.asdict(outcome.figures)
        row = Row(kind.name, row.version, failure, outcome.survived, why=outcome.why, **figures)
        row.loss_difference = notes.difference(outcome.losses, wanted)
        row.iterations_compared = notes.compared(outcome.losses, wanted)
    return row


def stream(kind: type[System], folder: Path, minutes: float, undisturbed: float, wanted: dict[int, float]) -> Share:
    """Return the row of a system under a stream of failures."""
    share = Share(kind.name, None, minutes=minutes)
    try:
        share.version = kind.version()
        found = play.stream(kind, 60 * minutes, undisturbed, SEED, folder)
    except Absent as absent:
        share.why = str(absent)
    except BROKE_OFF as error:
        share.why = f"{NO_TRAINING} {describe(error)}"
    else:
        share.useful_share = found.share(statistics.mean(found.undisturbed))
        share.undisturbed, share.share_of_first = found.undisturbed, found.share(found.undisturbed[0])
        share.operator, share.struck, share.missed = found.operator, found.struck, found.missed
        share.loss_difference = notes.difference(found.losses, wanted)
        share.iterations_compared = notes.compared(found.losses, wanted)
        share.why = found.why
    return share


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.leaderboard",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", required=True, help="where the results are written")
    parser.add_argument("--quick", action="store_true", help="once, with shorter limits, and a stream of a minute")
    parser.add_argument("--model", choices=MODELS, default="dp", help="whole in each rank, or sharded (hsdp)")
    parser.add_argument(
        "--system", action="append", choices=MODELS["dp"], help="only these; may be given several times"
    )
    parser.add_argument("--failure", action="append", choices=FAILURES, help="only these")
    parser.add_argument("--repetitions", type=int, help="of each failure, 5 or with --quick 1; 0: none")
    parser.add_argument("--stream-minutes", type=float, help="20, or with --quick 1; 0: no stream")
    options = parser.parse_args(words)
    if missing := sorted(set(options.system or ()) - set(MODELS[options.model])):
        parser.error(f"{missing[0]} does not train {options.model}: {', '.join(MODELS[options.model])} do")
    if options.repetitions is None:
        options.repetitions = 1 if options.quick else 5
    if options.stream_minutes is None:
        options.stream_minutes = 1.0 if options.quick else 20.0
    if options.repetitions < 0 or not 0 <= options.stream_minutes < math.inf:
        parser.error("--repetitions and --stream-minutes are at least 0")
    return options


def run(options: argparse.Namespace, results: Results, folder: Path) -> None:
    """Let the systems take turns at each failure, then give each its stream."""
    systems = MODELS[options.model]
    names, limits = options.system or list(systems), QUICK if options.quick else FULL
    wanted: dict[int, float] = {}
    if options.repetitions or options.stream_minutes:
        wanted = play.reference(folder / "reference", 400 if options.quick else 1200)
    for repetition in range(options.repetitions):
        for turn, failure in enumerate(options.failure or FAILURES):
            first = (repetition + turn) % len(names)
            for name in names[first:] + names[:first]:
                row = one(systems[name], failure, folder / f"{name}.{failure}.{repetition}", limits, wanted)
                row.repetition, row.model = repetition, options.model
                results.add(row)
    if options.stream_minutes:
        for name in names:
            undisturbed = 20.0 if options.quick else 60.0
            place = folder / f"{name}.stream"
            share = stream(systems[name], place, options.stream_minutes, undisturbed, wanted)
            share.model = options.model
            results.add(share)


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    try:
        results = Results(options.json)
    except UserError as error:
        print(one_line(str(error)), file=sys.stderr)
        return error.exit_code
    with tempfile.TemporaryDirectory(prefix="leaderboard-") as folder:
        run(options, results, Path(folder))
    print(results.tables())
    return int(results.untrained)


if __name__ == "__main__":
    sys.exit(main())
