"""The schedule of faults, drawn from a seed: the same however often a run is interrupted. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

RANK, NODE, NOTHING = "rank", "node", "nothing"  # what a fault may take away from the job


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    takes: str
    """RANK, NODE with all that is in its memory, or NOTHING."""
    breaks: bool = True
    """Whether it ends the job's generation."""
    seconds: tuple[float, float] = (0.0, 0.0)
    """The shortest and the longest time that it lasts; (0, 0) for its own time."""


KINDS: dict[str, Kind] = {
    # Faults of `unicronctl inject`.
    "rank-kill": Kind(RANK),
    "exception:python": Kind(RANK),
    "exception:cuda": Kind(RANK),
    "exception:cuda-oom": Kind(RANK),
    "exception:ecc": Kind(NODE),  # the job leaves the node, which is drained
    "exception:nccl": Kind(RANK),
    "exception:connection-reset": Kind(RANK),
    "exception:file-system": Kind(RANK),
    "exception:disk-full": Kind(RANK),
    "hang-stop": Kind(RANK),
    "hang-gil": Kind(RANK),
    "slow:1.5": Kind(NOTHING, breaks=False, seconds=(5.0, 10.0)),
    "oom": Kind(RANK),
    "oom-kill": Kind(RANK),
    "full-disk": Kind(RANK),
    "lost-network": Kind(NODE, seconds=(3.0, 12.0)),
    "black-hole": Kind(NODE, seconds=(3.0, 12.0)),
    "lost-node": Kind(NODE, seconds=(3.0, 12.0)),
    "corrupt-message": Kind(NOTHING, breaks=False),
    "corrupt-checkpoint": Kind(NOTHING, breaks=False),
    # Other faults.
    "agent-kill": Kind(NODE),
    "unicrond-kill": Kind(NOTHING, breaks=False, seconds=(0.0, 6.0)),
    "unicrond-kill+rank": Kind(RANK, seconds=(1.0, 6.0)),
    "slurmctld-kill": Kind(NOTHING, breaks=False, seconds=(0.0, 6.0)),
    "slurmctld-kill+rank": Kind(RANK, seconds=(1.0, 6.0)),
}


@dataclass(frozen=True)
class Fault:
    """A fault of the run."""

    index: int
    kind: str
    job: float
    """A draw from [0, 1) that chooses among the jobs that may be struck at its time."""
    victim: float
    """A draw that chooses among the job's slots."""
    seconds: float
    """The time that it lasts."""

    @property
    def how(self) -> Kind:
        return KINDS[self.kind]


def fault(seed: int, index: int, kinds: Sequence[str]) -> Fault:
    """Return fault number `index`, from 0. Each round of as many faults as there are kinds has every kind once."""
    turn, place = divmod(index, len(kinds))
    order = list(kinds)
    random.Random(f"{seed}/{turn}").shuffle(order)
    draw = random.Random(f"{seed}:{index}")
    kind = order[place]
    return Fault(index, kind, draw.random(), draw.random(), draw.uniform(*KINDS[kind].seconds))


def choose(share: float, among: Sequence[str]) -> str:
    """Return the item at which a draw from [0, 1) points. There is at least one."""
    return among[min(int(share * len(among)), len(among) - 1)]
