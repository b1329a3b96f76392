"""Makes text from users safe for a terminal: no control character reaches it. The log keeps the text as it came."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

import click

LONG_TEXTS = ("text", "where", "input", "traceback")  # fields with several lines
_OF_ONE, _OF_LINES = re.compile(r"[^ -~]"), re.compile(r"[^ -~\n\t]")  # characters that are looked at
_INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, format (which turns the writing direction), line ends


def printable(text: str, lines: bool = False) -> str:
    """Return the text with control characters written out ("\\\\x1b"); line ends become spaces unless `lines`."""
    return (_OF_LINES if lines else _OF_ONE).sub(_visible, text)


def print_text(text: object, *, lines: bool = False, err: bool = False, nl: bool = True) -> None:
    """Print a text that may come from strangers: one line, or several with `lines`. Commands print only by this."""
    click.echo(printable(str(text), lines), err=err, nl=nl)  # noqa: TID251


def _visible(match: re.Match[str]) -> str:
    char = match[0]
    if unicodedata.category(char) not in _INVISIBLE:
        return char
    return " " if char in "\n\t\r" else char.encode("unicode_escape", "replace").decode()


def clean(data: Any, field: str = "") -> Any:
    """Return an answer of the controller with all its texts printable, including keys."""
    if isinstance(data, str):
        return data if data.isascii() and data.isprintable() else printable(data, lines=field in LONG_TEXTS)
    if isinstance(data, list | tuple):
        return [clean(item, field) for item in data] if data else []
    if not isinstance(data, dict):
        return data
    found = {}
    for key, value in data.items():  # mostly known keys with a number: an answer may have a hundred thousand of them
        name = key if isinstance(key, str) else field
        found[clean(key)] = value if value is None or isinstance(value, int | float) else clean(value, name)
    return found
