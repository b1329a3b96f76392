"""Prints the lines of each room beside those of the last release, and checks what must not grow; `make lint` runs it.

It refuses a folder of more than 22 modules and a function whose complexity is over 20, where boolean operators and
comprehensions count too (radon). `--release` writes today's lines into tools/weight.toml: do so with each release, and
say in its notes why a room has grown.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from radon.complexity import cc_visit

ROOT = Path(__file__).resolve().parent.parent
KEPT = Path(__file__).with_suffix(".toml")
OTHERS = ("tests", "benchmarks")
MOST_MODULES = 22
MOST_COMPLEXITY = 20


def rooms() -> dict[str, list[Path]]:
    """The modules of each room, by its name: a package, a room of unicron_ctl, the tests, the benchmarks."""
    found = {}
    for package in sorted(path.parent for path in ROOT.glob("*/unicron*/__init__.py")):
        inner = [path for path in sorted(package.iterdir()) if path.is_dir() and path.name != "__pycache__"]
        for room in inner if package.name == "unicron_ctl" else [package]:
            found[str(room.relative_to(package.parent))] = sorted(room.rglob("*.py"))
    for name in OTHERS:
        found[name] = sorted((ROOT / name).rglob("*.py"))
    return found


def lines(paths: list[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


def problems(paths: list[Path]) -> Iterator[str]:
    """Each folder and each function of the product that is too large, as a line for people."""
    folders: dict[Path, int] = {}
    for path in paths:
        folders[path.parent] = folders.get(path.parent, 0) + 1
        for block in cc_visit(path.read_text()):
            if block.letter in "FM" and block.complexity > MOST_COMPLEXITY:
                where = f"{path.relative_to(ROOT)}:{block.lineno}"
                yield f"{where}: {block.name} has a complexity of {block.complexity}, over {MOST_COMPLEXITY}: divide it"
    for folder, count in folders.items():
        if count > MOST_MODULES:
            yield f"{folder.relative_to(ROOT)}: {count} modules, over {MOST_MODULES}: join or divide them"


def table(now: dict[str, int], before: dict[str, int], release: str) -> Iterator[str]:
    """The lines of each room, today's and the release's, and those of the product as a whole."""
    yield f"{'lines of Python':28}{'now':>8}{release:>8}"
    for name, count in now.items():
        yield f"{name:28}{count:8}{before.get(name, 0):8}{count - before.get(name, 0):+8}"
    product, then = (sum(n for name, n in counts.items() if name not in OTHERS) for counts in (now, before))
    yield f"{'product':28}{product:8}{then:8}{product - then:+8}"


def main(arguments: list[str]) -> int:
    found = rooms()
    now = {name: lines(paths) for name, paths in found.items()}
    if arguments[:1] == ["--release"] and len(arguments) == 2:
        rows = "".join(f'"{name}" = {count}\n' for name, count in now.items())
        head = f'# Written by `tools/weight.py --release {arguments[1]}`.\nrelease = "{arguments[1]}"\n'
        KEPT.write_text(f"{head}\n[lines]\n{rows}")
    kept = tomllib.loads(KEPT.read_text())
    print("\n".join(table(now, kept["lines"], kept["release"])))
    wrong = [line for name, paths in found.items() if name not in OTHERS for line in problems(paths)]
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
