"""Records of nodes: silence, loss, health, and what takes them out of service and back."""

from __future__ import annotations

from unicron_ctl.shared.log.records.base import Record


class Silence(Record, frozen=True, tag="silence"):
    """An agent is silent, and why its node is not taken for lost."""

    element: int
    node: str


class Alone(Record, frozen=True, tag="alone"):
    """No agent is heard: the controller suspects itself."""


class HeardAgain(Record, frozen=True, tag="heard_again"):
    """Agents are heard again. seconds: how long it lasted."""

    seconds: float


class MostSilent(Record, frozen=True, tag="most_silent"):
    """The agents on more than half of all nodes fell silent together: the controller suspects itself."""

    silent: int
    nodes: int


class MostHeard(Record, frozen=True, tag="most_heard"):
    """Agents are heard again. seconds: how long it lasted."""

    seconds: float


class TakeDeferred(Record, frozen=True, tag="take_deferred"):
    """A node that was lost is not taken out of service while the controller suspects itself. over: that has an end,
    for this element's loss; failure and text are what it would have been taken for."""

    node: str
    element: int
    failure: int = 0
    text: str = ""
    over: bool = False


class NodeLost(Record, frozen=True, tag="node_lost"):
    """A node is lost.

    slurmd_start: when the slurmd that is lost with it began, as Slurm shows it; 0 where it does not.
    """

    node: str
    element: int
    slurmd_start: float = 0.0


class SlurmdReached(Record, frozen=True, tag="slurmd_reached"):
    """A node is asked about whose slurmd the controller has reached at this address ("host:port")."""

    node: str
    address: str


class NodeResumed(Record, frozen=True, tag="node_resumed"):
    """A node is back in service.

    by_others: not this controller gave it back, but a person, or Slurm itself.
    """

    node: str
    verified: bool = True
    by_others: bool = False


class NodeIsolated(Record, frozen=True, tag="isolated"):
    """A node is taken out of service: set down because it is dead, or drained."""

    node: str


class IsolationWithheld(Record, frozen=True, tag="isolation_withheld"):
    """A limit keeps a node in service, or the slots' job on it."""

    node: str
    slots: list[int]


class NodeAvoided(Record, frozen=True, tag="avoided"):
    """The job leaves the node, and its elements do not start there again for a while. agent: the one that has to go.
    suspect: what was said may be the node's fault, and a pair test should prove or clear it."""

    element: int
    node: str
    agent: str = ""
    suspect: bool = False


class TakeWithheld(Record, frozen=True, tag="take_withheld"):
    """A limit keeps the controller from asking Slurm for this."""

    action: str
    element: int
    node: str = ""


class NodeHealth(Record, frozen=True, tag="node_health"):
    """A node was checked.

    verdict: good | warning | unknown | bad. checked_at: the node's clock. drain: its admin wants a bad node
    drained."""

    node: str
    source: str
    verdict: str
    checked_at: float
    drain: bool = False


class AdmissionWaits(Record, frozen=True, tag="admission_waits"):
    node: str


class NodeEvent(Record, frozen=True, tag="node_event"):
    """A node's event of its own, reported by an agent of `of_job`. mark: agent:number, so that it counts once.
    at: the node's clock."""

    node: str
    source: str
    text: str
    code: str
    count: int
    at: float
    pid: int | None
    mark: str
    cause: str
    severity: int
    scope: str
    rule: str
    action: str
    of_job: str = ""


class NodeVerdict(Record, frozen=True, tag="node_verdict"):
    """The outcome of a node event (its id) that waited for others to say the same."""

    node: str
    event: int
    action: str
    of_job: str = ""


class NodeEventsDropped(Record, frozen=True, tag="node_events_dropped"):
    """Agents of `of_job` tell more of a node than is recorded."""

    node: str
    of_job: str = ""
