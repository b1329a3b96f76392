"""Unicron's part of an element's AdminComment, beside what others have written there. Pure.

One of the parts between `" | "` is Unicron's: the one that begins with OURS. Whatever others wrote stays as it is.
jobstats writes `JS1:` and base64 there, and reads it from the first byte to the last: what stands behind it ends its
reader, since Python 3.13.5 behind base64's padding, too. So Unicron writes nothing beside that.
"""

from __future__ import annotations

from unicron_ctl.shared.slurm.squeue import CUT

OURS = "unicron: "
HOLD_PREFIX = f"{OURS}held"  # how that part of an element begins that Unicron holds
BETWEEN = " | "
JOBSTATS = "JS1:"
OWN_MOST = 200  # characters of Unicron's part
MOST = 4000  # bytes of a comment; a longer one is left as it is
TELLING = 30  # characters that tell one text from another: a listing may have the beginning only


def own_part(text: str) -> str:
    """Unicron's part of the comment, or nothing."""
    return next((part for part in text.split(BETWEEN) if part.startswith(OURS)), "")


def is_shown(listed: str, text: str) -> bool:
    """Whether a comment, as a listing has it, has `text` as Unicron's part, or as much of it as there was room for."""
    shown = own_part(listed).rstrip(CUT)
    return shown == text or (len(shown) >= TELLING and text.startswith(shown))


def with_own(text: str, own: str, first: bool = False) -> str:
    """The comment with `own` as Unicron's part, and all else as it was; the comment itself where there is no place for
    it. first: it has to come first: listings show only the beginning of a long comment."""
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
