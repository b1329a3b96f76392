"""Ranks of which one becomes slow by `unicronctl inject slow:FACTOR`, without Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.support.rank_harness import Ranks
from unicron_ctl.shared.protocol import wire

FOREVER = 3600.0


class Slow(NamedTuple):
    """One rank's change of speed."""

    slot: int
    after: int
    """The iteration after which it comes."""
    factor: float
    seconds: float = FOREVER


class SlowedRanks(Ranks):
    """Ranks with changes of speed."""

    def __init__(self, out: Path, size: int, changes: list[Slow], **settings):
        super().__init__(out, size, [], fork=True, **settings)
        self.changes = list(changes)

    def _disturb(self) -> None:
        for change in [each for each in self.changes if self._over(each.after)]:
            self.changes.remove(change)
            order = wire.Inject(
                fault=f"slow:{change.factor:g}", slot=change.slot, incarnation=0, seconds=change.seconds
            )
            self._send(order, [change.slot])
        super()._disturb()

    def _over(self, iteration: int) -> bool:
        return any(step["iteration"] >= iteration for step in self.steps[-2 * self.size :])

    def share(self, slot: int, iteration: int) -> int:
        """The micro-batches that the rank had in its gradient."""
        return next(len(s["micro_batches"]) for s in self.steps if (s["slot"], s["iteration"]) == (slot, iteration))
