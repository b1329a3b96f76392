"""The table of private names fits what is installed, a release that differs is one line, and no other file has such a
name."""

from __future__ import annotations

import ast
import configparser
import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from unicron_transition.seams import megatron_core, table
from unicron_transition.seams.table import (
    C10D,
    MEGATRON_CORE,
    MEGATRON_LM,
    TORCH,
    TORCH_CHECKPOINTS,
    TORCH_DTENSORS,
    TORCH_MODELS,
    Seam,
    UnsupportedLayout,
)

ROOT = Path(__file__).resolve().parents[4]
# Public names of torch that begin with an underscore only by accident of `import`, or belong to Python and the system.
PYTHONS_OWN = {"_Unpickler", "_exit", "_replace", "_asdict", "_fields", "_Environ", "_run_module_as_main"}


def test_the_table_fits_what_is_installed():
    for seam in (*TORCH, *MEGATRON_CORE):
        if seam.at(release(seam)) != table.NOT_THERE:
            importlib.import_module(seam.module)
    for rows in (TORCH, MEGATRON_CORE):
        assert table.difference(rows, release(rows[0])) is None


def release(seam: Seam) -> str:
    """The installed release of the package that the row is about."""
    package = "megatron-core" if seam.module.startswith("megatron") else "torch"
    importlib.import_module(package.replace("-", "."))
    return table.installed_release(package)


def test_the_releases_of_the_environment_are_known():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert set(pinned) == set(table.KNOWN_RELEASES) and all(
        found in table.KNOWN_RELEASES[name] for name, found in pinned.items()
    )


def test_what_is_required_is_the_oldest_known_release_or_newer():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options.extras_require"]["train"].strip().splitlines()
    least = dict(line.partition(";")[0].split(">=") for line in lines if line.split(">=")[0] in table.KNOWN_RELEASES)
    assert set(least) == set(table.KNOWN_RELEASES)
    for package, oldest in least.items():
        first = table.KNOWN_RELEASES[package][0]
        assert table.numbers(first)[: len(oldest.split("."))] == table.numbers(oldest)


@pytest.mark.parametrize(
    ("release", "parameters"), [("0.16.1", "a"), ("0.17.0", "a b"), ("0.17.9+cpu", "a b"), ("0.18.2", table.NOT_THERE)]
)
def test_a_row_has_a_column_for_each_release(release, parameters):
    row = Seam("megatron.core", "name", "a", "", {"0.17": "+ b", "0.18": table.NOT_THERE})
    assert row.at(release) == parameters


def test_columns_come_in_their_order():
    for row in (*TORCH, *TORCH_MODELS, *TORCH_DTENSORS, *TORCH_CHECKPOINTS, *MEGATRON_CORE, *MEGATRON_LM):
        assert [*row.since] == sorted(row.since, key=table.numbers)


def test_a_release_that_is_not_known_is_refused_and_tried_where_the_user_says_so(monkeypatch):
    row = Seam(C10D, "_set_pg_timeout", "timeout group", "")
    monkeypatch.setattr("torch.__version__", "9.1.0")
    with pytest.raises(UnsupportedLayout, match=r"torch \(9\.1\.0\): UNICRON_TRUST_VERSIONS=1"):
        table.check("torch", [row], needed=[C10D])
    monkeypatch.setenv(table.TRUST, "1")
    table.check("torch", [row], needed=[C10D])
    with pytest.raises(UnsupportedLayout, match="_set_pg_timeout takes"):
        table.check("torch", [row._replace(parameters="timeout")], needed=[C10D])


@pytest.mark.parametrize(
    ("seam", "message"),
    [
        (Seam(C10D, "_set_pg_timeout", "timeout", ""), f"{C10D}._set_pg_timeout takes (timeout, group)"),
        (Seam(C10D, "_set_pg_patience", "timeout group", ""), f"{C10D}._set_pg_patience is not there"),
        (Seam("torch.nn", "Module()._caches", None, ""), "torch.nn.Module()._caches is not there"),
        (Seam("torch.nn", "Module.~_caches", None, ""), "torch.nn.Module.~_caches is not there"),
        (Seam("torch.gone", "x", None, ""), "torch.gone.x is not there"),
    ],
)
def test_a_release_that_differs_is_refused_in_one_line_with_advice(seam, message):
    with pytest.raises(UnsupportedLayout) as refused:
        table.check("torch", [seam], needed=[seam.module])
    text = str(refused.value)
    assert message in text and "\n" not in text
    assert f" {', '.join(table.KNOWN_RELEASES['torch'])}, " in text and text.endswith("--unicron-mode=restart")


