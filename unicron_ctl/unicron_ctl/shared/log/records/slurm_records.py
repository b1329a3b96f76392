"""Records of the controller itself, of what is planned, and of what is asked of Slurm."""

from __future__ import annotations

from unicron_ctl.shared.log.records.base import Record


class ControllerStarted(Record, frozen=True, tag="started"):
    """The controller started.

    jobs: how many its log holds.
    """

    pid: int
    address: str
    jobs: int


class LogRestored(Record, frozen=True, tag="restored"):
    """The log up to here is that of a backup; what came later is lost. taken: when its last event was, seconds since
    1970."""

    taken: float


class ConfigReloaded(Record, frozen=True, tag="configured"):
    """The configuration was read again."""


class ConfigRefused(Record, frozen=True, tag="config_refused"):
    """The configuration was to be read again, and has a mistake: the old one stays."""


class BadMessage(Record, frozen=True, tag="bad_message"):
    """A message could not be read.

    peer: its routing id in hexadecimal.
    """

    peer: str


class RegistrationRefused(Record, frozen=True, tag="registration_refused"):
    """An agent was not taken in.

    peer: job and element. node: where the agent says that it is.
    """

    peer: str
    node: str = ""


class JobSetAside(Record, frozen=True, tag="job_set_aside"):
    """The controller leaves the job alone; its ranks train on. It cannot handle the job's input, or elements of the job
    do not fit together.

    input: what was being handled, for a report; where: the end of the traceback. sweep: its elements are runs of their
    own.
    """

    input: str
    where: str = ""
    sweep: bool = False


class ActionObserved(Record, frozen=True, tag="observed"):
    """Decided and not done, for the admin does not allow it in this partition. action: the call of Slurm. nodes: what
    the plan would give the job (action "plan")."""

    would: str
    action: str = ""
    node: str = ""
    element: int = -1
    nodes: int = 0


class ObservedWeek(Record, frozen=True, tag="observed_week"):
    """The savings that acting would have brought since `since` (seconds since the epoch). calls: of Slurm, not made, by
    kind. planned, nodes: by job, how things stand at its end."""

    since: float
    node_hours: float
    calls: dict[str, int] = {}
    planned: dict[str, int] = {}
    nodes: dict[str, int] = {}


class SlurmAction(Record, frozen=True, tag="slurm_action"):
    """Asked of Slurm: the intent; `slurm_done` or `slurm_error` is the outcome. restarts: how often Slurm had requeued
    the element before, -1 where that is not known."""

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
    """An admin has Unicron change nothing in Slurm. partition: "" for all; until: epoch seconds, 0 for no end."""

    partition: str = ""
    until: float = 0.0


class ActionsResumed(Record, frozen=True, tag="unpaused"):
    """An admin has ended that. partition: "" for all that is paused."""

    partition: str = ""


class NeedsAdmin(Record, frozen=True, tag="needs_admin"):
    """Something needs an admin, or no longer does (over). key: what tells it from all else."""

    key: str
    node: str = ""
    over: bool = False


class NoticesSent(Record, frozen=True, tag="told"):
    """A target of [notify] has heard of all events up to `upto` that are for it. notices: how many there were."""

    target: str
    upto: int
    notices: int = 0


class HeldAgain(Record, frozen=True, tag="held_again"):
    """Slurm shows an element held by what was written here, and the log has it as released or at work since."""

    element: int


class ElementUnpinned(Record, frozen=True, tag="unpinned"):
    """An element need not start any more where it was told to. node: it has not started there, for what Slurm `said`,
    and the pin is going to be taken back: until then, in seconds since the epoch, the job is not given that node."""

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
