"""The interface to Slurm. A job is an array of elements; a plain job counts as an array of one element, number 0."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from unicron_ctl.shared.slurm.states import ASLEEP, REASON, UNUSABLE, unknown
from unicron_ctl.shared.system.errors import UserError, one_line, shorten

# Reasons of a pending element that somebody has to release. squeue prints slurmctld's text in place of the reason's
# name if there is one. Source: docs/behaviour/slurm-states.toml.
HOLDS = re.compile(
    r"JobHeld(Admin|User)$|Reservation(Deleted|Invalid)|Reservation .*(was deleted|is invalid)$"
    r"|job requeued in special exit state|.*\bheld\b"
)
# The beginnings, in lower case, of the reasons that Slurm's own daemons give a node. One too many only keeps a person's
# word from counting until it is given in other words; one too few takes a living node for dead.
_SLURMS_OWN = (
    "not responding",
    "node unexpectedly rebooted",
    "low ",  # RealMemory, TmpDisk, CPUs, socket*core*thread count
    "gres/",
    "bad core count",
    "restrictedcorespergpu",
    "reported active features",
    "could not unpack gres",
    "duplicate jobid",
    "kill task failed",
    "prolog ",
    "epilog ",
    "batch job complete failure",
    "reboot ",  # ASAP, requested, issued, complete, timed out
    "resumetimeout reached",
)


def with_blanks(reason: str) -> str:
    """Return a pending element's reason as squeue prints it, without the underscores of scontrol."""
    return reason.strip().replace("_", " ")


def slurms_own(reason: str) -> bool:
    """Say whether Slurm itself has given a node this reason, and no person, script or tool."""
    return not reason or reason.lower().startswith(_SLURMS_OWN)


def current_reason(states: frozenset[str], reason: str) -> str:
    """Return why a node in these states is out of service; "" for one in service, whatever reason it still has."""
    return reason if states & REASON or unknown(states) else ""


MOST_CHARACTERS = 500  # of an error, since programs may print anything


class SlurmError(UserError):
    """Slurm refused a call or did not answer in time. The text is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(shorten(one_line(message), MOST_CHARACTERS))


class SlurmTimeout(SlurmError):
    """Slurm did not answer in time: the next call would wait as long."""


NONE_SET = float("inf")  # for a limit that a partition does not have


@dataclass(frozen=True)
class PartitionInfo:
    """A partition, and what one job there may have."""

    name: str
    nodes: int
    """Nodes of the partition."""
    state: str
    """UP, DOWN, DRAIN or INACTIVE."""
    grace: float = 0.0
    """GraceTime, in seconds."""
    max_seconds: float = NONE_SET
    min_nodes: float = 0.0
    max_nodes: float = NONE_SET
    max_memory: float = NONE_SET
    """MB of one node."""
    max_cpus: float = NONE_SET
    """CPUs of one node."""
    topology: str = ""
    """Its own topology, "" for the cluster's."""

    @property
    def limited(self) -> bool:
        """The partition limits what a job may have."""
        most = self.max_seconds, self.max_nodes, self.max_memory, self.max_cpus
        return self.min_nodes > 1 or any(limit != NONE_SET for limit in most)


@dataclass(frozen=True)
class Needs:
    """A pending element's least request of one node (:mod:`unicron_ctl.shared.slurm.asked`); 0 for what is not asked
    for or not known."""

    nodes: int = 1
    """Nodes of the element."""
    cpus: int = 0
    cpus_in_all: int = 0
    """CPUs on all its nodes together."""
    tasks: int = 0
    memory: int = 0
    """MB for a node, or for a CPU, as Slurm stores it."""
    in_all: int = 0
    """MB for everything on the node."""
    per_cpu: int = 0
    """MB for each CPU, if memory is asked for like that."""
    tmp: int = 0
    """MB of local disk."""
    sockets: int = 0
    cores: int = 0
    """Cores of a socket."""
    threads: int = 0
    """Threads of a core."""
    tasks_per_socket: int = 0
    tasks_per_core: int = 0
    cpus_per_task: int = 1
    room: int = 0
    """Tasks that must find room, however many there are."""


@dataclass(frozen=True)
class Size:
    """The size of a node."""

    cpus: int = 0
    """0 if unknown."""
    sockets: int = 1
    cores: int = 1
    threads: int = 1
    memory: int = 0
    """MB."""
    to_give: int | None = None
    """MB that Slurm deals out among jobs; None if it does not (SelectTypeParameters)."""
    tmp: int = 0
    """MB of local disk."""


