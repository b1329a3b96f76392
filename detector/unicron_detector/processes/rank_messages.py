"""The messages between a rank and its agent: dataclasses, written as MessagePack maps.

Messages that the agent forwards from the controller have the names and defaults of the controller's own messages
(`unicron_ctl.shared.protocol.wire`), restricted to what ranks need. A rank sends only what its agent cannot add.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import ClassVar

import msgpack

from unicron_detector.formats import RANKS


# ---------------------------------------------------------------- agent -> rank
@dataclass(frozen=True)
class Break:
    """All generations up to this one are over."""

    kind: ClassVar[str] = "break"
    generation: int
    lost: list[int]  # the slots whose ranks are gone


@dataclass(frozen=True)
class Withdraw:
    """The offer of this generation must not be taken."""

    kind: ClassVar[str] = "withdraw"
    generation: int


@dataclass(frozen=True)
class Plan:
    """A generation as the controller planned it. `unicron_ctl.shared.protocol.wire.Plan` describes its fields."""

    kind: ClassVar[str] = "plan"
    generation: int
    members: list[int]
    store: str
    prefix: str
    boundary: bool = False  # an offer, taken at the end of the iteration in which every member holds it
    joiners: list[int] = field(default_factory=list)
    source: int | None = None
    step: int | None = None
    iteration: int | None = None
    assignment: dict[int, list[int]] = field(default_factory=dict)
    reason: str = ""
    replica: int = 1
    state: tuple[int, int] | None = None


@dataclass(frozen=True)
class StopRank:
    """The rank must save its state and end."""

    kind: ClassVar[str] = "stop_rank"


@dataclass(frozen=True)
class Cut:
    """Keep the training state of `iteration` in memory when it comes, and that of `good` until then."""

    kind: ClassVar[str] = "cut"
    iteration: int  # -1 for none
    good: int = -1  # -1 for none
    none: bool = False  # keep no state any more


@dataclass(frozen=True)
class Fetch:
    """An image has come into the memory of this node."""

    kind: ClassVar[str] = "fetch"


@dataclass(frozen=True)
class Save:
    """A checkpoint of the next state is wanted."""

    kind: ClassVar[str] = "save"


@dataclass(frozen=True)
class SavedCheckpoint:
    """The agent has made a checkpoint's files of what its ranks have set aside at `iteration`."""

    kind: ClassVar[str] = "saved"
    iteration: int


@dataclass(frozen=True)
class Inject:
    """Break something on purpose (:mod:`unicron_detector.chaos.inject`)."""

    kind: ClassVar[str] = "inject"
    fault: str
    seconds: float = 0.0  # 0 for the fault's default


MemoryMessage = Cut | Fetch | Save | SavedCheckpoint
ToRank = Break | Withdraw | Plan | StopRank | MemoryMessage | Inject
TO_RANK: dict[str, type[ToRank]] = {
    each.kind: each for each in (Break, Withdraw, Plan, StopRank, Cut, Fetch, Save, SavedCheckpoint, Inject)
}


# ---------------------------------------------------------------- rank -> agent
# Types of a note: what ranks have proved about a result that is not sound, by computing it again or by comparing.
UNSOUND_MICRO_BATCH = "UnsoundMicroBatch"  # not finite wherever it is computed: the data's or the model's fault
UNSOUND_RANK = "UnsoundRank"  # not finite on `culprit` alone
LASTING_CORRUPTION = "LastingCorruption"  # ends all ranks: they went back to a sound state in vain
SILENT_CORRUPTION = "SilentCorruption"  # finite, and not what other ranks have; `culprit` is wrong


@dataclass
class Fault:
    """An exception in the rank; as a note, what ranks have found and dealt with."""

    kind: ClassVar[str] = "fault"
    type: str
    text: str
    at: float
    traceback: str = ""  # its end
    cause: str = ""  # the line that the traceback names as the reason
    iteration: int | None = None  # the one in which it came
    micro_batch: int | None = None
    culprit: int | None = None  # in a note: the slot of the rank at fault, if it is known


@dataclass
class Status:
    """A rank's report about itself. The fields are described in `unicron_ctl.shared.protocol.structs.RankStatus`."""

    kind: ClassVar[str] = "rank"
    state: str
    generation: int = 0
    entering: int = 0
    broken: int = 0
    iteration: int = 0
    phase: str = "computing"
    done: list[int] = field(default_factory=list)
    micro_batches: int = 0
    train_iterations: int = 0
    flops_per_iteration: float = 0.0
    iteration_seconds: float = 0.0
    loss: float | None = None
    fault: Fault | None = None
    note: Fault | None = None
    moved: int = 0
    replica: int = 1
    layout: str = ""
    shards: list[tuple[int, int, int, list[int]]] = field(default_factory=list)
    saved: int = -1
    kept: list[tuple[int, str]] = field(default_factory=list)
    forgets: str = ""
    sharded: bool = False
    remembers: bool = False
    outlives: bool = False
    saves_in: str = ""
    went_back: int | None = None
    share: int = 0
    verified: int = -1


@dataclass
class CollectiveProgress:
    """A rank whose main thread says nothing, perhaps because it waits in a collective."""

    kind: ClassVar[str] = "moved"
    moved: int  # differs from the last message if the network makes progress; 0 if it does not
    collectives: dict[str, tuple[int, int, str]] = field(default_factory=dict)  # of a rank that stands still


@dataclass
class Step:
    """A stepped iteration: the proof of its micro-batches, and the next status of the rank, if it came soon."""

    kind: ClassVar[str] = "step"
    generation: int
    iteration: int
    micro_batches: list[int]
    computed: list[int]
    total: int
    seconds: float
    loss: float | None
    at: float  # by the rank's clock
    phases: dict[str, float] = field(default_factory=dict)  # seconds of each part of the iteration
    status: Status | None = None


@dataclass
class Timing:
    """The times at which the parts of a recovery ended."""

    kind: ClassVar[str] = "timing"
    generation: int
    at: float  # the end of the recovery, by the rank's clock
    seconds: dict[str, float]  # since the recovery's start


FromRank = Fault | Status | CollectiveProgress | Step | Timing
FROM_RANK: dict[str, type[FromRank]] = {each.kind: each for each in (Fault, Status, CollectiveProgress, Step, Timing)}


# ---------------------------------------------------------------- bytes
def encode(message: FromRank, slot: int, incarnation: int) -> bytes:
    """Encode a rank's message, with its sender."""
    head = {"v": RANKS.number, "kind": message.kind, "slot": slot, "incarnation": incarnation, "pid": os.getpid()}
    data: bytes = msgpack.packb({**head, **vars(message)}, default=_as_map)
    return data


def _as_map(value: object) -> dict[str, object]:
    """Return the fields of a message within a message. Raises TypeError for any other object."""
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"{type(value).__name__} is part of no message")
    return vars(value)


def decode(data: bytes) -> ToRank | None:
    """Decode the agent's message, without fields that ranks do not know. None for a kind that is not for ranks, and for
    another release, which the agent reports. Raises ValueError, KeyError or TypeError for an invalid one."""
    fields = msgpack.unpackb(data, strict_map_key=False)  # slots are integer keys
    kind = TO_RANK.get(fields["kind"])
    if kind is None or RANKS.refusal(fields["v"]):
        return None
    return kind(**{each.name: fields[each.name] for each in dataclasses.fields(kind) if each.name in fields})
