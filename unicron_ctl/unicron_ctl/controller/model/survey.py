"""Which of a job's agents reach which others. A restarted controller asks again when it has to."""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_NUMBER = 1 << 32  # of rounds of surveys: smaller numbers are those of suspicions


@dataclass
class Survey:
    """The questions to one job's agents about whom they reach. Times are seconds on the controller's clock."""

    number: int = 0
    """The round whose answers are awaited; 0 when none are."""
    last_number: int = FIRST_NUMBER
    begun: float = 0.0
    asked: dict[int, list[int]] = field(default_factory=dict)
    """element -> the elements that it was asked about, in the order of its answer."""
    unreachable: set[tuple[int, int]] = field(default_factory=set)
    """Pairs (witness, other): the witness got no answer."""
    last_unreachable: set[tuple[int, int]] | None = None
    """The unreachable pairs of the round before, which this round is to confirm."""
    left_out_answers: set[int] | None = None
    """Who has answered, while elements that were left out are asked about; None otherwise."""
    generation: int = -1
    """The generation for which the job was last asked because entering took long."""
    rounds_left: int = 0
    """Rounds that are still to be asked for that generation. One round covers only some pairs of a large job."""
    last_attempt: float = -1.0
    """When the last round was begun, whether anybody could be asked or not."""
    rounds_done: int = 0
    """The rounds of a large job ask about other pairs each."""
    retry_at: float = 0.0
    """When the elements that were left out are asked about again."""

    @property
    def open(self) -> bool:
        """Whether answers are awaited."""
        return self.number > 0

    def begin_round(self, now: float, asked: dict[int, list[int]]) -> None:
        """Begins a round with new questions."""
        self.last_number += 1
        self.number, self.begun, self.asked, self.unreachable = self.last_number, now, asked, set()
