"""Records of failures and what was done about them."""

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
    """The end of a process that a failure is about."""

    slot: int
    agent: str
    incarnation: int


class FailureDetected(Record, frozen=True, tag="failure_detected"):
    """The judge's verdict on a finding; `id` of the event is the failure's number.

    kind_of_failure: rank | node | agent | network | hang | exception | transfer | action. source: who said it.
    leave_out: slots that the job has to go on without. regroup: a new generation is needed although nobody is lost.
    noted: the time of a note. micro_batch: the iteration and the index of the one
    that the rank computed when it failed. detected_in: the highest generation at that time.
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
    """More is known of a failure; None leaves a field as it was. slurm: the state that Slurm showed."""

    failure: int
    severity: int | None = None
    cause: str | None = None
    action: str | None = None
    slurm: str | None = None


class FailureAction(Record, frozen=True, tag="failure_action"):
    """Something was done about a failure, in words."""

    failure: int
    text: str


class LeaveOut(Record, frozen=True, tag="leave_out"):
    """Members that the job has to go on without, slot -> why; their failure was recorded before."""

    failure: int
    slots: dict[int, str]


class JobHealed(Record, frozen=True, tag="healed"):
    """A job trains again after failures. failures: their numbers. cause, node: the first one's.

    seconds: from the first failure to the first iteration after it. lost_seconds: of the job's time, iterations that
    were made again included. nodes: that the job had."""

    failures: list[int]
    cause: str
    seconds: float
    lost_seconds: float
    nodes: int
    node: str = ""


class ActionFailed(Record, frozen=True, tag="action_failed"):
    """An action came to its time limit or was refused; slot -1: Slurm refused to take the node out of service."""

    slot: int
    node: str
    failed: str
    action: str
    severity: int
    state: str = ""
    failure: int = 0
