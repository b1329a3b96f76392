"""Contains errors of the agent: if one step of its loop fails, the agent and its ranks go on, for a node may run out of
descriptors, threads, memory or disk during a training (docs/design/failing-open.md)."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import TypeVar

MOST_TOLD = 50  # different errors in the job's log, so that ever new ones do not fill it
ERROR_SECONDS = 0.02  # after an error, so that one that comes back at once does not take a core
Result = TypeVar("Result")


class Containment:
    """Keeps an error of one step from ending the agent."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn  # writes one line into the job's log
        self._logged: set[str] = set()

    def attempt(self, what: str, work: Callable[[], Result]) -> Result | None:
        """Return the result of `work`; None if it failed. Each error is logged once. what: completes "couldn't"."""
        try:
            return work()
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{place.filename.rpartition('/')[2]}:{place.lineno}"
            text = f"couldn't {what}: {reason(error)} ({where}); the training goes on"
            if text not in self._logged and len(self._logged) < MOST_TOLD:
                self._logged.add(text)
                self._warn(text)
            time.sleep(ERROR_SECONDS)
            return None


def reason(error: BaseException) -> str:
    """Return an exception's text in one line, with its class's name unless it is an error of the system."""
    if isinstance(error, OSError) and error.strerror:
        named = f"{error.filename}: " if isinstance(error.filename, str) else ""
        return f"{named}{error.strerror}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
