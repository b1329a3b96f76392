"""Records of nodes: silence, loss, health, and their way out of service and back."""

from __future__ import annotations

from unicron_ctl.shared.log.records.base import Record


class Silence(Record, frozen=True, tag="silence"):
    """An agent is silent. The reason says why its node does not count as lost."""

    element: int
    node: str


class Alone(Record, frozen=True, tag="alone"):
    """No agent is heard: the controller suspects itself."""


class HeardAgain(Record, frozen=True, tag="heard_again"):
    """Agents are heard again."""

    seconds: float  # for which none was heard


class MostSilent(Record, frozen=True, tag="most_silent"):
    """The agents on more than half of all nodes fell silent together: the controller suspects itself."""

    silent: int
    nodes: int


class MostHeard(Record, frozen=True, tag="most_heard"):
    """Most agents are heard again."""

    seconds: float  # for which most were silent


class TakeDeferred(Record, frozen=True, tag="take_deferred"):
    """A lost node stays in service while the controller suspects itself."""

    node: str
    element: int
    failure: int = 0  # for which the node would have been taken out of service
    text: str = ""  # the reason that Slurm would show
    over: bool = False  # this has ended for the element


class NodeLost(Record, frozen=True, tag="node_lost"):
    """A node is lost."""

    node: str
    element: int
    slurmd_start: float = 0.0  # when its slurmd started, as Slurm shows it; 0 if unknown


class SlurmdReached(Record, frozen=True, tag="slurmd_reached"):
    """The controller has reached the slurmd of a suspected node at this address ("host:port")."""

    node: str
    address: str


class NodeResumed(Record, frozen=True, tag="node_resumed"):
    """A node is back in service."""

    node: str
    verified: bool = True  # a check of its hardware has passed
    by_others: bool = False  # a person or Slurm brought it back, not this controller


class NodeIsolated(Record, frozen=True, tag="isolated"):
    """A node is taken out of service: set down because it is dead, or drained."""

    node: str


class IsolationWithheld(Record, frozen=True, tag="isolation_withheld"):
    """A limit keeps a node in service, or the slots' job on it."""

    node: str
    slots: list[int]


class NodeAvoided(Record, frozen=True, tag="avoided"):
    """The job leaves the node, and its elements do not start there again for a while."""

    element: int
    node: str
    agent: str = ""  # the one that has to go
    suspect: bool = False  # the node may be at fault, which a pair test should prove or rule out


class NodeSwap(Record, frozen=True, tag="node_swap"):
    """A suspect node gives its place in the job to a ready spare; the reason says what is held against it."""

    element: int
    node: str
    state: str  # planned: at the next boundary | withheld: it keeps its place | dropped: it keeps it after all
    agent: str = ""
    along: list[int] = []  # elements that leave with it, because they make a replica or a block with it


class TakeWithheld(Record, frozen=True, tag="take_withheld"):
    """A limit keeps the controller from this action in Slurm."""

    action: str
    element: int
    node: str = ""


class NodeHealth(Record, frozen=True, tag="node_health"):
    """A node was checked."""

    node: str
    source: str
    verdict: str  # good | warning | unknown | bad
    checked_at: float  # by the node's clock
    drain: bool = False  # its admin wants a bad node drained


class PairTest(Record, frozen=True, tag="pair_test"):
    """The controller has a node tested in pairs with idle ones; the reason says why, or what came of it."""

    node: str
    state: str  # chosen | good | slow | bad | unclear: no sound partner | not_run: Slurm gave no nodes
    evidence: str  # failure: a job left it, or it failed | odd: it stood out among its peers
    partners: list[str] = []
    alike: str = ""  # partition and backend, within which pairs are compared
    seconds: list[float] = []  # for a gigabyte, of each pair that was sound


class AdmissionWaits(Record, frozen=True, tag="admission_waits"):
    node: str


class NodeEvent(Record, frozen=True, tag="node_event"):
    """An event of the node itself, reported by an agent of `of_job`."""

    node: str
    source: str
    text: str
    code: str
    count: int
    at: float  # by the node's clock
    pid: int | None
    mark: str  # agent:number, so that it counts once
    cause: str
    severity: int
    scope: str
    rule: str
    action: str
    of_job: str = ""


class NodeVerdict(Record, frozen=True, tag="node_verdict"):
    """The outcome of a node event that waited for the same event from other nodes."""

    node: str
    event: int  # its id
    action: str
    of_job: str = ""


class NodeEventsDropped(Record, frozen=True, tag="node_events_dropped"):
    """Agents of `of_job` report more events of a node than are recorded."""

    node: str
    of_job: str = ""
