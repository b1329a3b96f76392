"""Hooks of mkdocs (mkdocs.yml): documents link to files of the repository, which the site shows as pages of its own
below `repository/`, so that it is whole without a network."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from unicron_ctl.agent.start.agent_main import cli as agent
from unicron_ctl.cli.unicronctl import unicronctl
from unicron_ctl.controller.unicrond import unicrond

ROOT = Path(__file__).resolve().parent.parent
DOCS, SHOWN = ROOT / "docs", "repository"
COMMANDS = "commands.md"  # made here
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
OUTSIDE = re.compile(
    r'<(?:script|img|iframe|source|link(?! rel="(?:canonical|edit)"))\b[^>]*(?:src|href)="(?:https?:)?//'
)
LANGUAGES = {".c": "c", ".h": "c", ".py": "python", ".sh": "sh", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file outside docs/ that a document links to, and for those that they link to in turn."""
    files.append(File.generated(config, COMMANDS, content=commands()))
    waiting, known = sorted(DOCS.rglob("*.md")), set[Path]()
    while waiting:
        path = waiting.pop()
        for _, target, _ in LINK.findall(path.read_text()):
            led = resolved(path, target)
            if led is not None and not led.is_relative_to(DOCS) and led not in known:
                known.add(led)
                files.append(File.generated(config, place(led), content=_shown(led)))
                if led.suffix == ".md":
                    waiting.append(led)
    return files


def resolved(path: Path, target: str) -> Path | None:
    """The file of the repository that a link in `path` leads to; the README of a folder. None for another link."""
    if ":" in target:
        return None
    led = (path.parent / target).resolve()
    if led.is_dir():
        led = led / "README.md"
    return led if led.is_file() and led.is_relative_to(ROOT) else None


def place(path: Path) -> str:
    """Where the site has a file, relative to its beginning."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return f"{SHOWN}/{name}" + ("" if path.suffix == ".md" else ".md")


def origin(uri: str) -> Path:
    """The file of the repository that a page was made of."""
    inside = uri.removeprefix(f"{SHOWN}/")
    if inside == uri:
        return DOCS / uri
    path = ROOT / inside
    return path if path.is_file() else path.with_suffix("")


def commands() -> str:
    """The page of all commands, as `--help` has them."""
    programs = {"unicronctl": unicronctl, "unicrond": unicrond, "unicron-agent": agent}
    parts = ["# Commands\n\nEach with what its `--help` prints. The man pages have the same."]
    for name, program in programs.items():
        waiting: list[tuple[int, click.Context]] = [(2, click.Context(program, None, name, **program.context_settings))]
        while waiting:
            depth, here = waiting.pop(0)
            parts.append(f"{'#' * depth} {here.command_path}\n\n~~~~~~text\n{here.get_help()}\n~~~~~~")
            if isinstance(here.command, click.Group):
                below = [here.command.get_command(here, each) for each in here.command.list_commands(here)]
                waiting[:0] = [
                    (min(depth + 1, 4), click.Context(one, here, one.name, **one.context_settings))
                    for one in below
                    if one
                ]
    return "\n\n".join(parts) + "\n"


def _shown(path: Path) -> str:
    if path.suffix == ".md":
        return path.read_text()
    return f"# {path.relative_to(ROOT)}\n\n~~~~~~{LANGUAGES.get(path.suffix, '')}\n{path.read_text()}\n~~~~~~\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to where the site has what they mean."""
    path = origin(page.file.src_uri)
    if page.file.src_uri == COMMANDS or path.suffix != ".md":
        return markdown

    def moved(found: re.Match[str]) -> str:
        led = resolved(path, found[2])
        if led is None:
            return found[0]
        way = os.path.relpath(place(led), os.path.dirname(page.file.src_uri) or ".")
        return f"{found[1]}{way}{found[3]}"

    return LINK.sub(moved, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuses a page that asks the network for something when it is read. Raises PluginError."""
    if found := OUTSIDE.search(output):
        raise PluginError(f"{page.file.src_uri} would load something from outside: {found[0][:200]}")
    return output
