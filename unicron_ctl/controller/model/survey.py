"""Which of a job's agents reach which others. A restarted controller asks again when it has to."""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_NUMBER = 1 << 32  # of rounds of surveys: smaller numbers are those of suspicions


@dataclass
class Survey:
    """One job's survey. Times are seconds on the controller's clock.

    number: the round that is out, 0 when none is. asked: element -> the elements it was asked about, in the order of
    the answer. cut: pairs (witness, other) where the witness got no answer. before: the cut of the last round, which
    this one is to confirm. returning: while elements that were left out are asked about, who has answered.
    """

    number: int = 0
    last_number: int = FIRST_NUMBER
    begun: float = 0.0
    asked: dict[int, list[int]] = field(default_factory=dict)
    cut: set[tuple[int, int]] = field(default_factory=set)
    before: set[tuple[int, int]] | None = None
    returning: set[int] | None = None
    generation: int = -1
    """The generation for which it was last asked because entering took long."""
    left: int = 0
    """Rounds for that generation that are still to be asked: in a large job one does not ask about all pairs."""
    tried: float = -1.0
    """When the last round was begun, whether anybody could be asked or not."""
    turn: int = 0
    """Rounds so far: a large job's ask about other pairs each."""
    again: float = 0.0
    """When those that were left out are to be asked."""

    @property
    def open(self) -> bool:
        """Answers are awaited."""
        return self.number > 0

    def begin_round(self, now: float, asked: dict[int, list[int]]) -> None:
        """New questions."""
        self.last_number += 1
        self.number, self.begun, self.asked, self.cut = self.last_number, now, asked, set()