@dataclass(frozen=True)
class Reservation:
    """A reservation's name and time, in seconds since the epoch."""

    name: str
    starts: float
    ends: float


@dataclass(frozen=True)
class NodeInfo:
    """One node."""

    name: str
    states: frozenset[str]
    """The base state and all flags in upper case, such as {"DOWN", "NOT_RESPONDING"}."""
    reason: str
    """Why it is out of service, without its author."""
    address: str
    port: int
    slurmd_start: float | None
    """Seconds since the epoch; None while slurmd has not registered."""
    gpus: int
    partitions: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()
    gres: str = ""
    """The GPUs as in slurm.conf: "gpu:a100:8"."""
    reservations: tuple[Reservation, ...] = ()
    """Reservations that hold the node now or will."""
    size: Size = Size()
    limits: tuple[PartitionInfo, ...] = ()
    """Its partitions that limit what a job may have."""

    @property
    def healthy(self) -> bool:
        """Slurm could run something there: now, once it is free, or once it has been switched on."""
        wrong = self.states & UNUSABLE | unknown(self.states)
        return bool(self.states) and not (wrong - {"NOT_RESPONDING"} if self.asleep else wrong)

    @property
    def asleep(self) -> bool:
        """Power saving has the node off, or on its way there or back, so its silence means nothing."""
        return bool(self.states & ASLEEP)

    @property
    def heard(self) -> bool:
        """Slurm hears the node's slurmd, and could run something there."""
        return self.healthy and not self.asleep


@dataclass(frozen=True)
class ElementInfo:
    """One element of an array job, or a plain job. A text with an ellipsis at its end was longer."""

    job: str
    """The array's id."""
    element: int
    slurm_id: str
    """The element's own id, equal to `job` until Slurm splits the element off."""
    state: str
    """A state that :func:`unicron_ctl.shared.slurm.states.element_state` returns it."""
    node: str | None = None
    reason: str = ""
    """Why a pending element waits."""
    name: str = ""
    """Written by the user like `comment`, and `account` without accounting: any bytes may be in it."""
    user: str = ""
    comment: str = ""
    restarts: int = 0
    """Number of its requeues."""
    exit_code: str = ""
    """ "code:signal" of an element that has ended."""
    uid: int = 0
    submitted: float = 0.0
    """Seconds since the epoch, set anew at a requeue."""
    account: str = ""
    qos: str = ""
    partition: str = ""
    """May be a list with commas while it is pending."""
    features: str = ""
    """The constraint, as in sbatch(1)."""
    gres: str = ""
    """The GPUs that it asks of a node, in whatever way, such as gpu:a100:8."""
    reservation: str = ""
    excluded_nodes: frozenset[str] = frozenset()
    time_limit: float | None = None
    """Seconds."""
    priority: int = 0
    admin_comment: str = ""
    """Written only by administrators."""
    starts: float | None = None
    """The scheduler's estimate for a pending element, like `planned_nodes`."""
    planned_nodes: frozenset[str] = frozenset()
    required_nodes: frozenset[str] = frozenset()
    """Nodes that it must have: its user's, or the last pin."""
    asked: Needs = Needs()
    hetero: str = ""
    """The id of the heterogeneous job of which it is a component."""
    brief: bool = False
    """Only the whole queue showed it, so its owner, its number and its texts are unknown."""
    array: bool = False
    """Whether it is a task of a job array."""
    on_hold: bool = False
    """Slurm's word for its state says that it is held, whatever its reason."""
    allocation: int = 1
    """Nodes of its allocation, which Slurm holds, requeues and ends as a whole."""
    block: int = 1
    """Nodes that are one element of the array (:mod:`unicron_ctl.controller.model.allocation`)."""

    @property
    def label(self) -> str:
        """The element's name: 7_2."""
        return f"{self.job}_{self.element // self.block}" if self.job != SOMEBODY else "another job"

    @property
    def held(self) -> bool:
        """Slurm will not start it until it is released."""
        return self.state == "PENDING" and (self.on_hold or bool(HOLDS.match(with_blanks(self.reason))))


@dataclass
class Queue:
    """The whole queue, as far as the planner needs it."""

    elements: list[ElementInfo] = field(default_factory=list)
    """Others' elements that occupy nodes, and their most urgent pending element of each kind."""
    rows: int = 0
    """Rows of the whole queue."""
    cut: bool = False
    """Some lists of nodes did not fit, so it is unknown who occupies some nodes."""


