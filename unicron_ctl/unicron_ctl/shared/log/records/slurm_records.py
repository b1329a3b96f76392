"""Records of the controller itself, of plans, and of actions in Slurm."""

from __future__ import annotations

from unicron_ctl.shared.log.records.base import Record


class ControllerStarted(Record, frozen=True, tag="started"):
    """The controller started."""

    pid: int
    address: str
    jobs: int  # their number in its log


class LogRestored(Record, frozen=True, tag="restored"):
    """The log up to here is that of a backup; later events are lost."""

    taken: float  # the time of its last event, in seconds since the epoch


class ConfigReloaded(Record, frozen=True, tag="configured"):
    """The configuration was read again."""


class ConfigRefused(Record, frozen=True, tag="config_refused"):
    """The new configuration has a mistake: the old one stays."""


class BadMessage(Record, frozen=True, tag="bad_message"):
    """A message could not be read."""

    peer: str  # its routing id in hexadecimal


class RegistrationRefused(Record, frozen=True, tag="registration_refused"):
    """An agent was not taken in."""

    peer: str  # job and element
    node: str = ""  # the agent's, as it claims


class JobSetAside(Record, frozen=True, tag="job_set_aside"):
    """The controller leaves the job alone, because it cannot handle the job's input, or because the job's elements do
    not fit together; its ranks train on."""

    input: str  # for a report of the fault
    where: str = ""  # the end of the traceback
    sweep: bool = False  # its elements are runs of their own


class ActionObserved(Record, frozen=True, tag="observed"):
    """An action was decided but not done, because the admin does not allow it in this partition."""

    would: str  # the action, for people
    action: str = ""  # the call of Slurm, or "plan"
    node: str = ""
    element: int = -1
    nodes: int = 0  # of a plan: those that the job would get


class ObservedWeek(Record, frozen=True, tag="observed_week"):
    """The savings that acting would have brought since `since` (seconds since the epoch)."""

    since: float
    node_hours: float
    calls: dict[str, int] = {}  # the omitted calls of Slurm, by kind
    planned: dict[str, int] = {}  # nodes in the plan, by job, at the end of that time
    nodes: dict[str, int] = {}  # nodes that trained, likewise


class SlurmAction(Record, frozen=True, tag="slurm_action"):
    """The intent to do something in Slurm; `slurm_done` or `slurm_error` is the outcome."""

    action: str
    element: int
    node: str
    slurm_reason: str = ""  # the comment or node reason for Slurm; of a shrink, the nodes that stay
    restarts: int = -1  # how often Slurm had requeued the element before; -1 if unknown


class SlurmDone(Record, frozen=True, tag="slurm_done"):
    """Slurm has done it."""

    action: str
    node: str
    element: int = -1


class SlurmFailed(Record, frozen=True, tag="slurm_error"):
    action: str = ""
    element: int = -1
    node: str = ""


class SlurmBack(Record, frozen=True, tag="slurm_back"):
    """Slurm answers again."""


class ActionsPaused(Record, frozen=True, tag="paused"):
    """An admin has paused all changes in Slurm."""

    partition: str = ""  # empty for all
    until: float = 0.0  # seconds since the epoch; 0 for no end


class ActionsResumed(Record, frozen=True, tag="unpaused"):
    """An admin has ended a pause."""

    partition: str = ""  # empty for all that are paused


class NeedsAdmin(Record, frozen=True, tag="needs_admin"):
    """Something needs an admin, or no longer does."""

    key: str  # identifies it
    node: str = ""
    over: bool = False  # it no longer does


class NoticesSent(Record, frozen=True, tag="told"):
    """A target of [notify] has heard of all its events up to `upto`."""

    target: str
    upto: int
    notices: int = 0  # their number


class HeldAgain(Record, frozen=True, tag="held_again"):
    """Slurm shows an element held for Unicron's reason, although the log has it as released or at work."""

    element: int


class ElementUnpinned(Record, frozen=True, tag="unpinned"):
    """An element is no longer pinned to a node."""

    element: int
    node: str = ""
    """The node on which it did not start, for the reason `said`; empty if it was only released."""
    said: str = ""  # by Slurm
    until: float = 0.0  # the job does not get this node before (seconds since the epoch)


class ElementsAllotted(Record, frozen=True, tag="allotted"):
    """The elements that have a place in the plan, and the members that leave at the next boundary."""

    elements: list[int]
    leaving: list[int]


class ClusterReplanned(Record, frozen=True, tag="replanned"):
    assignment: dict[str, int]  # nodes by job
    reasons: dict[str, str]  # by job
    objective: float
    waf: float
    inputs: str  # the key of the planner's input
    trigger: str  # the change of the input that led to it: the key before and after
    spares: int
    looked_up: bool  # the whole plan had been made ahead
    layouts: dict[str, str] = {}  # by job
