"""Defines the types of message fields, each with a range, a length or a pattern that decoding checks.

A range is far beyond any job's needs, and far below values that would cost memory, overflow a column of SQLite, or make
a sum infinite. NaN and the infinities fit no range; only a loss may be one, because a training may diverge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from msgspec import Meta

from unicron_ctl.shared.settings.limits import HEARTBEATS
from unicron_detector.health.connections import MOST_ADDRESSES, MOST_PEERS

MOST_ELEMENTS = 1 << 22  # of a job: Slurm's largest MaxArraySize is 4,000,001
MOST_NODES = 1 << 16  # of a cluster: slurm.h's MAX_SLURM_NODES is 65,533
MOST_RANKS = 1024  # of one node
MOST_SLOTS = 1 << 20  # of a plan
MOST_REPLICA = 1 << 16  # ranks of a replica
MOST_IMAGES = 8 * MOST_RANKS  # of training state in the memory of one node
MOST_COPIES = 64  # of a state in other nodes; states of which a rank holds shards at a time
MOST_TAKERS = MOST_COPIES * MOST_RANKS  # nodes to which one agent gives its ranks' state
MOST_MICRO_BATCHES = 1 << 20  # of an iteration
MOST_STEP_REPORTS = 64  # iterations in one message of an agent
LAUNCHES = 256  # trainings that the shell script of one step may run, one after the other
MOST_COUNT = 1 << 48  # of counters: generations, iterations, numbers of messages
MOST_INCARNATIONS = 1 << 31
MOST_SECONDS = 1e9  # thirty years
MOST_TIME = 1e11  # seconds since the epoch
LEAST_STEP = 1e-6  # seconds: a rate is FLOP divided by it
MOST_FLOP = 1e27  # of one rank in one iteration
MOST_VALUE = 1e20  # of a metric
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6
LEAST_BEAT, MOST_BEAT = HEARTBEATS.low, HEARTBEATS.high  # seconds between two heartbeats
LEAST_PROGRESS = 0.05  # seconds between two statuses that tell of progress
NAME, TEXT = 255, 20_000  # characters
REASON = 100_000  # characters, of the controller's reasons
CREDENTIAL = 65_536
MOST_PACKED = 4 * 1024 * 1024  # bytes: a message's limit (`wire.MAX_BYTES`)
MOST_PROPOSERS = 16  # agents that may stand in for the controller
MOST_DOORS = 64  # that an agent of a plain world tries; in larger worlds each agent has a selection
MOST_LAYOUTS = 64  # in which a job can run
KINDS = 256  # names in a map or a list
MOST_TARGETS = 64  # addresses that one agent is asked to reach at once
MOST_FAILING = 64  # addresses of recent failed transfers of images, in one message of an agent
MOST_PASSED_OVER = 8  # nodes that took no image from one agent; if there are so many, none of them is passed over

# ---------------------------------------------------------------- numbers
Version = Annotated[int, Meta(ge=0, le=1 << 16)]
Element = Annotated[int, Meta(ge=0, lt=MOST_ELEMENTS)]
Elements = Annotated[int, Meta(ge=1, le=MOST_ELEMENTS)]
Spares = Annotated[int, Meta(ge=0, le=MOST_ELEMENTS)]
Slot = Annotated[int, Meta(ge=0, lt=MOST_ELEMENTS * MOST_RANKS)]
RanksPerNode = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
Count = Annotated[int, Meta(ge=0, le=MOST_COUNT)]
Iteration = Annotated[int, Meta(ge=-1, le=MOST_COUNT)]  # -1: before the first
Incarnation = Annotated[int, Meta(ge=-1, le=MOST_INCARNATIONS)]  # -1: never started
Replica = Annotated[int, Meta(ge=1, le=MOST_REPLICA)]
Ways = Annotated[int, Meta(ge=1, le=MOST_SLOTS)]  # shards of a state
Copies = Annotated[int, Meta(ge=0, le=MOST_COPIES)]
Shard = Annotated[int, Meta(ge=0, lt=MOST_SLOTS)]
MicroBatch = Annotated[int, Meta(ge=0, lt=MOST_MICRO_BATCHES)]
MicroBatchCount = Annotated[int, Meta(ge=0, le=MOST_MICRO_BATCHES)]
Step = Annotated[int, Meta(ge=0, le=LAUNCHES << 32)]  # the number of Slurm's step, times LAUNCHES
Port = Annotated[int, Meta(ge=0, le=65535)]
Pid = Annotated[int, Meta(ge=0, le=1 << 31)]
ExitCode = Annotated[int, Meta(ge=-255, le=255)]
WaitStatus = Annotated[int, Meta(ge=-1, le=0xFFFF)]  # wait(2); -1: the plugin does not know it
Weight = Annotated[float, Meta(ge=LEAST_WEIGHT, le=MOST_WEIGHT)]
Time = Annotated[float, Meta(ge=0.0, le=MOST_TIME)]
Seconds = Annotated[float, Meta(ge=0.0, le=MOST_SECONDS)]
StepSeconds = Annotated[float, Meta(ge=LEAST_STEP, le=MOST_SECONDS)]
Beat = Annotated[float, Meta(ge=LEAST_BEAT, le=MOST_BEAT)]
Progress = Annotated[float, Meta(ge=LEAST_PROGRESS, le=MOST_BEAT)]
Flop = Annotated[float, Meta(ge=0.0, le=MOST_FLOP)]
Value = Annotated[float, Meta(ge=-MOST_VALUE, le=MOST_VALUE)]

# ---------------------------------------------------------------- names and texts
JobId = Annotated[str, Meta(pattern=r"^[0-9]{1,20}\Z")]
Name = Annotated[str, Meta(min_length=1, max_length=NAME, pattern=r"^[^\x00-\x20\x7f-\xa0]*\Z")]  # of what has one
NoName = Annotated[str, Meta(max_length=NAME, pattern=r"^[^\x00-\x20\x7f-\xa0]*\Z")]  # the same, or none
Kind = Annotated[str, Meta(max_length=NAME)]
Run = Annotated[str, Meta(max_length=32, pattern=r"^[0-9a-f]*\Z")]  # a part of a folder's name
Text = Annotated[str, Meta(max_length=TEXT)]
Reason = Annotated[str, Meta(max_length=REASON)]
LongAnswer = Annotated[bytes, Meta(max_length=MOST_PACKED)]
Credential = Annotated[str, Meta(max_length=CREDENTIAL)]
Mode = Annotated[str, Meta(pattern=r"^(session|restart)\Z")]
if TYPE_CHECKING:  # decoding looks up a literal, in a fraction of the time of a pattern
    RankState: TypeAlias = str
    RankPhase: TypeAlias = str
else:
    RankState = Literal[
        "starting", "waiting", "entering", "running", "stopped", "standby", "left", "finished", "exited"
    ]
    RankPhase = Literal["computing", "reducing", "synced", "stepped"]
EventSource = Annotated[str, Meta(pattern=r"^(kernel|memory|link)\Z")]
ProcessState = Annotated[str, Meta(max_length=1)]
Kinds = Annotated[list[Kind], Meta(max_length=KINDS)]
Argument = Text | Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | float | bool | Kinds | None

# ---------------------------------------------------------------- collections
Slots = Annotated[list[Slot], Meta(max_length=MOST_SLOTS)]
NodeSlots = Annotated[list[Slot], Meta(min_length=1, max_length=MOST_RANKS)]
MicroBatches = Annotated[list[MicroBatch], Meta(max_length=MOST_MICRO_BATCHES)]
Assignment = Annotated[dict[Slot, MicroBatches], Meta(max_length=MOST_SLOTS)]
Shards = Annotated[list[Shard], Meta(max_length=MOST_SLOTS)]
State = tuple[Count, Count]  # of sharded state: the generation in whose layout, and the number of steps
Runs = Annotated[list[tuple[Slot, Slot]], Meta(max_length=MOST_SLOTS)]
Values = Annotated[dict[Kind, Value], Meta(max_length=KINDS)]
Rates = Annotated[dict[Element, Annotated[float, Meta(ge=0.0, le=MOST_VALUE)]], Meta(max_length=MOST_ELEMENTS)]
Durations = Annotated[dict[Kind, Seconds], Meta(max_length=KINDS)]
# address -> segments sent, and lost, a second
Losses = Annotated[dict[Kind, tuple[Value, Value]], Meta(max_length=MOST_PEERS)]
OwnAddresses = Annotated[list[Kind], Meta(max_length=MOST_ADDRESSES)]  # of one node
Words = Annotated[list[Kind], Meta(max_length=MOST_TARGETS)]
Addresses = Annotated[list[NoName], Meta(max_length=MOST_TARGETS)]
Layouts = Annotated[list[Kind], Meta(max_length=MOST_LAYOUTS)]
Sizes = Annotated[dict[Kind, Count], Meta(max_length=KINDS)]  # of a model, by name
Arguments = Annotated[dict[Kind, Argument], Meta(max_length=KINDS)]
