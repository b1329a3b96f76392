"""The durable record of one node; only the fold rules below change it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.slurm.drains import LOST_NODE

NODE_EVENTS_KEPT = 20
MARKS_KEPT = 200
PASSING = ("good", "warning")
OUT = ("down", "drain")  # actions that take a node out of service


@dataclass(frozen=True)
class HealthReport:
    """The last check of a node."""

    verdict: str
    reason: str
    source: str
    at: float
    """When the controller heard of it."""
    checked_at: float
    """When the checks began, on the node's own clock."""
    drain: bool = False


@dataclass
class SeenEvent:
    """A node event on record."""

    id: int
    """Its number in the log."""
    time: float
    """When it was recorded."""
    said: records.NodeEvent
    """Its record, with the action taken since."""


@dataclass
class NodeState:
    """One node. Times in seconds since the epoch, the controller's clock."""

    lost_at: float = 0.0
    """When it last counted as lost."""
    lost_slurmd: float = 0.0
    """When the slurmd lost with it had started, by Slurm's clock; 0 if unknown."""
    slurmd: str = ""
    """"host:port" at which a controller has reached its slurmd, if it has been asked about since."""
    events: deque[SeenEvent] = field(default_factory=lambda: deque(maxlen=NODE_EVENTS_KEPT))
    heard: deque[str] = field(default_factory=lambda: deque(maxlen=MARKS_KEPT))
    """Marks (agent:number) of accepted events."""
    downed: bool = False
    """Whether this controller took it out of service, at `downed_at`."""
    reason: str = ""
    """The reason that Slurm was given for it."""
    downed_at: float = 0.0
    drained: bool = False
    """Whether it was drained, as proven bad or lost while other jobs ran there; otherwise it was dead and set down."""
    going_down: bool = False
    """Whether Slurm has not done it yet."""
    out_at: float = 0.0
    """When Slurm was seen to have done it."""
    refused: str = ""
    """Why Slurm refuses, with a remedy for the admin."""
    refused_at: float = 0.0
    refused_for: str = ""
    """The job for which the node was to be taken out."""
    resumed_at: float = 0.0
    health: HealthReport | None = None
    paired: HealthReport | None = None
    unverified: bool = False
    """Whether it came back without passing checks."""
    suspicion: str = ""
    suspected_at: float = 0.0
    odd: str = ""
    """Why it stood out among its peers last."""
    odd_at: float = 0.0
    odd_in: str = ""
    """The job that it was in then."""

    @property
    def proven_bad(self) -> bool:
        """Whether its checks failed; any other node taken out of service was lost."""
        return self.drained and not self.reason.startswith(LOST_NODE)

    def event(self, number: int) -> SeenEvent | None:
        """Return the event with that number of the log, while it is remembered."""
        return next((seen for seen in self.events if seen.id == number), None)


# ---------------------------------------------------------------- fold rules
def on_slurm_action(node: NodeState, event: Event, record: records.SlurmAction) -> None:
    if record.action in OUT:
        if not node.downed:
            node.downed_at = event.time
        node.downed = node.going_down = True
        node.drained = record.action == "drain"
        node.reason = node.suspicion = record.slurm_reason
        node.suspected_at = event.time


def on_slurm_done(node: NodeState, event: Event, record: records.SlurmDone) -> None:
    if record.action == ("drain" if node.drained else "down"):  # the last request, not an earlier one
        node.going_down, node.refused, node.out_at = False, "", event.time


def on_anomaly(node: NodeState, event: Event, record: records.Anomaly) -> None:
    node.odd, node.odd_at, node.odd_in = record.reason, event.time, event.job


def on_avoided(node: NodeState, event: Event, record: records.NodeAvoided) -> None:
    if record.suspect:
        node.suspicion, node.suspected_at = record.reason, event.time


def on_refused(node: NodeState, event: Event, record: records.ActionFailed) -> None:
    if record.slot < 0 and not node.refused:
        node.refused, node.refused_at, node.refused_for = record.reason, event.time, event.job


def on_lost(node: NodeState, event: Event, record: records.NodeLost) -> None:
    node.lost_at, node.lost_slurmd = event.time, record.slurmd_start


def on_slurmd_reached(node: NodeState, event: Event, record: records.SlurmdReached) -> None:
    node.slurmd = record.address


def on_resumed(node: NodeState, event: Event, record: records.NodeResumed) -> None:
    node.downed = node.going_down = node.drained = False
    node.reason = node.refused = ""
    node.resumed_at, node.unverified = event.time, not record.verified


def on_health(node: NodeState, event: Event, record: records.NodeHealth) -> None:
    report = HealthReport(record.verdict, record.reason, record.source, event.time, record.checked_at, record.drain)
    if record.source == "pair-test":
        node.paired = report
        return
    node.health = report
    if record.verdict in PASSING:
        node.unverified = False


def on_said(node: NodeState, event: Event, record: records.NodeEvent) -> None:
    node.events.append(SeenEvent(event.id, event.time, record))
    node.heard.append(record.mark)


def on_judged(node: NodeState, event: Event, record: records.NodeVerdict) -> None:
    if (seen := node.event(record.event)) is not None:
        seen.said = msgspec.structs.replace(seen.said, action=record.action)
