"""The interface to Slurm. A job is an array of elements; a plain job counts as an array of one element, number 0."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from unicron_ctl.shared.slurm.states import ASLEEP, REASON, UNUSABLE, unknown
from unicron_ctl.shared.system.errors import UserError, one_line, shorten

# The reasons of a pending element that somebody has to release. Where slurmctld has a text, squeue prints that in place
# of the reason's name. Source: docs/behaviour/slurm-states.toml.
HOLDS = re.compile(
    r"JobHeld(Admin|User)$|Reservation(Deleted|Invalid)|Reservation .*(was deleted|is invalid)$"
    r"|job requeued in special exit state|.*\bheld\b"
)
# How the reasons begin that Slurm's own daemons give a node, in lower case. One too many only keeps a person's word
# from counting until it is said otherwise; one too few proves the living dead.
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
    """A pending element's reason as squeue prints it; scontrol has underscores in it."""
    return reason.strip().replace("_", " ")


def slurms_own(reason: str) -> bool:
    """Whether Slurm itself has given a node this reason: no person, no script, no tool."""
    return not reason or reason.lower().startswith(_SLURMS_OWN)


def current_reason(states: frozenset[str], reason: str) -> str:
    """Why a node in these states is out of service; "" for one that is in service, whatever reason it still has."""
    return reason if states & REASON or unknown(states) else ""


MOST_CHARACTERS = 500  # characters of what went wrong: programs may say anything


class SlurmError(UserError):
    """Slurm refused a call or did not answer in time. The text is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(shorten(one_line(message), MOST_CHARACTERS))


class SlurmTimeout(SlurmError):
    """Slurm did not answer in time: the next call would wait as long."""


NONE_SET = float("inf")  # where a partition has no limit


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
        """Whether it limits what a job may have."""
        most = self.max_seconds, self.max_nodes, self.max_memory, self.max_cpus
        return self.min_nodes > 1 or any(limit != NONE_SET for limit in most)


@dataclass(frozen=True)
class Needs:
    """A pending element's request of one node at least (:mod:`unicron_ctl.shared.slurm.asked`); 0 where it asks for
    nothing, or that is not known."""

    nodes: int = 1
    """Nodes of the element."""
    cpus: int = 0
    cpus_in_all: int = 0
    """CPUs on all its nodes together."""
    tasks: int = 0
    memory: int = 0
    """MB for a node, or for a CPU, as Slurm stores it."""
    in_all: int = 0
    """MB for all that it is to have on the node."""
    per_cpu: int = 0
    """MB for each CPU, where memory is asked for like that."""
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
    """0 where it is not known."""
    sockets: int = 1
    cores: int = 1
    threads: int = 1
    memory: int = 0
    """MB."""
    to_give: int | None = None
    """MB that Slurm deals out among jobs; None where it does not (SelectTypeParameters)."""
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
    """As in slurm.conf: "gpu:a100:8"."""
    reservations: tuple[Reservation, ...] = ()
    """Those that hold the node now or will."""
    size: Size = Size()
    limits: tuple[PartitionInfo, ...] = ()
    """Its partitions that limit what a job may have."""

    @property
    def healthy(self) -> bool:
        """Whether Slurm could run something there: now, once it is free, or once it has been switched on."""
        wrong = self.states & UNUSABLE | unknown(self.states)
        return bool(self.states) and not (wrong - {"NOT_RESPONDING"} if self.asleep else wrong)

    @property
    def asleep(self) -> bool:
        """Whether power saving has the node off, or on its way there or back; then its silence says nothing."""
        return bool(self.states & ASLEEP)

    @property
    def heard(self) -> bool:
        """Whether Slurm hears the node's slurmd, and could run something there."""
        return self.healthy and not self.asleep


@dataclass(frozen=True)
class ElementInfo:
    """One element of an array job, or a plain job.

    `job` is the array's id, `slurm_id` the element's own (equal to `job` until Slurm splits the element off), `node`
    None unless it has one, `reason` what Slurm says about a pending element, `restarts` how often it was requeued,
    `exit_code` "code:signal" of one that has ended ("" otherwise).

    `submitted` is in seconds since the epoch, and Slurm sets it anew when it requeues an element. `partition` may be a
    list with commas while it is pending. `features` (a constraint, as in sbatch(1)), `gres` ("gpu:a100:8", however it
    asks for that) and `asked` are what it asks of a node. `required_nodes` are those that it must have: its user's, or
    the last pin. `time_limit` is in seconds, None for none. `starts` and `planned_nodes` are the scheduler's
    own estimate for a pending one. Users write `name`, `comment` and, without accounting, `account`; any of their
    bytes may be in them. Only administrators write `admin_comment`. A text with an ellipsis at its end was longer.
    `hetero` is the id of the heterogeneous job of which it is a component, empty for none.
    `brief`: only the whole queue showed it, so that its owner, its number and its texts are not known.
    `array`: it is a task of a job array. `allocation`: so many nodes are one allocation with it, which Slurm holds,
    requeues and ends as a whole. `block`: so many nodes are one element of the array
    (:mod:`unicron_ctl.controller.model.allocation`). `state` is as
    :func:`unicron_ctl.shared.slurm.states.element_state` says, and `on_hold` that Slurm's own word for it tells that it
    is held, whatever its reason.
    """

    job: str
    element: int
    slurm_id: str
    state: str
    node: str | None
    reason: str
    name: str
    user: str
    comment: str
    restarts: int
    exit_code: str = ""
    uid: int = 0
    submitted: float = 0.0
    account: str = ""
    qos: str = ""
    partition: str = ""
    features: str = ""
    gres: str = ""
    reservation: str = ""
    excluded_nodes: frozenset[str] = frozenset()
    time_limit: float | None = None
    priority: int = 0
    admin_comment: str = ""
    starts: float | None = None
    planned_nodes: frozenset[str] = frozenset()
    required_nodes: frozenset[str] = frozenset()
    asked: Needs = Needs()
    hetero: str = ""
    brief: bool = False
    array: bool = False
    on_hold: bool = False
    allocation: int = 1
    block: int = 1

    @property
    def label(self) -> str:
        """The element's name: 7_2."""
        return f"{self.job}_{self.element // self.block}" if self.job != SOMEBODY else "another job"

    @property
    def held(self) -> bool:
        """Whether Slurm will not start it until it is released."""
        return self.state == "PENDING" and (self.on_hold or bool(HOLDS.match(with_blanks(self.reason))))


