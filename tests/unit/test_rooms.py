"""The tests of a room behind the fence stand in folders of its own: who removes the room removes them with it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import metadata
from itertools import pairwise

import pytest

from tests.support.processes import ROOT
from tests.support.rooms import ROOMS, homes

TESTS = ROOT / "tests"
# The private Slurm, a part of the lab, on which these run. tests/support may use any room.
CLUSTER = ".".join(("unicron_ctl", "lab", "cluster"))
ON_CLUSTER = tuple(TESTS / folder for folder in ("process", "slurm", "unit/benchmarks"))


def named(node: ast.AST) -> str:
    """The last word of a name, or a text."""
    match node:
        case ast.Name(id=str(name)) | ast.Attribute(attr=str(name)) | ast.Constant(value=str(name)):
            return name
    return ""


def uses(source: str) -> Iterator[tuple[str, str]]:
    """("name", what a module imports, patches or runs by a dotted name) and ("command", what it gives `unicronctl`)."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                yield from (("name", each.name) for each in node.names)
            case ast.ImportFrom(module=str(module)):
                yield from (("name", f"{module}.{each.name}") for each in node.names)
            case ast.Constant(value=str(text)):
                yield "name", text
            case ast.Call():
                given = [each.value if isinstance(each, ast.Starred) else each for each in (node.func, *node.args)]
                words = [one for each in given for one in (each.elts if isinstance(each, ast.List) else [each])]
                pairs = pairwise(map(named, words))
                yield from (("command", word) for program, word in pairs if program.lower() == "unicronctl")


def of_room(room: metadata.EntryPoint, found: set[tuple[str, str]], cluster: bool) -> list[str]:
    """Those that are of a room. cluster: the private Slurm may be used."""
    folders = [".".join(home.relative_to(ROOT).parts) for home in homes(room.name)]
    own = tuple(f"{each}." for each in (room.module, *folders))
    return [
        text
        for kind, text in found
        if (kind == "command" and text in room.load().COMMANDS)
        or (f"{text}.".startswith(own) and not (cluster and f"{text}.".startswith(f"{CLUSTER}.")))
    ]


def test_no_test_outside_of_a_rooms_folders_uses_the_room() -> None:
    for path in sorted(TESTS.rglob("*.py")):
        found = set(uses(path.read_text())) if not path.is_relative_to(TESTS / "support") else set()
        cluster = any(path.is_relative_to(folder) for folder in ON_CLUSTER)
        for name, room in ROOMS.items():
            if not any(path.is_relative_to(home) for home in homes(name)):
                assert not of_room(room, found, cluster), path


def test_each_room_has_tests() -> None:
    assert [name for name in ROOMS if not any(path for home in homes(name) for path in home.rglob("test_*.py"))] == []


@pytest.mark.parametrize(
    ("line", "is_seen"),
    [
        ("from {module} import x", True),
        ("import {module}.x", True),
        ("from unicron_ctl import {name}", True),
        ("def test():\n    from {module}.x import y", True),
        ("patch.setattr('{module}.x.y', 1)", True),
        ("from tests.unit.unicron_ctl.{name}.test_x import y", True),
        ("unicronctl('{command}', 'x')", True),
        ("call(*UNICRONCTL, '{command}')", True),
        ("call('unicronctl', '{command}')", True),
        ("CliRunner().invoke(cli.unicronctl, ['{command}', 'x'])", True),
        ("from {module}er import x", False),
        ("unicronctl('status', '{command}')", False),
        ("job.ask('{command}')", False),
    ],
)
def test_a_use_is_seen(line: str, is_seen: bool) -> None:
    for name, room in ROOMS.items():
        text = line.format(name=name, module=room.module, command=min(room.load().COMMANDS))
        assert bool(of_room(room, set(uses(text)), cluster=True)) == is_seen, text


def test_the_private_cluster_is_for_those_who_run_on_it() -> None:
    found = set(uses(f"from {CLUSTER} import LocalCluster"))
    for room in ROOMS.values():
        assert not of_room(room, found, cluster=True)
        assert bool(of_room(room, found, cluster=False)) == CLUSTER.startswith(f"{room.module}.")


def test_no_test_file_imports_another() -> None:
    line = re.compile(r"^\s*(?:from|import) tests\.(?:unit|process|slurm)\b", re.MULTILINE)
    found = [path for path in TESTS.rglob("*.py") if line.search(path.read_text())]
    assert not found, "what two of them need stands in tests/support"
