"""Records of jobs and their agents."""

from __future__ import annotations

from unicron_ctl.shared.log.records.base import Record
from unicron_ctl.shared.protocol.structs import Settings


class JobRegistered(Record, frozen=True, tag="job_registered"):
    """A job is managed from now on.

    step: the number of the srun in its batch script. uid: the owner's, by the credential of the first agent; None
    without credentials, or if it was an admin's. submitted: as Slurm shows it, in seconds since the epoch; 0 while
    Slurm has not confirmed the job. trains: the agent says that the command may train. nodes: of one allocation, in
    Slurm's order. restarts: how often Slurm had requeued it. runs: see `JobState`.
    """

    settings: Settings
    step: int = 0
    trains: bool = True
    uid: int | None = None
    submitted: float = 0.0
    nodes: list[str] = []
    restarts: int = 0
    runs: dict[int, float] = {}


class JobReallocated(Record, frozen=True, tag="reallocated"):
    """Slurm has requeued a job that is one allocation, and given it these nodes."""

    nodes: list[str]
    restarts: int


class JobConfirmed(Record, frozen=True, tag="job_confirmed"):
    """Slurm shows the owner of a job that began while Slurm did not answer. most: its elements."""

    uid: int
    user: str
    submitted: float
    most: int
    nodes: list[str] = []
    restarts: int = 0


class AgentRegistered(Record, frozen=True, tag="agent_registered"):
    """An agent was taken in.

    key: the agent's CURVE public key, to which its credential was bound; empty without encryption. confirmed: Slurm
    shows the element at work on this node, or is not used. requeues: the agent's count. restarts: how often Slurm had
    requeued the element; -1 if unknown.
    """

    element: int
    agent: str
    node: str
    address: str
    slots: list[int]
    door: str = ""
    key: str = ""
    peer: str = ""
    peer_key: str = ""
    confirmed: bool = True
    requeues: int = 0
    restarts: int = -1


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
    """Processes that can enter a generation: slot -> incarnation."""

    agent: str
    incarnations: dict[int, int]


class RankStart(Record, frozen=True, tag="rank_start"):
    """A new process should start in the slot, at `not_before` (seconds since the epoch) or later. failure: the one that
    it remedies, or 0."""

    slot: int
    incarnation: int
    not_before: float
    failure: int = 0


class StartedCold(Record, frozen=True, tag="started_cold"):
    """Ranks of the job were not forked from their node's zygote. Recorded once for each reason."""

    element: int


class ExitNoted(Record, frozen=True, tag="exit_noted"):
    """A process ended without a failure: that was wanted, or the script ended well."""

    slot: int
    agent: str
    incarnation: int
    code: int


class FaultInjected(Record, frozen=True, tag="injected"):
    fault: str
    slot: int
    node: str
    seconds: float


class InjectRefused(Record, frozen=True, tag="inject_refused"):
    slot: int
    fault: str
