"""The refusal of a launcher."""

from __future__ import annotations


class NotTaken(Exception):
    """The command cannot run without its launcher; the text says why, and what to write."""
