"""Measure one case or several, and print each figure beside its goal.

    python -m benchmarks.cases [NAME [SIZE=VALUE]...]... [--smallest | --table] [--json FILE]
    python -m benchmarks.cases --list

Without a name all cases run, each in a process of its own. Exit status 1 if a case failed, or if a single case missed
a goal. In a run of several the machine may cause that, so only the table at the end shows it.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import ROOT, Figure, Report
from benchmarks.results import write_table
from unicron_ctl.shared.system.errors import WRONG_USE, UserError, one_line

HERE = Path(__file__).resolve().parent
NAMES = sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("__"))


class Result(msgspec.Struct):
    """A case that ran in a process of its own."""

    name: str
    status: int
    seconds: float
    report: Report | None

    @property
    def figures(self) -> list[Figure]:
        """The figures that it made."""
        return self.report.figures if self.report else []


def chosen_cases(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each named case with its sizes as text. Raises UserError."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if "=" not in word and word not in NAMES:
            raise UserError(f"no case {word}: choose from {', '.join(NAMES)}", WRONG_USE)
        if "=" not in word:
            found.append((word, []))
        elif not found:
            raise UserError(f"{word} belongs to no case: write the name of one before it", WRONG_USE)
        else:
            found[-1][1].append(word)
    return found


def parse_sizes(module: Any, words: Sequence[str], smallest: bool) -> Any:
    """Return the case's sizes, changed by `words`. Raises UserError."""
    changes = dict(word.split("=", 1) for word in words)
    names = module.Sizes.__struct_fields__
    if wrong := sorted(changes.keys() - set(names)):
        raise UserError(f"no size {wrong[0]}: choose from {', '.join(names)}", WRONG_USE)
    usual = msgspec.structs.asdict(module.SMALLEST if smallest else module.Sizes())
    try:
        return msgspec.convert(usual | changes, module.Sizes, strict=False)
    except msgspec.ValidationError as error:
        raise UserError(f"{' '.join(words)}: {error}", WRONG_USE) from None


def run_here(name: str, words: Sequence[str], smallest: bool, path: Path | None) -> Report:
    """Measure one case in this process."""
    module = importlib.import_module(f"benchmarks.cases.{name}")
    command = " ".join(["python -m benchmarks.cases", name, *words])
    report = Report(name, parse_sizes(module, words, smallest), command)
    report.head()
    module.measure(report.sizes, report)
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return report


def run_beside(name: str, words: Sequence[str], smallest: bool) -> Result:
    """Measure one case in a process of its own."""
    print(f"\n==== {name} " + "=" * (72 - len(name)), flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figures")
        options = ["--json", str(path), *(["--smallest"] if smallest else [])]
        command = [sys.executable, "-u", "-m", "benchmarks.cases", name, *words, *options]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        data = path.read_bytes() if path.exists() else b""
    report = msgspec.json.decode(data, type=Report) if data else None
    return Result(name, 0 if data else status or 1, time.monotonic() - began, report)


def summary(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of the final table."""
    yield "\n==== summary " + "=" * 65
    for result in results:
        goals = [figure for figure in result.figures if figure.goal]
        yield from (f"{result.name:<12}{figure.line()}" for figure in goals)
        missed = sum(not figure.met for figure in goals)
        state = f"failed with {result.status}" if result.status else f"{len(goals)} goals, {missed} missed"
        yield f"{result.name:<12}{state}, {result.seconds:.0f} s"


def titles() -> Iterator[str]:
    """Yield a line for each case."""
    for name in NAMES:
        text = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text())) or ""
        yield f"{name:<20}{text.splitlines()[0]}"


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cases", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="NAME|SIZE=VALUE", help="cases, each with its sizes")
    parser.add_argument("--list", action="store_true", help="name the cases")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--smallest", action="store_true", help="only show that the case runs")
    how.add_argument("--table", action="store_true", help="write the goals' rows into the table of docs/results.md")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_intermixed_args(arguments)
    if options.list:
        print("\n".join(titles()))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the processes of a case, too
    try:
        chosen = chosen_cases(options.words) or [(name, []) for name in NAMES]
        if len(chosen) == 1:
            report = run_here(*chosen[0], options.smallest, options.json)
            if options.table:
                write_table([report])
            return int(not all(figure.met for figure in report.figures))
    except UserError as error:
        parser.exit(error.exit_code, f"{one_line(str(error))}\n")
    results: list[Result] = []
    try:
        for name, words in chosen:
            results.append(run_beside(name, words, options.smallest))
    finally:  # not after each: a changed checkout would be in the next one's commit
        if options.table:
            write_table(filter(None, (result.report for result in results)))
    print("\n".join(summary(results)))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    return int(any(result.status for result in results))


if __name__ == "__main__":
    sys.exit(main())
