"""Benchmarks and the tests' programs put clocks and faults around functions by name: each name is there."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
WRAPPERS = ("clocked", "timed")
FILES = [path for folder in ("benchmarks", "tests/support") for path in sorted((ROOT / folder).rglob("*.py"))]


def wrapped(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """(owner, name) of each function that is replaced: WRAPPER(owner, "name", ...), or owner.name = ..."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=called), args=[owner, ast.Constant(value=str(name)), *_]):
                if called in WRAPPERS:
                    yield owner, name
            case ast.Assign(targets=[ast.Attribute(value=owner, attr=name)]):
                yield owner, name


def imported(tree: ast.Module) -> dict[str, str]:
    """The modules and names of the product that the file imports at its top, by the name that it uses."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unicron"):
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def resolve(dotted: str) -> Any:
    """A module, or a part of one. Raises AttributeError for what is not there."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        if find_spec_of(".".join(parts[:count])):
            found = importlib.import_module(".".join(parts[:count]))
            return functools.reduce(getattr, parts[count:], found)
    raise AttributeError(dotted)


def find_spec_of(name: str) -> bool:
    """Whether there is a module of this name."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def targets(path: Path) -> list[tuple[str, str]]:
    """(owner, name) where the owner is a module of the product, or a part of one."""
    tree = ast.parse(path.read_text())
    known = imported(tree)
    words = [(ast.unparse(owner), name) for owner, name in wrapped(tree)]
    return [
        (known[root] + text.removeprefix(root), name) for text, name in words if (root := text.split(".")[0]) in known
    ]


@pytest.mark.parametrize("path", [path for path in FILES if targets(path)], ids=lambda path: path.stem)
def test_what_is_wrapped_is_there(path: Path) -> None:
    for owner, name in targets(path):
        assert hasattr(resolve(owner), name), f"{owner} has no {name}"
