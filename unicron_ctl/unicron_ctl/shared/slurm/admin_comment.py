"""Unicron's part of an element's AdminComment, beside what others have written there. Pure.

The parts are separated by `" | "`; Unicron's is the one that begins with OURS, and the others stay as they are.
jobstats writes `JS1:` and base64, and fails on anything after that (since Python 3.13.5 even after base64's padding),
so Unicron writes nothing beside it.
"""

from __future__ import annotations

from unicron_ctl.shared.slurm.squeue import CUT

OURS = "unicron: "
HOLD_PREFIX = f"{OURS}held"  # the beginning of that part while Unicron holds the element
BETWEEN = " | "
JOBSTATS = "JS1:"
OWN_MOST = 200  # characters of Unicron's part
MOST = 4000  # bytes of a comment; a longer one is left as it is
TELLING = 30  # characters that identify a text, since a listing may show only its beginning


def own_part(text: str) -> str:
    """Return Unicron's part of the comment, or nothing."""
    return next((part for part in text.split(BETWEEN) if part.startswith(OURS)), "")


def is_shown(listed: str, text: str) -> bool:
    """Say whether a comment, as a listing shows it, has `text` as Unicron's part, or as much of it as fitted."""
    shown = own_part(listed).rstrip(CUT)
    return shown == text or (len(shown) >= TELLING and text.startswith(shown))


def with_own(text: str, own: str, first: bool = False) -> str:
    """Return the comment with `own` as Unicron's part and the rest as it was; unchanged if there is no place for it.
    first: put it first, as listings show only the beginning of a long comment."""
    own = own.replace(BETWEEN, " / ")[:OWN_MOST]
    parts = text.split(BETWEEN)
    ours = next((place for place, part in enumerate(parts) if part.startswith(OURS)), None)
    others = BETWEEN.join(parts[:ours] + parts[ours + 1 :]) if ours is not None else text  # byte for byte
    if not own or not others:
        found = own or others
    elif first or not others.startswith(JOBSTATS):
        found = f"{own}{BETWEEN}{others}"
    else:
        found = others
    return found if len(found.encode(errors="surrogateescape")) <= MOST else text
