"""The account of one iteration, from what its ranks reported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Account:
    """One iteration, over all ranks.

    loss: None where it is not known. seconds: the ranks' median. computed: micro-batches, those computed again counted
    again.
    """

    iteration: int
    generation: int
    loss: float | None
    seconds: float
    ranks: int
    total: int
    computed: int
    unreported: list[int]
    """Micro-batches in gradients of ranks that did not live to report; their reduce was complete, else nobody would
    have stepped."""
    problems: list[str]
    """What breaks the exactly-once rule."""
