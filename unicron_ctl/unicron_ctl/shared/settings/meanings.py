"""Reads the meanings of settings and fields from the docstrings below them, which only the source has."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from itertools import pairwise

import msgspec


def docstrings(body: Sequence[ast.stmt]) -> dict[str, str]:
    """Return the docstring below each assignment, by the assigned name."""
    texts = {}
    for line, below in pairwise(body):
        match line, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = " ".join(text.split())
    return texts


def meanings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the meaning of each field that has a docstring. Raises OSError if the source is not installed."""
    texts: dict[str, str] = {}
    for one in reversed(kind.__mro__[: kind.__mro__.index(msgspec.Struct)]):
        (definition,) = ast.parse(inspect.getsource(one)).body
        assert isinstance(definition, ast.ClassDef)
        texts |= docstrings(definition.body)
    return texts
