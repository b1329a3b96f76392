"""Findings: a sensor reports what is wrong, with whom, since when, how that is known, and who said it.

Who said it decides later what may be done about it (docs/design/trust.md). What a user's process says concerns its own
job only; so no judgement of a finding takes a living node out of service.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from unicron_ctl.controller.model.job_state import Identity
from unicron_ctl.shared.protocol.structs import Exit, Fault


class What(enum.StrEnum):
    """The kinds of finding."""

    EXIT = "exit"  # a process ended, or is about to by an exception that nothing catches
    WANTED_END = "wanted end"  # ... and that was wanted
    NODE_LOST = "node lost"  # an agent was not heard of for a lease, and somebody else says that its node is gone
    AGENT_DIED = "agent died"  # ... and its node says that it is gone
    NODE_ENDED = "node ended"  # and since then nobody reaches its node either
    MISSED = "missed"  # agents went on without a member while nobody was here to see why
    LEFT = "left"  # an agent says that it ends
    REPLACED = "replaced"  # a member's process or agent is another one by now
    BROKEN = "broken"  # a stopped rank names its own fault
    STOPPED = "stopped"  # members stopped by themselves although nobody is gone
    PARTED = "parted"  # a node and others of its job do not reach each other
    LATE = "late"  # a survivor did not stop, or a member did not enter, in time
    UNUSABLE = "unusable"  # a survivor's report cannot be worked with
    HANG = "hang"  # others wait for this rank
    COLLECTIVE = "collective"  # all wait in a collective that nobody finishes
    NOTE = "note"  # a rank has put something right by itself
    NODE = "node"  # the job's agent says that the node's log calls it unfit for work
    SLURM = "slurm"  # Slurm says more about the end of an element or its node
    ACTION = "action"  # what was done about a failure did not come to its end


class Source(enum.StrEnum):
    """The sources of findings."""

    SLURM = "slurm"
    AGENT = "agent"
    RANK = "rank"
    PEER = "peer"
    CLOCK = "clock"  # nobody: something did not happen in time


@dataclass(frozen=True)
class Finding:
    """One report of a sensor. at: seconds since the epoch, the controller's clock."""

    what: What
    job: str
    slots: tuple[int, ...]
    at: float
    source: Source
    evidence: str
    element: int = -1
    node: str = ""
    by: str = ""
    """How it was detected, in the words of `unicronctl`: lease, process exit, exception, statistics, ..."""
    identity: Identity | None = None
    exit: Exit | None = None
    fault: Fault | None = None
    pid: int = 0
    iteration: int | None = None
    seen: int = 0
    """With NODE: the id of the node's event; with ACTION, HANG and SLURM: the failure's."""
    action: str = ""
    """With ACTION: the one that failed."""
    moved: bool = False
    """With ACTION: the slot is on another node already."""
    dead: bool = False
    """With NODE_LOST and AGENT_DIED: the evidence shows that nothing of the element lives."""
    answers: bool = False
    """With AGENT_DIED: somebody reaches its node, or Slurm does."""
    spare: bool = False
    """With NODE_LOST: the job goes on without the node, which is left alone."""
