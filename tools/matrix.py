"""Tests a cell of the matrix of releases (tools/matrix.toml) in a Debian of its own, and notes what was seen.

python tools/matrix.py                 lists the cells
python tools/matrix.py CELL            runs all three tiers there, as root; notes in the file what passed
python tools/matrix.py CELL TARGET     runs `make TARGET` there, as root
python tools/matrix.py --table         writes the table in docs/install.md; --check only says whether it is up to date
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CELLS, PAGE = ROOT / "tools/matrix.toml", ROOT / "docs/install.md"
PACKAGES = ("torch", "megatron-core")
BEGIN, END = "<!-- made by tools/matrix.py -->", "<!-- end of the matrix -->"
TIERS = {"unit": "test-unit", "Slurm": "test-slurm", "process": "test-process"}
Cell = Mapping[str, str]


def cells() -> dict[str, Cell]:
    """The cells by name."""
    return tomllib.loads(CELLS.read_text())


def constraints(cell: Cell) -> str:
    """The text of a constraints file for pip."""
    return "".join(f"{package}=={cell[package]}\n" for package in PACKAGES if package in cell)


def table(found: Mapping[str, Cell]) -> str:
    """The table of docs/install.md, in Markdown."""
    lines = ["| Slurm | Python | torch | Megatron-core | last seen |", "|---|---|---|---|---|"]
    for cell in found.values():
        words = [
            cell["slurm"],
            cell["python"],
            cell["torch"],
            cell.get("megatron-core", "none"),
            cell["seen"] or "not yet",
        ]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """The PAGE with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(cells())}\n\n{END}{rest.partition(END)[2]}"


def make(name: str, target: str) -> tuple[int, str]:
    """Runs `make TARGET` in the cell; returns its exit status, and its last line with a result of pytest."""
    cell, file = cells()[name], f".matrix/{name}.txt"
    (ROOT / file).parent.mkdir(exist_ok=True)
    if not (ROOT / file).exists() or (ROOT / file).read_text() != constraints(cell):
        (ROOT / file).write_text(constraints(cell))  # a new one has make install all anew
    words = [f"VENV=.venv-{name}", f"CONSTRAINTS={file}", f"PYTHON=python{cell['python']}"]
    root = (
        []
        if cell["suite"] == platform.freedesktop_os_release().get("VERSION_CODENAME")
        else ["tools/debian-root.sh", cell["suite"]]
    )
    command = [*root, "make", "system-test", "venv", "plugin", target, *words]
    last = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as making:
        assert making.stdout is not None
        for line in making.stdout:
            print(line, end="", flush=True)
            last = line if re.match(r"=+ .*\d+ (passed|failed|error).* in [\d.]+s", line) else last
        status = making.wait()
    return status, last


def passed(result: str) -> tuple[int, int]:
    """How many tests passed, and of how many, by pytest's last line."""
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", result)}
    return counts.get("passed", 0), sum(counts.values())


def run(name: str) -> int:
    """Runs both tiers in the cell, the second whatever the first said; notes what passed; returns the exit status."""
    made = {tier: make(name, target) for tier, target in TIERS.items()}
    seen = [f"{tier} {' of '.join(map(str, passed(result)))}" for tier, (_, result) in made.items() if result]
    if len(seen) == len(made):  # else a tier has not even begun, and what was seen before still counts
        note(name, f"{date.today().isoformat()}: {', '.join(seen)}")
    return max(status for status, _ in made.values())


def note(name: str, seen: str) -> None:
    """Writes into the file what was seen in a cell."""
    before, head, after = CELLS.read_text().partition(f'["{name}"]\n')
    CELLS.write_text(before + head + re.sub(r'^seen = ".*"$', f'seen = "{seen}"', after, count=1, flags=re.MULTILINE))
    PAGE.write_text(with_table(PAGE.read_text()))


def main(words: list[str]) -> int:
    """The exit status."""
    match words:
        case []:
            print("\n".join(f"{name:14} {table({name: cell}).splitlines()[-1]}" for name, cell in cells().items()))
        case ["--table"]:
            PAGE.write_text(with_table(PAGE.read_text()))
        case ["--check"]:
            if with_table(PAGE.read_text()) != PAGE.read_text():
                print("docs/install.md: the table is not that of tools/matrix.toml: run tools/matrix.py --table")
                return 1
        case [name] if name in cells():
            return run(name)
        case [name, target] if name in cells():
            return make(name, target)[0]
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
