"""``python -m benchmarks.run [NAME ...]``: every benchmark but those with a target of their own, then what was asked
beside what was reached.

A mark is a printed line that ends in ``asked: <= 1 s``, with ``MISSED`` behind it when it was. Exit status 1 when a
benchmark crashed; a missed mark only shows in the table, since it may be the machine's doing.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ORDER = ("planner", "paper", "detector", "recovery", "cost", "layouts")
APART = {"leaderboard", "storms", "torture"}  # each takes half an hour or hours, and has a target in the Makefile
MARK = re.compile(r"^(?P<what>.+?)\s+(?P<value>\S+) (?P<unit>\S*)\s+asked: (?P<asked>.*?)(?P<missed>\s+MISSED)?$")
CRASHED = 70  # an exception; a benchmark's own 1 says that a mark was missed
START = f"""import runpy, sys, traceback
try:
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
except Exception:
    traceback.print_exc()
    sys.exit({CRASHED})
"""


@dataclass
class Result:
    """One benchmark's exit status, how long it took, and its marks: what, reached, asked, missed."""

    name: str
    status: int
    seconds: float
    marks: list[tuple[str, str, str, bool]]

    @property
    def crashed(self) -> bool:
        return self.status not in (0, 1)


def present() -> list[str]:
    """Names of the benchmark packages, the known ones first."""
    found = {path.parent.name for path in HERE.glob("*/__main__.py")} - APART
    return [name for name in ORDER if name in found] + sorted(found - set(ORDER))


def run(name: str) -> Result:
    """Runs one, passing on what it prints."""
    print(f"\n==== {name} " + "=" * (72 - len(name)), flush=True)
    began, marks = time.monotonic(), []
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", START, f"benchmarks.{name}"], cwd=HERE.parent, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if mark := MARK.match(line.rstrip()):
            reached = f"{mark['value']} {mark['unit']}".strip()
            marks.append((mark["what"], reached, mark["asked"], bool(mark["missed"])))
    return Result(name, process.wait(), time.monotonic() - began, marks)


def summary(results: list[Result]) -> None:
    """The final table."""
    print("\n==== summary " + "=" * 65)
    print(f"{'benchmark':<11}{'requirement':<64}{'asked':>14}{'reached':>16}")
    for result in results:
        for what, reached, asked, missed in result.marks:
            print(f"{result.name:<11}{what:<64}{asked:>14}{reached:>16}{'  MISSED' if missed else ''}")
        state = f"crashed with {result.status}" if result.crashed else "missed something" if result.status else "ok"
        missed = sum(mark[3] for mark in result.marks)
        print(f"{result.name:<11}{state}: {len(result.marks)} marks, {missed} missed, {result.seconds:.0f} s")


def main(arguments: list[str] | None = None) -> int:
    """0 unless a benchmark crashed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(present())}; all when none is given")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(present())
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}: choose from {', '.join(present())}")
    results = [run(name) for name in options.names or present()]
    summary(results)
    return 1 if any(result.crashed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
