"""The imports of a zygote, and ranks whose environment differs from what the imports have read."""

from __future__ import annotations

import ast
import gc
import importlib.machinery
import os
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest

from unicron_detector.processes import zygote
from unicron_detector.processes.zygote import (
    Files,
    first_difference,
    leading_imports,
    restore,
    watch_environment,
    without_collector,
)


def imports(source: str) -> list[str]:
    return [ast.unparse(statement) for statement in leading_imports(source, "script.py")]


def test_imports_are_taken_in_their_order_up_to_the_first_statement_that_does_something():
    source = '''"""A script."""
from __future__ import annotations

import os, sys
SIZE: int = 3
from a.b import (c, d as e)
NAMES = {"x": [1, -2.5, None]}
from . import sibling
print("now")
import late
'''
    assert imports(source) == ["import os, sys", "from a.b import c, d as e", "from . import sibling"]


@pytest.mark.parametrize(
    "first", ["x = f()", "if True:\n    pass", "x: int", "try:\n    import a\nfinally:\n    pass", "f()"]
)
def test_anything_else_ends_it(first):
    assert imports(f"import one\n{first}\nimport two\n") == ["import one"]


def test_a_constant_names_modules_that_the_script_imports_late():
    assert imports('import a\nUNICRON_PRELOAD = ("b.c", "d")\nimport e\n') == ["import a", "import b.c, d", "import e"]
    assert imports('UNICRON_PRELOAD = "b"\nimport e\n') == ["import e"], "a text is no tuple of names"
    with pytest.raises(SyntaxError):
        imports('UNICRON_PRELOAD = ("no name",)\n')


def test_what_was_read_must_be_what_the_rank_has():
    mine = {"HOME": "/h", "OMP_NUM_THREADS": "1"}
    assert first_difference({"HOME": "/h", "RANK": None}, mine, mine | {"OTHER": "x"}) is None
    assert first_difference({"RANK": None}, mine, mine | {"RANK": "0"}) == "RANK"
    assert first_difference({"HOME": "/h"}, mine, {"OMP_NUM_THREADS": "1"}) == "HOME"
    assert first_difference({}, mine, mine | {"OMP_NUM_THREADS": "2"}) == "OMP_NUM_THREADS", "C code has read it"
    assert first_difference({}, mine, mine | {"LD_PRELOAD": "x.so"}) == "LD_PRELOAD"


def test_reads_and_writes_are_told_apart(monkeypatch):
    monkeypatch.setattr(zygote.Reads, "seen", {})
    monkeypatch.setattr(zygote.Reads, "written", set())
    monkeypatch.setenv("GIVEN", "1")
    with watch_environment():
        os.environ.get("MISSING")
        os.environ["OWN"] = "mine"
        assert os.environ["OWN"] == "mine" and os.getenv("GIVEN") == "1" and "MISSING" not in os.environ
        del os.environ["OWN"]
    os.environ.get("LATER")
    assert zygote.Reads.seen == {"MISSING": None, "GIVEN": "1"} and zygote.Reads.written == {"OWN"}


def test_imports_are_made_without_the_collector_unless_they_choose_otherwise():
    before = gc.get_threshold()
    try:
        with without_collector():
            assert gc.get_threshold()[0] == 0 and gc.isenabled()
        assert gc.get_threshold() == before
        with without_collector():
            gc.set_threshold(123)
        assert gc.get_threshold()[0] == 123
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize(("binding", "thawed"), [("nanobind", 1), ("builtins", 0)])
def test_where_nanobind_counts_what_is_left_the_last_collection_sees_all(monkeypatch, binding, thawed):
    module, seen = ModuleType("bound"), []
    module.__loader__ = importlib.machinery.ExtensionFileLoader("bound", "bound.so")
    module.function = type("nb_func", (), {"__module__": binding})()
    monkeypatch.setattr(sys, "modules", {"sys": sys, "bound": module, "odd": object()})
    monkeypatch.setattr(gc, "unfreeze", lambda: seen.append(1))
    with pytest.raises(SystemExit):
        zygote.exit_process(3)
    assert len(seen) == thawed


def test_a_rank_gets_its_environment_and_what_the_imports_wrote():
    mine = {"KEPT": "1", "CHANGED": "old", "GONE": "x"}
    restore(mine, {"KEPT": "1", "CHANGED": "new", "RANKS": "r", "TAKEN": "t"}, {"SET": "by it", "TAKEN": None})
    assert mine == {"KEPT": "1", "CHANGED": "new", "RANKS": "r", "SET": "by it"}


def test_a_file_that_changes_is_seen_and_so_is_one_that_changed_while_it_was_read(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("one")
    os.utime(script, (1, 1))
    files = Files()
    files.add(str(script))
    files.add_modules()
    assert files.first_change(time.monotonic()) is None
    script.write_text("two")
    os.utime(script, (1, 1))
    assert files.first_change(time.monotonic()) is None, "its size, time and inode are the same"
    script.write_text("three")
    assert files.first_change(time.monotonic()) == str(script)
    script.unlink()
    assert files.first_change(time.monotonic()) == str(script)
    late = Files()
    (tmp_path / "late.py").write_text("x")
    late.add(str(tmp_path / "late.py"))
    late.add_modules()
    assert late.first_change(time.monotonic()) == str(tmp_path / "late.py")


def test_joint_requests_cost_one_check_and_an_edit_before_any_of_them_is_seen(tmp_path, monkeypatch):
    """Defect: all files were checked again for each rank of a node, which takes a second on a shared file system."""
    script, looks, now = tmp_path / "script.py", [], [10.0]
    script.write_text("one")
    os.utime(script, (1, 1))
    files = Files()
    files.add(str(script))
    files.add_modules()
    plain = zygote.stamp

    def stamp(path):
        looks.extend(now if path == str(script) else [])
        return plain(path)

    monkeypatch.setattr(zygote, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(zygote, "stamp", stamp)
    assert [files.first_change(asked) for asked in (9.0, 9.0, 9.5)] == [None] * 3 and looks == [10.0]
    now[0] = 11.0
    assert files.first_change(9.9) is None and looks == [10.0], "it was asked for before that look began"
    script.write_text("another")
    assert files.first_change(10.0) == str(script) and looks == [10.0, 11.0]
    assert files.first_change(10.5) == str(script) and looks == [10.0, 11.0]