@dataclass(frozen=True)
class Site:
    """Slurm's settings that seldom change."""

    private: frozenset[str] = frozenset()
    """PrivateData: kinds of things of which users see only their own."""
    domains: Mapping[str, str] = field(default_factory=dict)
    """Node -> the leaf switch or block with which it fails."""
    kill_wait: float = 30.0
    """Seconds from SIGTERM to SIGKILL when something has to end."""
    grace: Mapping[str, float] = field(default_factory=dict)
    """Partition -> seconds from the first SIGTERM to that, when something is preempted."""
    shrinks: int = 0
    """Number of times that Slurm takes nodes from a running job if asked to."""


UNSAID = Site()
SOMEBODY = "?"  # the job of an element that is known only by the node that it uses


class SlurmClient(Protocol):
    """The controller's calls of Slurm. Each has a time limit and raises SlurmError, one line, if it fails. A mutating
    call may be repeated: to requeue a pending element, or to release one that is not held, is no error."""

    def nodes(self) -> list[NodeInfo]:
        """Return all nodes, in Slurm's order."""

    def elements(self, jobs: Collection[str] | None = None) -> list[ElementInfo]:
        """Return all elements of these jobs, or of all jobs, that Slurm still knows, including those finished in the
        last minutes (MinJobAge). Of pending elements that Slurm has not told apart yet, only the first are returned."""

    def others(self, but: Collection[str] = ()) -> Queue:
        """Return the queue without these jobs: who occupies nodes, and the most urgent pending ones of each kind."""

    def private_data(self) -> frozenset[str]:
        """Return Slurm's PrivateData: kinds of things of which users see only their own (slurm.conf(5))."""

    def kill_wait(self) -> float:
        """Return Slurm's KillWait, seconds: from SIGTERM to SIGKILL when an element has to end (slurm.conf(5))."""

    def grace(self) -> dict[str, float]:
        """Return each partition's GraceTime, seconds: for which a preempted element may go on (slurm.conf(5))."""

    def shrinks(self) -> int:
        """Return how often Slurm takes nodes from a running job: 0 with disable_job_shrink, 1 without slurmdbd."""

    def domains(self) -> dict[str, str]:
        """Return by node what it fails with: its leaf switch, or its block. Empty if Slurm knows no topology."""

    def down(self, node: str, reason: str) -> None:
        """Set a node down: what runs on it is requeued or ended at once. Do this before an element of a failed node is
        requeued or held, not while it is completing: Slurm 22.05 would lose its GPU records (docs/local-cluster.md)."""

    def drain(self, node: str, reason: str) -> None:
        """Give a node no further work; what runs on it goes on."""

    def resume(self, node: str) -> None:
        """Give a drained or downed node back to the scheduler; no error for one in service. Slurm shows the node as not
        responding until its slurmd has answered, for which the call waits a short time."""

    def requeue(self, job: str, element: int) -> None:
        """End a running element and put it back into the queue, under the same ids."""

    def requeue_hold(self, job: str, element: int, comment: str) -> None:
        """Requeue a running element held, or hold a pending one; `comment` says why (AdminComment)."""

    def hold(self, job: str, element: int, comment: str) -> None:
        """Keep a pending element from starting; `comment` says why (AdminComment)."""

    def release(self, job: str, element: int, comment: str = "") -> None:
        """Let a held element start; `comment` replaces that of the hold (AdminComment)."""

    def pin(self, job: str, element: int, node: str | None) -> None:
        """Let a pending element start only on this node; None takes that back."""

    def shrink(self, job: str, nodes: str) -> None:
        """Leave a running job without an array only these of its nodes, names with commas. What still runs on the
        others is killed, and then srun fails (docs/design/allocations.md)."""

    def start_now(self, job: str, element: int) -> None:
        """End the wait that Slurm imposes on a requeued element; an element that has begun is left alone."""

    def comment(self, job: str, element: int, text: str) -> None:
        """Make `text` Unicron's part of the element's AdminComment, beside what others wrote. Slurm cannot compare
        before it writes, so the comment is read again, and a text that somebody else wrote meanwhile is put back. No
        error for an element that has finished, whose comment Slurm does not change."""

    def cancel(self, job: str, element: int | None = None, comment: str = "") -> None:
        """End an element, or the whole job, for good; `comment` says why (AdminComment of the element)."""
