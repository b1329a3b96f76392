"""Reads what a command prints, on a pipe and on a terminal of 80 columns."""

from __future__ import annotations

import re

import pytest
from rich.text import Text

from unicron_ctl.shared.commands.status_tables import FAILURE_COLUMNS, JOB_COLUMNS, droppable
from unicron_ctl.shared.system import columns
from unicron_ctl.shared.system.columns import WIDTH, Listing

DROPPABLE = {"name", "us", *droppable(JOB_COLUMNS), *droppable(FAILURE_COLUMNS)}


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns_: int = WIDTH) -> None:
    monkeypatch.setattr(columns.sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns_))


def read_back(listing: Listing, lines: list[str]) -> dict[str, str]:
    """Return all text below each heading, without spaces."""
    shown = lines[0].split()
    at = [re.search(rf"(?<!\S){re.escape(word)}(?!\S)", lines[0]).start() for word in shown]  # type: ignore[union-attr]
    body = lines[1 : len(lines) - sum(len(columns.wrap(Text(str(note)), WIDTH)) for note in listing.notes)]
    body = [line for line in body if not line.startswith("(a wider terminal")]
    spans = dict(zip(shown, zip(at, [*at[1:], None], strict=True), strict=True))
    return {word: "".join("".join(line[slice(*span)].split()) for line in body) for word, span in spans.items()}


def fits(parts: list[Listing | Text], lines: list[str]) -> None:
    """Assert that these lines of 80 columns show all of these parts, except for DROPPABLE columns."""
    assert max(map(len, lines)) <= WIDTH == 80
    shown = "".join("".join(lines).split())
    for part in parts:
        if not isinstance(part, Listing):
            assert "".join(str(part).split()) in shown
            continue
        for note in part.notes:
            assert "".join(str(note).split()) in shown
        seen = read_back(part, part.lines(WIDTH))
        for place, heading in enumerate(part.headings):
            whole = "".join("".join(columns.plain(row[place]).split()) for row in part.rows)
            if heading.upper() in seen and heading != "name":
                assert seen[heading.upper()] == whole, heading
            else:
                assert heading in DROPPABLE, heading
