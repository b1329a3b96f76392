"""Python imports this at its start where this folder is in PYTHONPATH: a time of day that the storms can step.

Monotonic clocks, sleeps and time-outs stay as they are, as they do where somebody sets a node's clock.
"""

from __future__ import annotations

import os
import time

FILE = os.environ["UNICRON_STEPPED_CLOCK"]
LOOK_SECONDS = 0.2  # between two looks at the file, by the monotonic clock

_real_time = time.time
_looked, _ahead = -LOOK_SECONDS, 0.0


def _stepped_time() -> float:
    global _looked, _ahead
    now = time.monotonic()
    if now - _looked >= LOOK_SECONDS:
        _looked = now
        with open(FILE) as file:
            _ahead = float(file.read() or _ahead)
    return _real_time() + _ahead


time.time = _stepped_time
