"""Who of a job's agents reaches whom. Lost with the process: a restarted controller asks again when it has to."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Survey:
    """One job's. number: of the questions, 0 when none are out. Times in seconds on the controller's clock.

    asked: element -> those it was asked about, in the order of the answer. cut: pairs (witness, other) of which the
    witness got no answer. before: the same of the round before, which this one is to confirm. returning: those that
    were left out are asked, and who of them has answered.
    """

    number: int = 0
    begun: float = 0.0
    asked: dict[int, list[int]] = field(default_factory=dict)
    cut: set[tuple[int, int]] = field(default_factory=set)
    before: set[tuple[int, int]] | None = None
    returning: set[int] | None = None
    generation: int = -1
    """For which it was asked last because entering took long."""
    left: int = 0
    """Rounds of it that are still to be asked: in a large job one does not ask about all pairs."""
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

    def begin(self, number: int, now: float, asked: dict[int, list[int]]) -> None:
        """New questions."""
        self.number, self.begun, self.asked, self.cut = number, now, asked, set()
