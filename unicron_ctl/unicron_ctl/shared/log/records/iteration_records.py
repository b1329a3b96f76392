"""Records of iterations, copies and spares."""

from __future__ import annotations

import msgspec

from unicron_ctl.shared.log.records.base import Record


class JobDegraded(Record, frozen=True, tag="degraded"):
    iteration: int
    slot: int | None = None  # None if no rank differs from the others
    node: str = ""
    phase: str = ""
    slowdown: float | None = None  # ratio to the peers in the phase


class JobDegradedOver(Record, frozen=True, tag="degraded_over"):
    iteration: int


class Overdue(Record, frozen=True, tag="overdue"):
    """An iteration takes long, and nothing is done about it yet."""

    iteration: int


class HangCulprit(msgspec.Struct, frozen=True):
    slot: int
    node: str
    phase: str


class Hang(Record, frozen=True, tag="hang"):
    iteration: int
    seconds: float
    culprits: list[HangCulprit]


class Stacks(Record, frozen=True, tag="stacks"):
    slot: int
    incarnation: int
    node: str
    how: str  # as in `wire.StackTrace`
    state: str
    text: str


class Anomaly(Record, frozen=True, tag="anomaly"):
    node: str  # the only one of `nodes`, or empty
    nodes: list[str]
    slot: int | None
    metric: str  # the one that stands out most
    metrics: dict[str, float]
    scores: dict[str, float]  # metric -> robust z-score
    distance: float  # from the peers, over all metrics


class AnomalyOver(Record, frozen=True, tag="anomaly_over"):
    node: str
    nodes: list[str]
    slot: int | None
    metric: str
    seconds: float


class Spares(Record, frozen=True, tag="spares"):
    """The elements that wait as hot spares, ready or about to be."""

    ready: list[int]
    starting: list[int] = []


class NoCopies(Record, frozen=True, tag="no_copies"):
    """The training state cannot be copied to other nodes: these nodes keep nothing in memory, and no other node trains
    these places, or some shards of them."""

    nodes: list[str]
    places: list[int]


class CopiesRefused(Record, frozen=True, tag="copies_refused"):
    """Copies of the training state did not get through."""

    ways: list[tuple[str, str]]  # (from node, to node)


class NewcomersWait(Record, frozen=True, tag="newcomers_wait"):
    elements: list[int]
