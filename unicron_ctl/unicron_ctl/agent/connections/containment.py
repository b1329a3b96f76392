"""Contains errors of the agent: one step of its loop fails, and the agent and its ranks go on
(docs/design/failing-open.md). A node may run out of descriptors, threads, memory or disk while a training runs.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import TypeVar

MOST_TOLD = 50  # different errors; an agent that finds ever new ones must not fill the job's log
ERROR_SECONDS = 0.02  # after an error: one that comes back at once must not take a core
Result = TypeVar("Result")


class Containment:
    """Keeps an error of one step from ending the agent.

    warn: writes one line into the job's log.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._told: set[str] = set()

    def attempt(self, what: str, work: Callable[[], Result]) -> Result | None:
        """Return what `work` returns; None where it failed, which is logged once for each error. what: completes
        "couldn't"."""
        try:
            return work()
        except Exception as error:
            self._warn_once(what, error)
            time.sleep(ERROR_SECONDS)
            return None

    def _warn_once(self, what: str, error: Exception) -> None:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename.rpartition('/')[2]}:{place.lineno}"
        text = f"couldn't {what}: {reason(error)} ({where}); the training goes on"
        if text not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(text)
            self._warn(text)


def reason(error: BaseException) -> str:
    """Return the text of an exception in one line, with its name where it is not one of the system's."""
    if isinstance(error, OSError) and error.strerror:
        named = f"{error.filename}: " if isinstance(error.filename, str) else ""
        return f"{named}{error.strerror}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
