"""Records of failures and of the actions against them."""

from __future__ import annotations

import msgspec

from unicron_ctl.shared.log.records.base import Record


class EscalationFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a failure that escalation remembers (unicron_detector.failures.escalation)."""

    slot: int
    node: str
    scope: str
    severity: int
    uptime: float | None
    worked: bool
    event: str
    state: str


class SeenExit(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a process that belongs to a failure."""

    slot: int
    agent: str
    incarnation: int


class FailureDetected(Record, frozen=True, tag="failure_detected"):
    """The judge's verdict on a finding; the event's id is the failure's number.

    kind_of_failure: rank | node | agent | network | hang | exception | transfer | action. source: as in the finding.
    leave_out: slots without which the job has to go on. regroup: why a new generation is needed although no rank is
    lost. noted: the time of a note. micro_batch: (iteration, index) that the rank computed when it failed. detected_in:
    the highest generation at that time.
    """

    kind_of_failure: str
    slots: list[int]
    severity: int
    cause: str
    action: str
    detected_by: str
    source: str
    element: int = -1
    node: str = ""
    member: bool = False
    leave_out: dict[int, str] = {}
    regroup: str = ""
    wait_seconds: float = 0.0
    escalation: EscalationFacts | None = None
    exits: list[SeenExit] = []
    iteration: int | None = None
    micro_batch: tuple[int, int] | None = None
    detected_in: int = 0
    exit_code: int | None = None
    pid: int | None = None
    last_line: str = ""
    lived: float | None = None
    fault_at: float | None = None
    noted: float | None = None


class FailureVerdict(Record, frozen=True, tag="failure_verdict"):
    """A failure was judged anew; None leaves a field as it was. slurm: the state that Slurm showed."""

    failure: int
    severity: int | None = None
    cause: str | None = None
    action: str | None = None
    slurm: str | None = None


class FailureAction(Record, frozen=True, tag="failure_action"):
    """An action against a failure, as a text."""

    failure: int
    text: str


class LeaveOut(Record, frozen=True, tag="leave_out"):
    """Members without which the job has to go on, slot -> reason; their failure was recorded before."""

    failure: int
    slots: dict[int, str]


class JobHealed(Record, frozen=True, tag="healed"):
    """A job trains again after failures.

    failures: their numbers. cause, node: of the first one. seconds: from the first failure to the next iteration.
    lost_seconds: of the job's time, including repeated iterations. nodes: the job's number of nodes.
    """

    failures: list[int]
    cause: str
    seconds: float
    lost_seconds: float
    nodes: int
    node: str = ""


class ActionFailed(Record, frozen=True, tag="action_failed"):
    """An action reached its time limit or was refused. slot: -1 if Slurm refused to take the node out of service."""

    slot: int
    node: str
    failed: str
    action: str
    severity: int
    state: str = ""
    failure: int = 0
