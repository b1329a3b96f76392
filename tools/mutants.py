"""Changes one operator or constant of a module at a time and runs its unit tests: a mutant that no test notices
survives. `make test-mutants` runs it; tools/equal_mutants.toml names the mutants that change nothing.

mutmut and cosmic-ray start pytest anew for each mutant, and its imports take longer than the tests. Here pytest
collects the tests once, and each mutant is a fork of it in which one function has another code. Tables, defaults and
constants of modules and classes are not changed.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import os
import random
import signal
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from _pytest.main import pytest_runtestloop as run_tests

ROOT = Path(__file__).resolve().parent.parent
PARTS: dict[str, list[str]] = tomllib.loads((ROOT / "tools/mutants.toml").read_text())["tests"]
EQUAL: dict[str, dict[str, str]] = tomllib.loads((ROOT / "tools/equal_mutants.toml").read_text())
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add,
}  # fmt: skip
LIMIT_SECONDS = 300.0  # for the tests without a mutant
LIMIT_TIMES, LIMIT_LEAST = 20, 30.0  # a mutant that takes so many times as long, and so many seconds, counts as killed


@dataclass(frozen=True)
class Mutant:
    """index: number of the change in the file. change: "Lt -> LtE" and, on a line with several of them, which."""

    path: str
    index: int
    line: int
    text: str
    change: str


class Mutator(ast.NodeTransformer):
    """Lists the places in functions that can be changed, and changes the one of number `wanted`."""

    def __init__(self, wanted: int = -1) -> None:
        self.wanted, self.inside, self.places = wanted, 0, list[tuple[int, str]]()

    def _changes(self, line: int, change: str) -> bool:
        if self.inside:
            self.places.append((line, change))
        return self.inside > 0 and len(self.places) - 1 == self.wanted

    def _other(self, line: int, operator: ast.AST) -> ast.AST:
        other = SWAPS.get(type(operator), type(operator))
        changes = other is not type(operator) and self._changes(line, f"{type(operator).__name__} -> {other.__name__}")
        return other() if changes else operator

    def visit(self, node: ast.AST) -> ast.AST:
        match node:
            case ast.FunctionDef() | ast.Lambda():
                self.inside += 1
                body = [node.body] if isinstance(node, ast.Lambda) else node.body
                changed = [self.visit(one) for one in body]
                node.body = changed[0] if isinstance(node, ast.Lambda) else changed  # type: ignore[assignment]
                self.inside -= 1
                return node
            case ast.JoinedStr() | ast.Assert():  # words for people, and what the type checker needs
                return node
            case ast.AnnAssign():
                node.value = node.value and self.visit(node.value)  # type: ignore[assignment]
                return node
            case ast.Constant(bool(value)) if self._changes(node.lineno, f"{value} -> {not value}"):
                return ast.copy_location(ast.Constant(not value), node)
            case ast.Constant(int(value) | float(value)) if type(value) is not bool:
                changes = self._changes(node.lineno, f"{value} -> {value + 1}")
                return ast.copy_location(ast.Constant(value + 1), node) if changes else node
            case ast.Compare():
                node.ops = [self._other(node.lineno, one) for one in node.ops]  # type: ignore[misc]
            case ast.BoolOp() | ast.BinOp() | ast.AugAssign():
                node.op = self._other(node.lineno, node.op)  # type: ignore[assignment]
        return self.generic_visit(node)


def mutants(path: str) -> list[Mutant]:
    """All mutants of a file but the equal ones. Ends the program where one of these is in the file no more."""
    source, finder = (ROOT / path).read_text(), Mutator()
    finder.visit(ast.parse(source))
    lines, seen, found = source.splitlines(), dict[tuple[int, str], int](), list[tuple[str, Mutant]]()
    for index, (line, change) in enumerate(finder.places):
        count = seen[line, change] = seen.get((line, change), 0) + 1
        one = Mutant(path, index, line, lines[line - 1].strip(), change + (f" ({count})" if count > 1 else ""))
        found.append((f"{one.text} | {one.change}", one))
    equal = EQUAL.get(path, {})
    if gone := equal.keys() - dict(found).keys():
        sys.exit(f"tools/equal_mutants.toml: {path} has no mutant {min(gone)}")
    return [one for name, one in found if name not in equal]


def codes(code: CodeType) -> Iterator[CodeType]:
    """The code of all functions and classes in a compiled module."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from codes(inner)


