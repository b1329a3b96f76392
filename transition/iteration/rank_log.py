"""What a rank says to people."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """A line in the job's output."""
    print(f"unicron: {text}", file=sys.stderr, flush=True)
