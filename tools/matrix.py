"""Tests a cell of the matrix of releases (tools/matrix.toml) in a Debian of its own, and notes what was seen.

python tools/matrix.py                 lists the cells
python tools/matrix.py CELL [TARGET]   runs `make TARGET` (test-others) there, as root; notes a success in the file
python tools/matrix.py --table         writes the README's table; --check only says whether it is up to date
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
CELLS, README = ROOT / "tools/matrix.toml", ROOT / "README.md"
PACKAGES = ("torch", "megatron-core")
BEGIN, END = "<!-- made by tools/matrix.py -->", "<!-- end of the matrix -->"
WHOLE = "test-others"
Cell = Mapping[str, str]


def cells() -> dict[str, Cell]:
    """The cells by name."""
    return tomllib.loads(CELLS.read_text())


def constraints(cell: Cell) -> str:
    """The text of a constraints file for pip."""
    return "".join(f"{package}=={cell[package]}\n" for package in PACKAGES if package in cell)


def table(found: Mapping[str, Cell]) -> str:
    """The README's table, in Markdown."""
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
    """The README with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(cells())}\n\n{END}{rest.partition(END)[2]}"


def run(name: str, target: str) -> int:
    """Runs `make TARGET` in the cell; returns its exit status."""
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
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as making:
        assert making.stdout is not None
        passed = []
        for line in making.stdout:
            print(line, end="", flush=True)
            passed += re.findall(r"(\d+) passed", line)
        status = making.wait()
    if status == 0 and target == WHOLE:
        note(name, f"{date.today().isoformat()}: {' and '.join(passed)} tests")
    return status


def note(name: str, seen: str) -> None:
    """Writes into the file what was seen in a cell."""
    before, head, after = CELLS.read_text().partition(f'["{name}"]\n')
    CELLS.write_text(before + head + re.sub(r'^seen = ".*"$', f'seen = "{seen}"', after, count=1, flags=re.MULTILINE))
    README.write_text(with_table(README.read_text()))


def main(words: list[str]) -> int:
    """The exit status."""
    match words:
        case []:
            print("\n".join(f"{name:14} {table({name: cell}).splitlines()[-1]}" for name, cell in cells().items()))
        case ["--table"]:
            README.write_text(with_table(README.read_text()))
        case ["--check"]:
            if with_table(README.read_text()) != README.read_text():
                print("README.md: the table of releases is not that of tools/matrix.toml: run tools/matrix.py --table")
                return 1
        case [name, *target] if name in cells() and len(target) < 2:
            return run(name, *target or [WHOLE])
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
