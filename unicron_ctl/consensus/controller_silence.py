"""Whether the controller is away: it was asked for an answer and gave none. Pure; times on a clock that does
not jump."""

from __future__ import annotations

ASK_SECONDS = 1.0  # between an answer and the next question while something needs the controller
TELL_SECONDS = 0.25  # without an answer; then the other agents are told
AWAY_SECONDS = 0.7  # without an answer; then the controller counts as away


class Silence:
    """What one agent knows of it."""

    def __init__(self) -> None:
        self._asked: float | None = None
        self._heard = float("-inf")

    def ask(self, now: float) -> None:
        """A question goes out."""
        if self._asked is None:
            self._asked = now

    def word(self, now: float) -> None:
        """The controller has said something, whatever it is."""
        self._asked, self._heard = None, now

    @property
    def pending(self) -> bool:
        """A question has no answer yet."""
        return self._asked is not None

    def to_ask(self, now: float) -> bool:
        """It is time for a question, if there is something to ask."""
        return self._asked is None and now - self._heard >= ASK_SECONDS

    def seconds(self, now: float) -> float:
        """For how long a question has had no answer."""
        return 0.0 if self._asked is None else now - self._asked