def test_a_part_that_this_build_of_torch_lacks_is_left_out():
    assert table.difference([Seam(C10D, "ProcessGroupElsewhere?._start", None, "")], "") is None


def test_what_somebody_has_wrapped_is_not_taken_for_another_release(monkeypatch):
    """For example a profiler's wrapper, which passes its arguments on."""
    row = Seam(C10D, "_set_pg_timeout", "timeout group", "")
    known = table.find(row)
    monkeypatch.setattr(
        importlib.import_module(C10D), "_set_pg_timeout", lambda *given, **named: known(*given, **named)
    )
    assert table.difference([row], "") is None


def test_rows_of_modules_that_are_not_imported_wait():
    table.check("torch", [Seam("torch.never_imported", "x", None, "")])


def test_objects_of_megatron_without_an_attribute_are_refused_by_name():
    names = f"{megatron_core.BUCKET_GROUP} {megatron_core.BUFFER}".split()
    group = SimpleNamespace(**dict.fromkeys(names, ()))
    chunk = SimpleNamespace(
        buffers=[group], bucket_groups=[group], expert_parallel_buffers=[], expert_parallel_bucket_groups=[]
    )
    importlib.import_module("megatron.core")
    megatron_core.check([chunk], [])
    del group.per_param_grad_ready_counts
    with pytest.raises(UnsupportedLayout, match=r"per_param_grad_ready_counts; .* 0\.16"):
        megatron_core.check([chunk], [])


# They are loaded by their paths, from the standard library alone; the counters have a table of their own (SEAMS).
BY_PATH = ("forkable.py", "counters.py", "step_signals.py")


def private_names(path: Path) -> list[str]:
    """The attributes that begin with an underscore and are not of the file's own objects, and imports of such names."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = node.value
            own = isinstance(owner, ast.Name) and owner.id in ("self", "cls", "os")
            if not own and node.attr not in PYTHONS_OWN:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "megatron"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if any(part.startswith("_") for part in parts):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_private_names_of_torch_and_megatron_are_held_by_the_seams_alone():
    """Objects of the file's own classes may be asked for theirs: such a name is defined in the same file."""
    files = [path for folder in ("detector", "transition") for path in sorted((ROOT / folder).rglob("*.py"))]
    outside = [path for path in files if "seams" not in path.parts and path.name not in BY_PATH]
    found = []
    for path in outside:
        text = path.read_text()
        for line in private_names(path):
            name = line.rpartition(".")[2]
            if f"def {name}(" not in text and f"self.{name}" not in text:
                found.append(line)
    assert not found, "move these to unicron_transition/seams, with a row in its table:\n" + "\n".join(found)


def private_words(path: Path) -> set[str]:
    """The private names that a file uses, also those that it looks up by their text."""
    found = {line.rpartition(".")[2].rpartition(" ")[2] for line in private_names(path)}
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]
            ):
                if name.startswith("_") and not name.startswith("__"):
                    found.add(name)
    return found


def test_every_private_name_in_the_seams_has_a_row():
    rows = (*TORCH, *TORCH_MODELS, *TORCH_DTENSORS, *TORCH_CHECKPOINTS, *MEGATRON_CORE, *MEGATRON_LM)
    known = {part.strip("?()~") for row in rows for part in (*row.name.split("."), *row.module.split("."))}
    folder = ROOT / "transition/unicron_transition/seams"
    texts = {path: path.read_text() for path in sorted(folder.glob("*.py"))}
    own = {
        name
        for text in texts.values()
        for name in re.findall(r"(?:def|class) (_\w+)|self\.(_\w+)", text)
        for name in name
    }
    missing = {path.name: words for path in texts if (words := private_words(path) - known - own)}
    assert not missing, f"give each a row in table.py: {missing}"
