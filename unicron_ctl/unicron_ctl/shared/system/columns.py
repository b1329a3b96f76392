"""Listings: columns as `sinfo` prints them, one line for each item.

On a pipe every cell is whole and on its row's line, so that a line can be grepped and its words counted: all cells but
the last are single words if their names are. On a terminal, optional columns that do not fit are left out with a note,
names are cut, and everything else continues in the next line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from shutil import get_terminal_size
from typing import Any, NamedTuple

from rich.text import Text

from unicron_ctl.shared.system.printable import print_text, printable

WIDTH = 80  # every table fits into it
LEAST, LEAST_NAME, LEAST_LAST = 8, 12, 24  # characters of a cell, of one that is cut, of the last one
INDENT = "    "  # of a note's further lines
Cell = str | Text


class Listing:
    """Rows of cells under `headings`, and notes about single rows.

    Parameters
    ----------
    optional : sequence of str
        Headings that a narrow terminal leaves out, the first one first.
    cut : sequence of str
        Headings whose cells it may cut; a `+` ends such a cell, as in sacct.
    """

    def __init__(self, *headings: str, optional: Sequence[str] = (), cut: Sequence[str] = ()):
        self.headings = headings
        self.rows: list[tuple[Cell, ...]] = []
        self.notes: list[Cell] = []
        self._optional = [headings.index(heading) for heading in optional]
        self._cut = [headings.index(heading) for heading in cut]

    def add_row(self, *cells: Cell) -> None:
        """Add one item, with as many cells as there are headings."""
        assert len(cells) == len(self.headings), (self.headings, cells)
        self.rows.append(cells)

    def add_note(self, text: Cell) -> None:
        """Add a line below all rows."""
        self.notes.append(text)

    def lines(self, width: int | None = None) -> list[str]:
        """Return heading, rows and notes; no line has more than `width` characters, if given and at least 60."""
        return [line.plain for line in self.styled_lines(width)]

    def styled_lines(self, width: int | None = None) -> list[Text]:
        """Return the lines with their styles."""
        table = [[Text(heading.upper(), "bold") for heading in self.headings]]
        table += [[_flat(cell) for cell in row] for row in self.rows]
        natural = [max(len(row[column]) for row in table) for column in range(len(self.headings))]
        fit = _Fit(list(range(len(natural))), natural) if width is None else self._fit_into(natural, width)
        found = [line for row in table for line in self._lines_of(row, fit)]
        if left := [self.headings[column].upper() for column in range(len(natural)) if column not in fit.shown]:
            found.append(Text(f"(a wider terminal also shows {', '.join(left)})", "dim"))
        return found + [line for note in self.notes for line in wrap(_flat(note), width)]

    def _fit_into(self, natural: list[int], width: int) -> _Fit:
        """Choose the columns that are shown, and their widths."""
        last = len(natural) - 1
        shown, widths = list(range(len(natural))), natural[:]
        widths[last] = min(natural[last], LEAST_LAST)
        for column in self._cut:
            widths[column] = min(natural[column], LEAST_NAME)

        def room() -> int:
            return width - sum(widths[column] for column in shown) - (len(shown) - 1)

        for column in self._optional:
            if room() >= 0:
                break
            shown.remove(column)
        while room() < 0 and widths[widest := max(shown, key=lambda column: widths[column])] > LEAST:
            widths[widest] -= 1
        for column in [*self._cut, last]:  # they get the rest
            if column in shown and room() > 0:
                widths[column] += min(room(), natural[column] - widths[column])
        return _Fit(shown, widths)

    def _lines_of(self, row: list[Text], fit: _Fit) -> list[Text]:
        """Return the row's line, and those in which its long cells continue."""
        cells = []
        for column in fit.shown:
            cell, width = row[column], fit.widths[column]
            if len(cell) > width and column in self._cut:
                cell = Text(f"{cell.plain[: width - 1]}+", cell.style)
            cells.append(break_text(cell, width))
        found = []
        for number in range(max(map(len, cells))):
            line = Text()
            for pieces, column in zip(cells, fit.shown, strict=True):
                piece = pieces[number] if number < len(pieces) else Text()
                line.append_text(piece)
                line.append(" " * (fit.widths[column] - len(piece) + 1))
            line.rstrip()
            found.append(line)
        return found


class _Fit(NamedTuple):
    """The layout of a table."""

    shown: list[int]  # its columns that are shown
    widths: list[int]  # of all columns, in characters


def _flat(cell: Cell) -> Text:
    """Return a cell on one line."""
    return Text(plain(cell), cell.style if isinstance(cell, Text) else "")


def plain(cell: Cell) -> str:
    """Return a cell's text on one line."""
    return printable(" ".join(str(cell).split()))


def break_text(text: Text, width: int) -> list[Text]:
    """Break a text into pieces of at most `width` characters: at spaces and after commas, else after underscores, else
    anywhere."""
    rest, pieces = text.plain, []
    while len(rest) > width:
        at = max(rest.rfind(" ", 1, width + 1), rest.rfind(",", 1, width) + 1)
        at = at if at > 0 else rest.rfind("_", 1, width) + 1 or width
        pieces.append(rest[:at].rstrip())
        rest = rest[at:].lstrip()
    return [Text(piece, text.style) for piece in [*pieces, rest]]


def wrap(text: Text, width: int | None) -> list[Text]:
    """Wrap a line of text to `width` characters, if that is given; further lines are indented."""
    if width is None or len(text) <= width:
        return [text]
    first = break_text(text, width)[0]
    rest = Text(text.plain[len(first) :].lstrip(), text.style)
    return [first, *(Text(INDENT).append_text(piece) for piece in break_text(rest, width - len(INDENT)))]


def terminal_width() -> int | None:
    """Return the width of standard output, at least 60; None if it is no terminal."""
    out: Any = sys.stdout
    return max(60, get_terminal_size((WIDTH, 24)).columns) if out.isatty() else None


def lines_of(parts: Iterable[Listing | Cell], width: int | None) -> list[Text]:
    """Return the lines of texts and listings, with an empty line before each listing but the first."""
    found: list[Text] = []
    for part in parts:
        if isinstance(part, Listing):
            found += [Text()] if found else []
            found += part.styled_lines(width)
        else:
            text = part if isinstance(part, Text) else Text(part)
            text = Text(printable(text.plain, lines=True), text.style)
            found += [piece for line in text.plain.splitlines() for piece in wrap(Text(line, text.style), width)]
    return found


def show(parts: Iterable[Listing | Cell]) -> None:
    """Print listings and lines of text: as wide as the terminal, or whole on a pipe."""
    for line in lines_of(parts, terminal_width()):
        print_text(line.plain)
