"""Checks the names and docstrings of the product; `make lint` runs it.

Docstrings must begin with a subject or a verb, and those of classes not with a list of fields. Functions must not be
named by a verb alone, and no two modules of one package may have the same name. Tests and scripts for the user are not
looked at.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(str(path.parent.relative_to(ROOT)) for path in ROOT.glob("*/unicron*/__init__.py"))
STARTS = re.compile(r"(As|Of|The same|Those|It|Whose)\b")
FIELDS = re.compile(r"\w+(, \w+)*: ")
VERBS = frozenset(
    "ask begin due enter give hear keep know leave look say settle take tell turn wait".split(),
)


def problems(path: Path) -> Iterator[str]:
    """Each problem of one file, as "path:line: what"."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
        if found := STARTS.match(ast.get_docstring(node) or ""):
            yield f'{where}: the docstring begins with "{found[0]}": begin with a subject or a verb'
        if isinstance(node, ast.ClassDef) and FIELDS.match(ast.get_docstring(node) or ""):
            yield f"{where}: the docstring of {node.name} begins with its fields: say first what it is"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.lstrip("_") in VERBS:
            yield f"{where}: {node.name}() does not say what it acts on"


def twins(package: str) -> Iterator[str]:
    """The module names that a package has twice."""
    names = Counter(path.stem for path in (ROOT / package).rglob("*.py") if path.stem != "__init__")
    for name, count in names.items():
        if count > 1:
            yield f"{package}: {count} modules are called {name}"


def main() -> int:
    found = [line for package in PACKAGES for line in twins(package)]
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            found += problems(path)
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
