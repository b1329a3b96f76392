"""Records of jobs and their agents."""

from __future__ import annotations

from unicron_ctl.shared.log.records.base import Record
from unicron_ctl.shared.protocol.structs import Settings


class JobRegistered(Record, frozen=True, tag="job_registered"):
    """A job is managed from now on."""

    settings: Settings
    step: int = 0  # the number of the srun in its batch script
    trains: bool = True  # the agent says that the command may train
    uid: int | None = None
    """The owner's, by the credential of the first agent. None without credentials, or if it was an admin's."""
    submitted: float = 0.0
    """The submit time as Slurm shows it, in seconds since the epoch; 0 while Slurm has not confirmed the job."""
    nodes: list[str] = []  # of one allocation, in Slurm's order
    restarts: int = 0  # how often Slurm had requeued it
    runs: dict[int, float] = {}  # as in `JobState`


class JobReallocated(Record, frozen=True, tag="reallocated"):
    """Slurm has requeued a job that is one allocation, and given it these nodes."""

    nodes: list[str]
    restarts: int


class JobConfirmed(Record, frozen=True, tag="job_confirmed"):
    """Slurm shows the owner of a job that began while Slurm did not answer."""

    uid: int
    user: str
    submitted: float
    most: int  # its elements
    nodes: list[str] = []
    restarts: int = 0


class AgentRegistered(Record, frozen=True, tag="agent_registered"):
    """An agent was taken in."""

    element: int
    agent: str
    node: str
    address: str  # by which other nodes reach this one
    slots: list[int]
    door: str = ""  # host:port at which others see that it lives
    key: str = ""
    """Its CURVE public key, to which its credential was bound; empty without encryption."""
    peer: str = ""  # host:port at which other agents of the job reach it, or empty
    peer_key: str = ""  # its key for other agents, which it has also without encryption
    confirmed: bool = True  # Slurm shows the element at work on this node, or is not used
    requeues: int = 0  # of the whole job, as the agent counts them
    restarts: int = -1  # how often Slurm had requeued the element; -1 if unknown


class AgentConfirmed(Record, frozen=True, tag="agent_confirmed"):
    """Slurm shows the element at work on the agent's node."""

    element: int
    agent: str


class EndNotice(Record, frozen=True, tag="noticed"):
    """The agent reports that its element has to end: its ranks leave at the next boundary."""

    element: int
    agent: str


class AgentGone(Record, frozen=True, tag="agent_gone"):
    element: int
    agent: str


class AgentBack(Record, frozen=True, tag="agent_back"):
    element: int
    agent: str
    node: str


class RanksReady(Record, frozen=True, tag="ranks_ready"):
    """Processes that can enter a generation."""

    agent: str
    incarnations: dict[int, int]  # by slot


class RankStart(Record, frozen=True, tag="rank_start"):
    """A new process should start in the slot, and in others of its node alike."""

    slot: int
    incarnation: int
    not_before: float  # seconds since the epoch
    failure: int = 0  # the one that it remedies, or 0
    others: list[int] = []  # further slots


class StartedCold(Record, frozen=True, tag="started_cold"):
    """Ranks of the job were not forked from their node's zygote. Recorded once for each reason."""

    element: int


class ExitNoted(Record, frozen=True, tag="exit_noted"):
    """A process ended without a failure: that was wanted, or the script ended well."""

    slot: int
    agent: str
    incarnation: int
    code: int
    others: list[int] = []  # further slots whose process ended alike


class FaultInjected(Record, frozen=True, tag="injected"):
    fault: str
    slot: int
    node: str
    seconds: float


class InjectRefused(Record, frozen=True, tag="inject_refused"):
    slot: int
    fault: str
