"""Words of texts for people."""

from __future__ import annotations


def plural(count: int, what: str) -> str:
    """ "1 node", "2 nodes"."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def all_of(count: int, what: str, do: str) -> str:
    """ "all 2 members run", "its only member runs". do: the verb of several."""
    return f"its only {what} {do}s" if count == 1 else f"all {count} {what}s {do}"