@cache
def functions(module: str) -> list[FunctionType]:
    """The functions that a module defines, wherever they are: methods, properties, lambdas in a table."""
    importlib.import_module(module)
    gc.unfreeze()  # tests/conftest.py freezes what is imported, and frozen objects are not listed
    return [one for one in gc.get_objects() if isinstance(one, FunctionType) and one.__module__ == module]


def module_name(path: str) -> str:
    return path.partition("/")[2].removesuffix(".py").replace("/", ".")


def apply(mutant: Mutant) -> None:
    """Gives the functions of the imported module the mutant's code."""
    tree = ast.fix_missing_locations(Mutator(mutant.index).visit(ast.parse((ROOT / mutant.path).read_text())))
    new = {(code.co_qualname, code.co_firstlineno): code for code in codes(compile(tree, mutant.path, "exec"))}
    for function in functions(module_name(mutant.path)):
        code = function.__code__
        function.__code__ = new.get((code.co_qualname, code.co_firstlineno), code)


class Runner:
    """A pytest plugin that runs the collected tests once for each mutant. :attr:`alive` are those that pass them."""

    def __init__(self, drawn: list[Mutant], workers: int) -> None:
        self.drawn, self.workers, self.alive = drawn, workers, list[Mutant]()
        self.running: dict[int, tuple[Mutant | None, float]] = {}
        self.limit = LIMIT_SECONDS

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        began = time.monotonic()
        self._start(None, session)
        while self.running:  # the tests must pass as it is
            self._collect()
        self.limit = max(LIMIT_LEAST, LIMIT_TIMES * (time.monotonic() - began))
        if None not in self.alive:
            pytest.exit("the tests fail without a mutant", 1)
        self.alive.clear()
        for path in {mutant.path for mutant in self.drawn}:
            functions(module_name(path))  # for all that are forked
        for mutant in self.drawn:
            while len(self.running) >= self.workers:
                self._collect()
            self._start(mutant, session)
        while self.running:
            self._collect()
        return True

    def _start(self, mutant: Mutant | None, session: pytest.Session) -> None:
        pid = os.fork()
        if pid:
            self.running[pid] = mutant, time.monotonic()
            return
        os.setsid()
        failed = True
        try:
            if mutant is not None:
                apply(mutant)
            run_tests(session)
            failed = session.testsfailed > 0
        finally:
            os._exit(failed)

    def _collect(self) -> None:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in self.running:
            mutant, _ = self.running.pop(pid)
            if status == 0:
                self.alive.append(mutant)  # type: ignore[arg-type]
                if mutant is not None:
                    print(f"\n{mutant.path}:{mutant.line}: {mutant.text} | {mutant.change}", flush=True)
            return
        for late, (_, began) in self.running.items():
            if time.monotonic() - began > self.limit:
                os.killpg(late, signal.SIGKILL)
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="paths of tools/mutants.toml; all by default")
    parser.add_argument("--sample", type=int, help="this many mutants of each part, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="mutants that run side by side")
    options = parser.parse_args()
    os.chdir(ROOT)
    total = alive = 0
    for part in options.parts or PARTS:
        drawn = mutants(part)
        if options.sample is not None:
            drawn = random.Random(options.seed).sample(drawn, min(options.sample, len(drawn)))
        pid = os.fork()  # the modules of one part are not those of the next
        if pid == 0:
            runner = Runner(drawn, options.workers)
            status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *PARTS[part]], [runner])
            os._exit(min(len(runner.alive), 200) if status == 0 else 255)
        lives = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not 0 <= lives <= 200:
            sys.exit(f"{part}: its tests fail without a mutant, or cannot be run")
        print(f"{part}: {len(drawn) - lives} of {len(drawn)} mutants killed", flush=True)
        total, alive = total + len(drawn), alive + lives
    print(f"{total - alive} of {total} mutants killed ({(total - alive) / max(total, 1):.1%})")
    sys.exit(alive > total * 0.05)


if __name__ == "__main__":
    main()
