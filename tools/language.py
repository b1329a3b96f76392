"""Checks the names and docstrings of the product; `make lint` runs it.

Docstrings, those below a field too, must begin with a subject or a verb. Those of classes must not explain fields: each
field has a docstring line of its own, which is a sentence with its full stop. Functions must not be
named by a verb alone, nothing by a past participle alone, and no two modules of one package may have the same name.
Tests and scripts for the user are not looked at. With paths as arguments, only those are checked.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(str(path.parent.relative_to(ROOT)) for path in ROOT.glob("*/unicron*/__init__.py"))
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
STARTS = re.compile(r"(As|Of|The same|Those|It|Whose|What|How|Who|Where|Whom)\b|\.\.\.")
FIELDS = re.compile(r"(?:^|[.;)`] |\n)\s*`?(\w+)`?(?:(?:,| and) `?\w+`?)*: ")
VERBS = frozenset(
    "ask begin due enter give hear keep know leave look say settle take tell turn wait".split(),
)
# "open", "read" and "set" are left out: they are verbs as well. So are -ed words that name a thing.
IRREGULAR = frozenset(
    "begun bound broken brought built bought caught chosen come done drawn driven fallen felt forgotten found frozen"
    " given gone grown heard held hidden kept known laid left lent lost made meant met paid parted run said seen sent"
    " shown shut slept sold sought spent spoken stolen struck sworn taken taught"
    " thought thrown told torn understood woken worn"
    " written".split(),
)
NOUNS = frozenset("bed bound deed embed exceed feed heed need proceed run seed shed sled speed weed".split())


def problems(path: Path) -> Iterator[str]:
    """Each problem of one file, as "path:line: what"."""
    tree = ast.parse(path.read_text())
    for line, name in names(tree):
        yield f"{path.relative_to(ROOT)}:{line}: {name} is a past participle: name the thing"
    for node in ast.walk(tree):
        if not isinstance(node, Documented):
            continue
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
        below = [(f"{path.relative_to(ROOT)}:{line}", text) for line, text in docstrings_below_fields(node)]
        for place, text in [(where, ast.get_docstring(node) or ""), *below]:
            if found := STARTS.match(text):
                yield f'{place}: the docstring begins with "{found[0]}": begin with a subject or a verb'
        for place, text in below:
            if not text.rstrip().endswith((".", "!", "?", ":")):
                yield f"{place}: the docstring does not end with a full stop"
        if isinstance(node, ast.ClassDef):
            for field in fields_in_docstring(node):
                yield f"{where}: the docstring of {node.name} explains {field}: a field has its own docstring line"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.lstrip("_") in VERBS:
            yield f"{where}: {node.name}() does not say what it acts on"


def docstrings_below_fields(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[tuple[int, str]]:
    """The line and text of each docstring below an assignment in the node's body."""
    for line, below in pairwise(node.body):
        match line, below:
            case ast.AnnAssign() | ast.Assign(), ast.Expr(value=ast.Constant(value=str(text))):
                yield below.lineno, text


def fields_in_docstring(node: ast.ClassDef) -> list[str]:
    """The fields and attributes of a class that its docstring explains in a paragraph, as "name: ...".

    A numpydoc section has its colon after a space, and an example its own colon after `>>>`.
    """
    fields = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    fields |= {
        one.attr.lstrip("_")
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and ast.unparse(one.value) == "self"
    }
    return [name for name in FIELDS.findall(ast.get_docstring(node) or "") if name in fields]


def participle(name: str) -> bool:
    """Whether the word is a past participle and nothing else."""
    word = name.lower()
    return "_" not in word and word not in NOUNS and (word in IRREGULAR or (word.endswith("ed") and len(word) > 4))


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Classes, functions and module constants that a past participle names, with their lines.

    Properties and functions that answer yes or no may be called `closed` or `finished`, as in the standard library;
    and a record of the log has a noun with it, as `NodeLost`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            if len(re.findall(r"[A-Z][a-z]*", node.name)) == 1 and participle(node.name.strip("_")):
                yield node.lineno, node.name
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {ast.unparse(one) for one in node.decorator_list}
            says_yes_or_no = node.returns is not None and ast.unparse(node.returns) == "bool"
            free = says_yes_or_no or decorators & {"property", "cached_property", "functools.cached_property"}
            if participle(node.name.strip("_")) and not free:
                yield node.lineno, node.name
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and participle(target.id.strip("_")):
                yield node.lineno, target.id


def twins(package: str) -> Iterator[str]:
    """The module names that a package has twice."""
    names = Counter(path.stem for path in (ROOT / package).rglob("*.py") if path.stem != "__init__")
    for name, count in names.items():
        if count > 1:
            yield f"{package}: {count} modules are called {name}"


def main(paths: list[str]) -> int:
    found = [line for package in PACKAGES for line in twins(package)]
    for root in paths or PACKAGES:
        top = (ROOT / root).resolve()
        for path in [top] if top.is_file() else sorted(top.rglob("*.py")):
            found += problems(path)
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
