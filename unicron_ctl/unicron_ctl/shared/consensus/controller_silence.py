"""Whether the controller is away: the agent asked it for an answer and got none. Pure.

Times are on a clock that does not jump.
"""

from __future__ import annotations

ASK_SECONDS = 1.0  # between an answer and the next question while something needs the controller
TELL_SECONDS = 0.25  # without an answer; then a proposer is told
AWAY_SECONDS = 0.7  # without an answer; then the controller counts as away


class ControllerSilence:
    """For how long one agent's question to the controller has had no answer."""

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._answered_at = float("-inf")

    def on_question(self, now: float) -> None:
        """The agent asks the controller for an answer."""
        if self._asked_at is None:
            self._asked_at = now

    def on_answer(self, now: float) -> None:
        """The controller has said something, whatever it is."""
        self._asked_at, self._answered_at = None, now

    @property
    def waiting(self) -> bool:
        """True while a question has no answer."""
        return self._asked_at is not None

    def may_ask(self, now: float) -> bool:
        """True if no question is open and the last answer is old enough for another one."""
        return self._asked_at is None and now - self._answered_at >= ASK_SECONDS

    def seconds(self, now: float) -> float:
        """For how long the open question has had no answer; 0 without one."""
        return 0.0 if self._asked_at is None else now - self._asked_at
