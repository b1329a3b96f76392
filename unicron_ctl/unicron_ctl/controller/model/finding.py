"""Findings: a sensor reports what is wrong, with which process or node, since when, the evidence and the source.

The source decides what may be done about it (docs/design/trust.md). A user's process can only testify about its own
job; so no judgement of a finding takes a living node out of service.
"""

from __future__ import annotations

import enum

import msgspec

from unicron_ctl.controller.model.job_state import Identity
from unicron_ctl.shared.protocol.structs import Exit, Fault


class What(enum.StrEnum):
    """The kinds of finding."""

    EXIT = "exit"  # a process ended, or is about to by an exception that nothing catches
    WANTED_END = "wanted end"  # a process ended as intended
    NODE_LOST = "node lost"  # an agent was silent for a lease, and another witness reports its node gone
    AGENT_DIED = "agent died"  # an agent was silent for a lease, and its node reports it gone
    NODE_ENDED = "node ended"  # an agent died, and since then its node is unreachable, too
    MISSED = "missed"  # agents went on without a member while the controller was away
    LEFT = "left"  # an agent reports that it ends
    REPLACED = "replaced"  # a member's slot has another process or agent by now
    BROKEN = "broken"  # a stopped rank names its own fault
    STOPPED = "stopped"  # members stopped by themselves although no member is gone
    PARTED = "parted"  # a node and others of its job do not reach each other
    LATE = "late"  # a survivor did not stop, or a member did not enter, in time
    UNUSABLE = "unusable"  # a survivor's report cannot be used
    HANG = "hang"  # others wait for this rank
    COLLECTIVE = "collective"  # all wait in a collective that does not finish
    NOTE = "note"  # a rank has corrected something by itself
    NODE = "node"  # the job's agent reports that by its log the node is unfit for work
    SLURM = "slurm"  # Slurm shows more about the end of an element or its node
    ACTION = "action"  # an action about a failure did not succeed


class Source(enum.StrEnum):
    """The sources of findings."""

    SLURM = "slurm"
    AGENT = "agent"
    RANK = "rank"
    PEER = "peer"
    CLOCK = "clock"  # something did not happen in time


class Finding(msgspec.Struct, frozen=True):
    """One report of a sensor."""

    what: What
    job: str
    slots: tuple[int, ...]
    at: float
    """Seconds since the epoch, on the controller's clock."""
    source: Source
    evidence: str
    element: int = -1
    node: str = ""
    by: str = ""
    """The detection method, in the words of `unicronctl`: lease, process exit, exception, statistics, ..."""
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
    """With AGENT_DIED: its node can be reached."""
    spare: bool = False
    """With NODE_LOST: the job goes on without the node, which is left alone."""
    agent: str = ""
    """With NODE_LOST and AGENT_DIED: the agent that is lost."""
