"""The walk of docs/architecture.md, measured: which files of the product run because of one healed failure.

`WRITE_WALK=1 python -m pytest -n 0 tests/process/test_walk.py` writes the document's table anew.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support import entered
from tests.support.documents import walks
from tests.support.jobs import FOREVER, TINY, World, json_lines
from tests.support.processes import ROOT, wait_for

pytestmark = [pytest.mark.process, pytest.mark.wide]

DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- measured walk: made by tests/process/test_walk.py -->", "<!-- end of measured walk -->"
PROGRAMS = {"unicrond": 1, "unicron-agent": 3, "rank": 2}  # and how many of each there are; the third rank is killed
RUNS = 2  # of the generator: what all of them have entered is certain
MOST = 49
# On a busy machine a look at the clock, or a message that is late, leads to some files more: reading a text takes five.
UNLISTED = 9


class Quiet(World):
    """Its controller writes no lines about what it does: what writes them heals nothing."""

    @property
    def options(self) -> list[str]:
        return [*super().options, "--log-level", "error"]


def heal(folder: Path) -> tuple[dict[str, set[str]], set[str]]:
    """Program -> files that it enters from the death of one rank of three to the survivors' next steps, and not in
    an undisturbed iteration; and all files that any program enters in that time."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(entered.ENTERED, str(folder))
        window = entered.switch(folder)
        command = [sys.executable, str(TINY)]
        with Quiet(folder, 3, command=command, TINY_ITERATIONS=FOREVER, TINY_SLOW="0.05") as world:
            world.wait(lambda: world.trains([0, 1, 2], 15), "15 iterations")
            victim = world.rank(1)["pid"]
            window[0] = entered.BEFORE
            later = stepped(folder) + 20
            wait_for(lambda: stepped(folder) >= later, "undisturbed iterations")
            window[0] = entered.HEALING
            os.kill(victim, signal.SIGKILL)
            later = stepped(folder) + 2
            wait_for(lambda: stepped(folder) >= later, "the survivors step")
            window[0] = entered.DUMP
            written = lambda role: list(folder.glob(f"{role}.*.json"))  # noqa: E731
            wait_for(lambda: all(len(written(role)) >= n for role, n in PROGRAMS.items()), "all have written")
    found: dict[str, set[str]] = {}
    everything: set[str] = set()
    for role in PROGRAMS:
        seen: dict[int, set[str]] = defaultdict(set)
        for path in written(role):
            for number, names in json.loads(path.read_text()).items():
                seen[int(number)] |= set(names)
        found[role] = seen[entered.HEALING] - seen[entered.BEFORE]
        everything |= seen[entered.HEALING]
    return found, everything


def stepped(folder: Path) -> int:
    """The last iteration that slot 0 has stepped."""
    return max((line["iteration"] for line in json_lines(folder / "losses.0")), default=-1)


def table(found: dict[str, set[str]]) -> str:
    """The document's table: a row for each program and folder."""
    rows = ["| program | folder | files |", "|---|---|---|"]
    for role, paths in found.items():
        folders: dict[str, list[str]] = defaultdict(list)
        for path in sorted(paths):
            folder, _, name = path.rpartition("/")
            folders[folder].append(name.removesuffix(".py"))
        rows += [f"| {role} | `{folder}` | {', '.join(names)} |" for folder, names in folders.items()]
    return "\n".join(rows)


def listed() -> dict[str, set[str]]:
    """What the document's table has."""
    text = DOCUMENT.read_text()
    found: dict[str, set[str]] = {role: set() for role in PROGRAMS}
    for row in text[text.index(BEGIN) : text.index(END)].splitlines():
        if row.startswith("| ") and "`" in row:
            role, folder, names = (cell.strip() for cell in row.strip("| ").split("|"))
            found[role] |= {f"{folder.strip('`')}/{name}.py" for name in names.split(", ")}
    return found


def write(folder: Path) -> None:
    """Measure, and write the document's table."""
    runs = [heal(folder / f"run{number}") for number in range(RUNS)]
    certain = {role: set.intersection(*(run[role] for run, _ in runs)) for role in PROGRAMS}
    said = (
        f"From the rank's death to the survivors' next step, {max(len(files) for _, files in runs)} of the product's "
        f"files run. These {sum(map(len, certain.values()))} run only because of the failure:"
    )
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{said}\n\n{table(certain)}\n\n{END}{rest.partition(END)[2]}")


def test_one_healed_failure_enters_the_files_that_the_document_lists(tmp_path: Path) -> None:
    if "WRITE_WALK" in os.environ:
        write(tmp_path)
    known, (found, everything) = listed(), heal(tmp_path / "job")
    assert {file for file, _ in next(walks())} <= everything, "the walk in words"
    for role in PROGRAMS:
        assert known[role] <= found[role], f"{role} did not enter {sorted(known[role] - found[role])}"
    unlisted = {role: sorted(found[role] - known[role]) for role in PROGRAMS}
    assert sum(map(len, unlisted.values())) <= UNLISTED, unlisted
    assert sum(map(len, known.values())) <= MOST
