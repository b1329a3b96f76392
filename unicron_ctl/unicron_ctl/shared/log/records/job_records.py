"""Records of jobs and their agents."""

from __future__ import annotations

from unicron_ctl.shared.log.records.base import Record
from unicron_ctl.shared.protocol.structs import Settings


class JobRegistered(Record, frozen=True, tag="job_registered"):
    """A job is managed from now on.

    step: the number of the srun in its batch script. uid: its owner's, by the credential of the agent that began it;
    None where nobody proves who he is, or an admin's agent began it. submitted: when, as Slurm shows it, in seconds
    since the epoch; 0 while Slurm has not confirmed the job. trains: its command may train, as its agent says.
    nodes: of one allocation, in Slurm's order; restarts: how often Slurm had requeued it then. runs: see `JobState`."""

    settings: Settings
    step: int = 0
    trains: bool = True
    uid: int | None = None
    submitted: float = 0.0
    nodes: list[str] = []
    restarts: int = 0
    runs: dict[int, float] = {}


class JobReallocated(Record, frozen=True, tag="reallocated"):
    """Slurm has requeued a job that is one allocation, and has given it these nodes."""

    nodes: list[str]
    restarts: int


class JobConfirmed(Record, frozen=True, tag="job_confirmed"):
    """Slurm shows whose a job is that began while it did not answer. most: its elements."""

    uid: int
    user: str
    submitted: float
    most: int
    nodes: list[str] = []
    restarts: int = 0


class AgentRegistered(Record, frozen=True, tag="agent_registered"):
    """An agent was taken in.

    key: the agent's CURVE public key, to which its credential was bound; empty where nothing is encrypted.
    confirmed: Slurm shows the element at work on this node, or is not used. requeues: as it says. restarts: how often
    Slurm had requeued the element, -1 where it has not said."""

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
    """The element is to end, as its agent says: its ranks leave at the next boundary."""

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
    """A new process is wanted in the slot, not before `not_before` (seconds since the epoch). failure: whose remedy it
    is, 0 for none's."""

    slot: int
    incarnation: int
    not_before: float
    failure: int = 0


class StartedCold(Record, frozen=True, tag="started_cold"):
    """Ranks of the job were not forked from their node's zygote. Once for each reason."""

    element: int


class ExitNoted(Record, frozen=True, tag="exit_noted"):
    """An end that is no failure: it was wanted, or the script ended well."""

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