@dataclass
class Queue:
    """The whole queue, as far as the planner needs it.

    elements: of others, those that occupy nodes and the most urgent pending one of each kind. rows: how many the
    whole queue has. cut: some lists of nodes did not fit, so that it is not known who is on some nodes."""

    elements: list[ElementInfo] = field(default_factory=list)
    rows: int = 0
    cut: bool = False


@dataclass(frozen=True)
class Site:
    """Settings that seldom change. private: Slurm's PrivateData, kinds of things of which users see their own only.
    domains: node -> the leaf switch or block with which it fails. kill_wait: seconds from SIGTERM to SIGKILL when
    something is to end. grace: partition -> seconds from the first SIGTERM to that, when something is preempted.
    shrinks: how often Slurm takes nodes from a running job when it is asked to."""

    private: frozenset[str] = frozenset()
    domains: Mapping[str, str] = field(default_factory=dict)
    kill_wait: float = 30.0
    grace: Mapping[str, float] = field(default_factory=dict)
    shrinks: int = 0


UNSAID = Site()
SOMEBODY = "?"  # the job of an element that is known only by the node that it uses


class SlurmClient(Protocol):
    """The controller's calls of Slurm. Every call has a time limit and raises SlurmError, one line, when it fails. A
    mutating call may be repeated: to requeue what is pending, or to release what is not held, is no error."""

    def nodes(self) -> list[NodeInfo]:
        """All nodes, by name as Slurm orders them."""

    def elements(self, jobs: Collection[str] | None = None) -> list[ElementInfo]:
        """All elements of these jobs that Slurm still knows, those finished in the last minutes (MinJobAge) included;
        of all jobs where none are named. Of pending elements that Slurm has not told apart yet only the first ones."""

    def others(self, but: Collection[str] = ()) -> Queue:
        """The whole queue but these jobs: who occupies nodes, and the most urgent of each kind that is pending."""

    def private_data(self) -> frozenset[str]:
        """Return what Slurm's PrivateData names: of these kinds users see their own only (slurm.conf(5))."""

    def kill_wait(self) -> float:
        """Slurm's KillWait, seconds: from SIGTERM to SIGKILL when an element is to end (slurm.conf(5))."""

    def grace(self) -> dict[str, float]:
        """partition -> its GraceTime, seconds: for which Slurm lets go on what it preempts (slurm.conf(5))."""

    def shrinks(self) -> int:
        """Return how often Slurm takes nodes from a running job when it is asked to: never with disable_job_shrink, and
        only once without slurmdbd."""

    def domains(self) -> dict[str, str]:
        """node -> what it fails with: its leaf switch, or its block. Empty where Slurm knows no topology."""

    def down(self, node: str, reason: str) -> None:
        """Sets a node down: what runs on it is requeued or ended at once.

        Do this before an element of a failed node is requeued or held, not while it is completing: Slurm 22.05 would
        lose its GPU records (docs/local-cluster.md).
        """

    def drain(self, node: str, reason: str) -> None:
        """Gives a node no further work; what runs on it goes on."""

    def resume(self, node: str) -> None:
        """Gives a drained or downed node back to the scheduler. No error for one that is in service.

        Slurm shows a node as not responding until its slurmd has answered again. The call waits for that,
        but not for long: a listing shows what is still so afterwards.
        """

    def requeue(self, job: str, element: int) -> None:
        """Ends a running element and puts it back in the queue, under the same ids."""

    def requeue_hold(self, job: str, element: int, comment: str) -> None:
        """Requeues a running element held, or holds a pending one; `comment` says why (AdminComment)."""

    def hold(self, job: str, element: int, comment: str) -> None:
        """Keeps a pending element from starting; `comment` says why (AdminComment)."""

    def release(self, job: str, element: int, comment: str = "") -> None:
        """Lets a held element start; `comment` takes the place of what the hold said (AdminComment)."""

    def pin(self, job: str, element: int, node: str | None) -> None:
        """Lets a pending element start on this node and no other; None takes that back."""

    def shrink(self, job: str, nodes: str) -> None:
        """Leaves a running job that is no array these nodes of its own, names with commas. What still runs on the
        others is killed, and srun fails then (docs/design/allocations.md)."""

    def start_now(self, job: str, element: int) -> None:
        """Ends the wait that Slurm imposes on a requeued element; nothing happens to one that has begun already."""

    def comment(self, job: str, element: int, text: str) -> None:
        """Makes `text` Unicron's part of the element's AdminComment, and leaves what others wrote there. Slurm cannot
        compare before it writes: it is read again after that, and somebody else's text of that moment is put back. No
        error for one that has finished, whose comment Slurm does not change."""

    def cancel(self, job: str, element: int | None = None, comment: str = "") -> None:
        """Ends an element, or the whole job, for good; `comment` says why (AdminComment of the element)."""
