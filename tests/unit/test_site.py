"""The site of the documents, without building it: every page has its place, every link and anchor leads somewhere, and
what the page of symptoms quotes is what the programs say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.support.processes import ROOT
from unicron_ctl.controller.model import requests
from unicron_ctl.shared.slurm import admin_comment

DOCS = ROOT / "docs"
PROGRAMS = ("detector", "planner", "slurm_plugin", "transition", "unicron_ctl")
PAGES = sorted(DOCS.rglob("*.md"))
OF_OTHERS = ("sbatch: ",)  # how a quoted line begins that Slurm prints
LINK = re.compile(r"\]\(([^)\s]*?)(?:#([^)\s]*))?\)")


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python functions, without importing them."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, name, node: name)


@cache
def site() -> dict:
    return yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def listed(nav: list | str | dict) -> Iterator[str]:
    """The pages of a nav, in its order."""
    if isinstance(nav, str):
        yield nav
        return
    for part in nav if isinstance(nav, list) else nav.values():
        yield from listed(part)


@cache
def anchors(path: Path) -> frozenset[str]:
    """The names of a page's headings, as the site and GitHub make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = set()
    for heading in re.findall(r"^#{1,6} (.+?)\s*$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w -]", "", words).strip().replace(" ", "-"))
    return frozenset(found)


def test_the_nav_has_each_page_once() -> None:
    pages = list(listed(site()["nav"]))
    assert len(set(pages)) == len(pages), "each once"
    apart = tuple(site()["not_in_nav"].split())
    there = {name for path in PAGES if not (name := path.relative_to(DOCS).as_posix()).startswith(apart)}
    assert there - set(pages) == set(), "no place in the nav of mkdocs.yml"
    assert set(pages) - there == set(site()["extra"]["made"]), "pages that are not there"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_every_link_and_anchor_leads_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in LINK.findall(re.sub(r"`[^`]*`", "", text)):
        if "://" in target:
            continue
        led = (path.parent / target).resolve() if target else path
        assert led.exists(), f"{target} is not there"
        assert led.is_relative_to(ROOT), f"{target} is outside the repository"
        if anchor and led.suffix == ".md":
            assert anchor in anchors(led), f"{target} has no #{anchor}"


@cache
def said() -> str:
    """The text of all programs, with string literals that stand side by side joined."""
    files = [path for folder in PROGRAMS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".c")]
    text = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in files)).replace('\\"', '"')
    return text.replace("{HOLD_PREFIX}", admin_comment.HOLD_PREFIX).replace("{OURS}", requests.OURS)


def quoted(text: str) -> Iterator[str]:
    """What the first column of each table quotes."""
    for row in re.findall(r"^\| (.*?) \| ", text, re.MULTILINE):
        yield from (piece for piece in re.findall(r"`([^`]+)`", row) if not piece.startswith(OF_OTHERS))


def test_symptoms_are_in_the_words_of_the_programs() -> None:
    pieces = list(quoted((DOCS / "troubleshoot.md").read_text()))
    assert len(pieces) > 50
    fragments = [(piece, part.strip()) for piece in pieces for part in piece.split("...") if len(part.strip()) > 3]
    missing = [piece for piece, part in fragments if part not in said()]
    assert not missing, "no program says so"
