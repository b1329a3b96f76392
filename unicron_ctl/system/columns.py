"""Listings: columns as `sinfo` prints them, one line for each item, and boxes for what is watched.

A line fits 100 characters. All cells but the last are single words where the names in them are, and longer text is a
note below, so a line can be grepped and its words counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from shutil import get_terminal_size
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH = 100


class Listing:
    """Rows of cells under `headings`, and notes that say more about single rows. Cells are texts; their styles show in
    boxes only."""

    def __init__(self, *headings: str, title: str = ""):
        self.headings, self.title = headings, title
        self.rows: list[tuple[str | Text, ...]] = []
        self.notes: list[str | Text] = []

    def add_row(self, *cells: str | Text) -> None:
        """One item; as many cells as there are headings."""
        assert len(cells) == len(self.headings), (self.headings, cells)
        self.rows.append(cells)

    def add_note(self, text: str | Text) -> None:
        """A line below all rows."""
        self.notes.append(text)

    def lines(self) -> list[str]:
        """Heading, rows and notes; each column but the last is as wide as its widest cell."""
        table = [tuple(heading.upper() for heading in self.headings), *([plain(cell) for cell in r] for r in self.rows)]
        widths = [max(len(row[column]) for row in table) for column in range(len(self.headings) - 1)]
        padded = (
            " ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in table
        )
        return [*(line.rstrip() for line in padded), *map(plain, self.notes)]

    def __rich__(self) -> RenderableType:
        table = Table(*self.headings, title=self.title or None, title_justify="left")
        for row in self.rows:
            table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
        return Group(table, *(note if isinstance(note, Text) else Text(note) for note in self.notes))


def plain(cell: str | Text) -> str:
    """A cell's text on one line."""
    return " ".join(str(cell).split())


def show(parts: Iterable[Listing | Text | str]) -> None:
    """Prints listings, an empty line between them, and lines of text. On a terminal nothing is longer than it is wide,
    or than WIDTH; on a pipe everything is there.
    """
    out: Any = sys.stdout
    limit = max(WIDTH, get_terminal_size().columns) if out.isatty() else None
    first = True
    for part in parts:
        if isinstance(part, Listing):
            found = part.lines() if first else ["", *part.lines()]
        else:
            found = str(part).splitlines()
        first = False
        for line in found:
            print(line if limit is None or len(line) <= limit else f"{line[: limit - 3]}...")
