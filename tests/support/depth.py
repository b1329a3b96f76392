"""How many random cases a test tries: a quarter of them in `make test`, or a smaller part; all of them in
`make test-long`."""

from __future__ import annotations

import os

DEEP = os.environ.get("DEEP_TESTS") == "1"


def cases(count: int, part: int = 4) -> int:
    """The number of cases to try now, of `count` in the long run."""
    return count if DEEP else max(1, count // part)
