"""Makes text from users safe for a terminal: no control character reaches it. The log keeps the text as it came."""

from __future__ import annotations

import unicodedata
from typing import Any

LONG_TEXTS = ("text", "where", "input", "traceback")  # fields that may have several lines
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, format (which turns the writing direction), line ends


def printable(text: str, lines: bool = False) -> str:
    """The text with its control characters written out ("\\\\x1b"); line ends are spaces, or kept with `lines`."""
    if text.isascii() and text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(_shown(char, kept) for char in text)


def _shown(char: str, kept: str) -> str:
    if char in kept or unicodedata.category(char) not in _HIDDEN:
        return char
    return " " if char in "\n\t\r" else char.encode("unicode_escape", "replace").decode()


def clean(data: Any, field: str = "") -> Any:
    """An answer of the controller with all its texts printable, keys included."""
    if isinstance(data, str):
        return data if data.isascii() and data.isprintable() else printable(data, lines=field in LONG_TEXTS)
    if isinstance(data, list | tuple):
        return [clean(item, field) for item in data] if data else []
    if not isinstance(data, dict):
        return data
    found = {}
    for key, value in data.items():  # most are known keys with a number: an answer has a hundred thousand of them
        name = key if isinstance(key, str) else field
        found[clean(key)] = value if value is None or isinstance(value, int | float) else clean(value, name)
    return found
