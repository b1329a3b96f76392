"""Errors for people: one line that says what to do next."""

from __future__ import annotations

FAILURE = 1
WRONG_USE = 2
PROBLEM_FOUND = 3  # the command worked, and found a problem


class UserError(Exception):
    """An error whose text is shown as it is, on one line, without a traceback."""

    def __init__(self, message: str, exit_code: int = FAILURE) -> None:
        super().__init__(message)
        if exit_code not in (FAILURE, WRONG_USE):
            raise ValueError(f"exit_code must be 1 or 2, got {exit_code}")
        self.exit_code = exit_code
        """2 for wrong use (bad option, bad input file), 1 for everything else."""


def one_line(text: str) -> str:
    """Return the text with every run of white space, line ends included, made one space."""
    return " ".join(text.split())


def shorten(text: str, most: int) -> str:
    """Return the text; of a text longer than `most` characters, its beginning and end."""
    if len(text) <= most:
        return text
    tail = (most - 5) // 3
    return f"{text[: most - 5 - tail]} ... {text[len(text) - tail :]}"
