"""What documents and comments refer to is there: files that are linked or cited, and the walk of the architecture."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from tests.support.documents import tracked, walks
from tests.support.processes import LIMIT, ROOT
from tests.support.rooms import is_gone
from unicron_ctl.shared.settings.config import AgentConfig, ControllerConfig

LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
CITED = re.compile(r"\bdocs/[\w./-]+?\.md\b")
MOST_FILES = 12


def test_the_walk_is_at_most_a_dozen_files_long_and_names_what_is_there() -> None:
    main, to_slurm = walks()
    assert 1 < len(main) <= MOST_FILES
    files = [file for file, _ in [*main, *to_slurm]]
    assert len(set(files)) == len(files), "each once"
    for file, names in [*main, *to_slurm]:
        (path,) = ROOT.glob(f"*/{file}")  # in the source root of its package
        text = path.read_text()
        assert names, file
        for name in names:
            assert re.search(rf"^\s*(def|class) {name}\b", text, re.MULTILINE), f"{file} has no {name}"


@pytest.mark.parametrize("path", tracked("*.md"), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in LINK.findall(path.read_text()):
        assert (path.parent / target).exists(), f"{path.relative_to(ROOT)} links to {target}"


@pytest.mark.parametrize("folder", ["docs", "docs/design"])
def test_the_index_of_a_folder_names_every_document_in_it(folder: str) -> None:
    index = (ROOT / folder / "README.md").read_text()
    for path in (ROOT / folder).glob("*.md"):
        assert path.name == "README.md" or f"]({path.name})" in index, path.name


def test_pictures_are_those_that_the_script_draws_from_the_figures_of_today() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "pictures" / "draw.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", tracked("*.md"), ids=lambda path: str(path.relative_to(ROOT)))
def test_source_files_that_are_named_are_there(path: Path) -> None:
    """`judge/judge.py` is any file whose path ends so."""
    if path.name == "CHANGELOG.md":
        return
    known = [f"/{file.relative_to(ROOT)}" for file in tracked("*.py", "*.c", "*.toml", "*.sh", "*.service")]
    for named in re.findall(r"`(\w[\w.-]*/[\w./-]+\.(?:py|c|toml|sh|service))`", path.read_text()):
        there = is_gone(named) or any(file.endswith(f"/{named}") for file in known)
        assert there, f"{path.relative_to(ROOT)} names {named}"


def defaults() -> dict[str, float]:
    sections = (ControllerConfig, AgentConfig)
    found = {field.name: field.default for section in sections for field in msgspec.structs.fields(section)}
    return {name: float(value) for name, value in found.items() if isinstance(value, bool | int | float)}


@pytest.mark.parametrize("name", ["admin-guide.md", "user-guide.md", "detection.md", "design/detection.md"])
def test_defaults_in_the_text_are_the_codes(name: str) -> None:
    """`field` (600), `field` (10 %), and in the admin guide's paragraph of defaults `field = 600`."""
    known, text = defaults(), (ROOT / "docs" / name).read_text()
    said = [
        (field, float(number) / (100 if percent else 1))
        for field, number, percent in re.findall(r"`(\w+)` \((\d+(?:\.\d+)?)( %)?[);,]", text)
        if field in known
    ]
    if name == "admin-guide.md":
        paragraph = re.split(r"\n\n", text[text.index("each with its default") :])[0]
        pairs = re.findall(r"`(\w+) = ([\w.]+)`", paragraph)
        said += [(field, float(tomllib.loads(f"x = {value}")["x"])) for field, value in pairs]
        assert len(pairs) > 5
    wrong = {field: value for field, value in said if known[field] != value}
    assert not wrong, f"{name} says {wrong}"


def test_comments_cite_only_texts_that_are_here() -> None:
    for path in tracked("*.py", "*.c", "*.h", "*.toml", "*.sh", "*.service", "*.md"):
        text = path.read_text(errors="replace")
        for cited in CITED.findall(text):
            assert (ROOT / cited).is_file(), f"{path.relative_to(ROOT)} cites {cited}"
        assert not re.search(r"(DESIGN|PAPER)\x20section", text), (
            f"{path.relative_to(ROOT)} cites a text by its old name"
        )


def test_every_test_that_the_threat_model_names_is_there() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert named
    for path, name in named:
        if is_gone(path):
            continue
        assert (ROOT / path).is_file(), f"docs/security.md names {path}"
        found = not name or re.search(rf"^(async )?def {name}\b", (ROOT / path).read_text(), re.MULTILINE)
        assert found, f"{path} has no {name}"
    for row in re.findall(r"^\| (?!threat|---)(.*) \|$", text, re.MULTILINE):
        assert "`tests/" in row.rpartition("|")[2], f"no test attacks: {row}"


@pytest.mark.parametrize(("folder", "files"), [("findings", "*.sh"), ("docs/behaviour", "*.*")])
def test_the_list_of_what_was_seen_outside_is_whole(folder: str, files: str) -> None:
    listed = set(LINK.findall((ROOT / folder / "README.md").read_text()))
    there = {path.name for path in (ROOT / folder).glob(files)} - {"README.md"}
    assert there and there <= listed


def test_each_finding_can_be_run() -> None:
    for path in (ROOT / "findings").glob("*.sh"):
        text = path.read_text()
        assert os.access(path, os.X_OK) and text.startswith("#!/usr/bin/env bash\n#"), path.name
        assert "set -euo pipefail" in text and "unicron" not in text.lower(), path.name
