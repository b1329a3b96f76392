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
    uptime: float | None  # seconds that the process had lived; None if unknown
    worked: bool  # the process had finished an iteration
    event: str  # a value of `escalation_table.Event`
    state: str  # of the slot, a value of `escalation_table.State`
    others: list[int] = []  # further slots with an alike fault


class SeenExit(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a process that belongs to a failure."""

    slot: int
    agent: str
    incarnation: int
    pid: int = 0  # 0 in records of release 0.2


class FailureDetected(Record, frozen=True, tag="failure_detected"):
    """The judge's verdict on a finding; the event's id is the failure's number."""

    kind_of_failure: str  # rank | node | agent | network | hang | exception | transfer | action | corruption | data
    slots: list[int]
    severity: int
    cause: str
    action: str
    detected_by: str
    source: str  # as in the finding
    element: int = -1
    node: str = ""
    member: bool = False  # a member of the job's generation has failed
    leave_out: dict[int, str] = {}  # slots without which the job has to go on -> reason
    regroup: str = ""  # why a new generation is needed although no rank is lost
    wait_seconds: float = 0.0  # before its process starts again
    escalation: EscalationFacts | None = None
    exits: list[SeenExit] = []
    iteration: int | None = None  # that the rank computed
    micro_batch: tuple[int, int] | None = None  # (iteration, index) that the rank computed when it failed
    detected_in: int = 0  # the highest generation at that time
    exit_code: int | None = None
    pid: int | None = None
    last_line: str = ""  # of the process's output
    lived: float | None = None  # seconds from the start of the process to its end
    fault_at: float | None = None  # the time of the exception, by the agent's clock
    noted: float | None = None  # the time of a note: a fault that was corrected without the controller
    noted_by: int | None = None  # the slot whose note it is; None for the first of `slots`


class FailureVerdict(Record, frozen=True, tag="failure_verdict"):
    """A failure was judged anew; None leaves a field as it was."""

    failure: int
    slots: list[int] = []  # those of its slots that it is about, which become a failure of their own; empty: all
    severity: int | None = None
    cause: str | None = None
    action: str | None = None
    slurm: str | None = None  # the state that Slurm showed


class FailureAction(Record, frozen=True, tag="failure_action"):
    """An action against a failure, as a text."""

    failure: int
    text: str


class LeaveOut(Record, frozen=True, tag="leave_out"):
    """Members without which the job has to go on; their failure was recorded before."""

    failure: int
    slots: dict[int, str]  # slot -> reason


class JobHealed(Record, frozen=True, tag="healed"):
    """A job trains again after failures."""

    failures: list[int]  # their numbers
    cause: str  # of the first one
    seconds: float  # from the first failure to the next iteration
    lost_seconds: float  # of the job's time, including repeated iterations
    nodes: int  # the job's number of nodes
    node: str = ""  # of the first failure


class ActionFailed(Record, frozen=True, tag="action_failed"):
    """An action reached its time limit or was refused."""

    slot: int  # -1 if Slurm refused to take the node out of service
    node: str
    failed: str  # the action that failed
    action: str  # the next one
    severity: int
    state: str = ""  # of the slot, as in `EscalationFacts`
    failure: int = 0  # its number, or 0
