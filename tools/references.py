"""``python tools/references.py``: checks that what docstrings and comments refer to is there.

A reference such as ``:func:`name``` names a part of its own file, or of the module or class in front of the dot. A path
in backticks is that of a file or folder.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = (
    "benchmarks",
    "detector",
    "planner",
    "sbatch_templates",
    "slurm_plugin",
    "tests",
    "tools",
    "transition",
    "unicron",
    "unicron_ctl",
)
ROOTS = sorted({path.parent.parent.name for path in ROOT.glob("*/unicron*/__init__.py")})  # of one package each
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)}|docs|unicron_\w+)/[\w/.-]+)`")
REFERENCE = re.compile(r":(mod|class|func|meth|data|attr):`~?([\w.]+)`")


@dataclass
class Module:
    """One source file. path: its dotted name. names: all that is defined or imported in it. whole: the modules of which
    it imports everything."""

    file: Path
    path: str
    text: str
    names: set[str] = field(default_factory=set)
    whole: list[str] = field(default_factory=list)


def read(file: Path) -> Module:
    """The module in a file, with the names in it."""
    text = file.read_text()
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] in ROOTS else parts
    module = Module(file, ".".join(part for part in parts if part != "__init__"), text)
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                module.names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                module.names.add(name)
            case ast.ImportFrom(module=str(whole), names=[ast.alias(name="*")]):
                module.whole.append(whole)
            case ast.Import(names=imported) | ast.ImportFrom(names=imported):
                module.names |= {(each.asname or each.name).split(".")[0] for each in imported}
    return module


def is_there(path: str) -> bool:
    """Whether a path leads somewhere, from the repository's root or as it is imported."""
    return any((ROOT / root / path).exists() for root in ("", *ROOTS))


def exists(kind: str, name: str, module: Module, modules: list[Module]) -> bool:
    """Whether a reference in a module's text names something."""
    if name.startswith("unicron.") and name.count(".") == 1:  # what people import
        return f'"{name.split(".")[1]}"' in (ROOT / "unicron/unicron/__init__.py").read_text()
    if kind == "mod":
        end = name.lstrip(".")
        return any(f".{each.path}".endswith(f".{end}") for each in modules) or is_there(end.replace(".", "/"))
    owner, _, last = name.rpartition(".")
    if not owner:
        return last in module.names or any(each.path == "unicron" and last in each.names for each in modules)
    inner = owner.rpartition(".")[2]
    owners = [each for each in modules if f".{each.path}".endswith(f".{owner}") or inner in each.names]
    return any(last in each.names for each in owners) or owner in sys.stdlib_module_names


def mistakes() -> Iterator[str]:
    """One line for each reference to what is not there."""
    modules = [read(file) for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    names = {module.path: module.names for module in modules}
    for module in modules:
        module.names.update(*(names.get(whole, ()) for whole in module.whole))
    for module in modules:
        for number, line in enumerate(module.text.splitlines(), 1):
            for kind, name in REFERENCE.findall(line):
                if not exists(kind, name, module, modules):
                    yield f"{module.file.relative_to(ROOT)}:{number}: :{kind}:`{name}` names nothing: mend it"
            for path in PATH.findall(line):
                if not is_there(path):
                    yield f"{module.file.relative_to(ROOT)}:{number}: there is no `{path}`: mend it"


def main() -> None:
    """Prints the mistakes; exits with 1 if there are any."""
    found = list(mistakes())
    print("\n".join(found) if found else "all references name something")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
