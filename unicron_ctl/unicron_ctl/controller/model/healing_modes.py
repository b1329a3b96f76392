"""Facts about the ranks of a job in each of the two modes of healing. `job.modes` has the decisions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """Facts about a job's ranks."""

    keeps_state: bool
    """Ranks keep the training state when others are lost, and go on with it."""
    joins: bool
    """Ranks join and leave at iteration boundaries, while the others train."""
    agents_agree: bool
    """A majority of the agents may go on while the controller is away."""
    reports: bool
    """Ranks report their status; otherwise only a rank's exit status and output are seen."""
    finishes_alone: bool
    """A rank that has trained to the end stays finished when the others break."""
    fenced: bool
    """Processes that were cut off may run on and write files: a new world waits until they have ended."""


SESSION = Mode(keeps_state=True, joins=True, agents_agree=True, reports=True, finishes_alone=True, fenced=False)
"""Mode of ranks with a session: the survivors of a loss go on within the iteration."""
RESTART = Mode(keeps_state=False, joins=False, agents_agree=False, reports=False, finishes_alone=False, fenced=True)
"""Mode of plain programs: all processes end and start again together, as a new world."""
