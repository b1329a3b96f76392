"""Records of the controller itself, of plans, and of actions in Slurm."""

from __future__ import annotations

from unicron_ctl.shared.log.records.base import Record


class ControllerStarted(Record, frozen=True, tag="started"):
    """The controller started. jobs: their number in its log."""

    pid: int
    address: str
    jobs: int


class LogRestored(Record, frozen=True, tag="restored"):
    """The log up to here is that of a backup; later events are lost. taken: the time of its last event, in seconds
    since the epoch."""

    taken: float


class ConfigReloaded(Record, frozen=True, tag="configured"):
    """The configuration was read again."""


class ConfigRefused(Record, frozen=True, tag="config_refused"):
    """The new configuration has a mistake: the old one stays."""


class BadMessage(Record, frozen=True, tag="bad_message"):
    """A message could not be read. peer: its routing id in hexadecimal."""

    peer: str


class RegistrationRefused(Record, frozen=True, tag="registration_refused"):
    """An agent was not taken in. peer: job and element. node: the agent's, as it claims."""

    peer: str
    node: str = ""


class JobSetAside(Record, frozen=True, tag="job_set_aside"):
    """The controller leaves the job alone, because it cannot handle the job's input, or because the job's elements do
    not fit together; its ranks train on.

    input: for a report of the fault. where: the end of the traceback. sweep: its elements are runs of their own.
    """

    input: str
    where: str = ""
    sweep: bool = False


class ActionObserved(Record, frozen=True, tag="observed"):
    """An action was decided but not done, because the admin does not allow it in this partition. action: the call of
    Slurm, or "plan". nodes: what the plan would give the job."""

    would: str
    action: str = ""
    node: str = ""
    element: int = -1
    nodes: int = 0


class ObservedWeek(Record, frozen=True, tag="observed_week"):
    """The savings that acting would have brought since `since` (seconds since the epoch). calls: the omitted calls of
    Slurm, by kind. planned, nodes: by job, at the end of that time."""

    since: float
    node_hours: float
    calls: dict[str, int] = {}
    planned: dict[str, int] = {}
    nodes: dict[str, int] = {}


class SlurmAction(Record, frozen=True, tag="slurm_action"):
    """The intent to do something in Slurm; `slurm_done` or `slurm_error` is the outcome. restarts: how often Slurm had
    requeued the element before; -1 if unknown."""

    action: str
    element: int
    node: str
    slurm_reason: str = ""
    restarts: int = -1


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
    """An admin has paused all changes in Slurm. partition: "" for all. until: seconds since the epoch; 0 for no end."""

    partition: str = ""
    until: float = 0.0


class ActionsResumed(Record, frozen=True, tag="unpaused"):
    """An admin has ended a pause. partition: "" for all that are paused."""

    partition: str = ""


class NeedsAdmin(Record, frozen=True, tag="needs_admin"):
    """Something needs an admin, or no longer does (over). key: identifies it."""

    key: str
    node: str = ""
    over: bool = False


class NoticesSent(Record, frozen=True, tag="told"):
    """A target of [notify] has heard of all its events up to `upto`. notices: their number."""

    target: str
    upto: int
    notices: int = 0


class HeldAgain(Record, frozen=True, tag="held_again"):
    """Slurm shows an element held for Unicron's reason, although the log has it as released or at work."""

    element: int


class ElementUnpinned(Record, frozen=True, tag="unpinned"):
    """An element is no longer pinned to a node. node: it did not start there, for the reason that Slurm `said`; the job
    does not get this node before `until` (seconds since the epoch)."""

    element: int
    node: str = ""
    said: str = ""
    until: float = 0.0


class ElementsAllotted(Record, frozen=True, tag="allotted"):
    """The elements that have a place in the plan, and the members that leave at the next boundary."""

    elements: list[int]
    leaving: list[int]


class ClusterReplanned(Record, frozen=True, tag="replanned"):
    assignment: dict[str, int]
    reasons: dict[str, str]
    objective: float
    waf: float
    inputs: str
    trigger: str
    spares: int
    looked_up: bool
    layouts: dict[str, str] = {}
