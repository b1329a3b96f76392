"""The meaning of each setting: the docstring below it. Python drops those, so they are read from the source."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from itertools import pairwise

import msgspec


def docstrings(body: Sequence[ast.stmt]) -> dict[str, str]:
    """The docstring below each assignment, by the assigned name."""
    found = {}
    for line, below in pairwise(body):
        target = (
            line.target
            if isinstance(line, ast.AnnAssign)
            else line.targets[0]
            if isinstance(line, ast.Assign)
            else None
        )
        text = below.value if isinstance(below, ast.Expr) else None
        if isinstance(target, ast.Name) and isinstance(text, ast.Constant) and isinstance(text.value, str):
            found[target.id] = " ".join(text.value.split())
    return found


def meanings(section: type[msgspec.Struct]) -> dict[str, str]:
    """The meaning of each field of a section. Raises OSError where the source is not installed."""
    (definition,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    return docstrings(definition.body)
