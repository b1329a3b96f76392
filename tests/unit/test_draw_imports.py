"""The drawing of the imports (tools/draw_imports.py): what it refuses, and when it is out of date."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.processes import LIMIT, ROOT, SOURCES
from tests.support.rooms import LISTED, ROOMS
from tools import draw_imports as drawing

DIAMOND = [("top", "left"), ("top", "right"), ("left", "low"), ("right", "low"), ("top", "low")]


def test_each_room_stands_above_all_that_it_imports() -> None:
    assert drawing.floors(DIAMOND, ["top", "left", "right", "low", "alone"]) == {
        "alone": 0,
        "left": 1,
        "low": 0,
        "right": 1,
        "top": 2,
    }
    assert drawing.necessary(DIAMOND) == set(DIAMOND) - {("top", "low")}


def test_a_circle_is_refused_with_its_rooms() -> None:
    with pytest.raises(drawing.BadImports, match="circle: left -> low -> left"):
        drawing.floors([*DIAMOND, ("low", "left")], ["top", "left", "right", "low"])


@pytest.mark.parametrize(
    ("importer", "imported", "container", "refused"),
    [
        ("a.low", "a.top", "a", True),
        ("a.top", "a.low", "a", False),
        ("a.low", "a.other", "a", True),
        ("a.low.part", "a.other", "a", True),
        ("a.new", "a.top", "a", False),
        ("low", "top", "", True),
        ("low.part", "top", "", True),
        ("lower", "top", "", False),
    ],
)
def test_an_arrow_that_goes_up_is_refused(importer: str, imported: str, container: str, refused: bool) -> None:
    layers = {"type": "layers", "id": "rule", "layers": ["top", "one : (other)", "low"]}
    contracts = [{"type": "forbidden", "id": "no layers"}, layers | ({"containers": [container]} if container else {})]
    if refused:
        with pytest.raises(drawing.BadImports, match=f"{importer} imports {imported}, "):
            drawing.check_layers([(importer, imported)], contracts)
    else:
        drawing.check_layers([(importer, imported)], contracts)


def test_an_arrow_over_several_floors_passes_each_in_a_lane() -> None:
    arrows = {("top", "low"), ("top", "left"), ("left", "right"), ("right", "deep")}
    rows, paths = drawing.arrange({"top": 3, "left": 2, "right": 1, "low": 0, "deep": 0}, arrows)
    (long,) = (path for path in paths if path[-1] == "low")
    assert [len(row) for row in rows] == [2, 2, 2, 1]
    assert [next(number for number, row in enumerate(rows) if name in row) for name in long] == [3, 2, 1, 0]


def test_a_share_is_written_anew_only_where_it_is_far_off() -> None:
    floor_of = {"p.a": 1, "p.b": 0, "p.c": 0}
    old = "| `a` | 40 % | - |\n| `b` | 40 % | - |\n"
    made = drawing.table(Counter({("p.a", "p.b"): 2}), floor_of, {"p.a": 42.9, "p.b": 43.1, "p.c": 14.0}, old, "p")
    assert made.splitlines()[2:] == ["| `a` | 40 % | `b` |", "| `b` | 43 % | - |", "| `c` | 14 % | - |"]


def test_the_check_says_what_to_run_when_the_code_has_another_arrow(tmp_path: Path) -> None:
    """In a copy of the code: as it is, with an arrow more, drawn anew, and with one that closes a circle."""
    for package in (*SOURCES, "docs/pictures", "tools"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "setup.cfg", "docs/architecture.md", "docs/leaderboard.json"):
        shutil.copy(ROOT / file, tmp_path / file)
    roots = [tmp_path / name for name in SOURCES if name != "sbatch_templates"]

    def run(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, str(tmp_path / "tools" / "draw_imports.py"), *arguments],
            env={"PYTHONPATH": ":".join(map(str, roots)), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        return done.returncode, done.stderr

    if LISTED.keys() - ROOMS:
        assert run() == (0, ""), "the drawing has a room that was removed"
    assert run("--check") == (0, "")
    (tmp_path / "unicron_ctl" / "unicron_ctl" / "controller" / "fresh").mkdir()
    module = tmp_path / "unicron_ctl" / "unicron_ctl" / "controller" / "fresh" / "__init__.py"
    module.write_text("from unicron_ctl.controller.model import fold\n")
    code, said = run("--check")
    assert (code, said.count("\n")) == (1, 1) and "run `python tools/draw_imports.py`" in said
    assert run() == (0, "")
    assert run("--check") == (0, "")
    assert "| `fresh` | 0 % | `model` |" in (tmp_path / "docs" / "architecture.md").read_text()
    upward = tmp_path / "unicron_ctl" / "unicron_ctl" / "controller" / "model" / "fold.py"
    upward.write_text(upward.read_text() + "\nfrom unicron_ctl.controller import fresh\n")
    for arguments in ([], ["--check"]):
        code, said = run(*arguments)
        assert (code, said.count("\n")) == (1, 1) and "circle: " in said and "fresh" in said
    upward.write_text(upward.read_text().replace("import fresh", "import unicrond"))
    code, said = run("--check")
    assert (code, said.count("\n")) == (1, 1) and "model imports unicron_ctl.controller.unicrond, " in said
    document = tmp_path / "docs" / "architecture.md"
    upward.write_text(upward.read_text().replace("from unicron_ctl.controller import unicrond", ""))
    document.write_text(document.read_text().replace("<!-- end of imports -->", ""))
    code, said = run("--check")
    assert (code, said.count("\n")) == (1, 1) and "put them back" in said
