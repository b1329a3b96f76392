"""Defines parts of messages: a job's settings, a rank's status and steps, images of training state, other agents."""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Annotated

import msgspec
from msgspec import Meta

from unicron_ctl.shared.protocol import ranges
from unicron_transition.generations.layout import lanes_of

SESSION, RESTART = "session", "restart"  # modes of healing


class Settings(msgspec.Struct, kw_only=True):
    """A job's settings from its submission."""

    name: ranges.Kind
    user: ranges.Name
    weight: ranges.Weight = 1.0
    min_nodes: ranges.Elements = 1  # the fewest nodes with which the job can train
    min_stated: bool = False
    """The owner, or the launcher in the command, has set `min_nodes`."""
    max_nodes: ranges.Elements = 1
    ranks_per_node: ranges.RanksPerNode = 1
    mode: ranges.Mode = SESSION
    """SESSION: the ranks speak this protocol. RESTART: they are plain programs, which start and end together, and the
    agent speaks it for them."""
    mode_reason: ranges.Text = ""  # why the agent has chosen that mode
    layouts: ranges.Layouts = []
    """Ways to split the model, the preferred one first ("TP2 PP2"); empty if there is only one."""
    model: ranges.Sizes = {}  # sizes of the model by name, for the planner
    copies: ranges.Copies = 1
    """Other nodes that keep each part of the training state in memory."""
    spares: ranges.Spares = 0
    """Elements that wait, ready to replace a lost member (docs/design/hot-spares.md)."""
    allocation: bool = False
    """The job is one allocation of Slurm, not an array (docs/design/allocations.md)."""
    no_kill: bool = False  # the job's srun goes on without a lost node
    block: ranges.Elements = 1  # nodes of each element of the array (docs/design/blocks.md)
    log_dir: ranges.Text = ""  # the folder with the ranks' output files, or empty
    command: ranges.NoName = ""
    """Digests of the commands of an array's ranks, joined by full stops. Two commands are the same if one digest is."""

    def runs_as(self, other: Settings) -> bool:
        """Whether both have the same command."""
        pairs = zip(self.command.split("."), other.command.split("."), strict=False)
        return any(mine == theirs for mine, theirs in pairs)


# ---------------------------------------------------------------- ranks
class Exit(msgspec.Struct, kw_only=True, gc=False):
    """The end of a rank's process."""

    code: ranges.ExitCode  # the exit status, negative for a signal (as in subprocess)
    at: ranges.Time
    lived: ranges.Seconds  # seconds since its start
    last_line: ranges.Text = ""
    oom: bool = False  # its memory cgroup has counted an out-of-memory kill that explains this end


class Fault(msgspec.Struct, kw_only=True, gc=False):
    """An exception in a rank."""

    type: ranges.Text
    text: ranges.Text
    at: ranges.Time
    traceback: ranges.Text = ""
    cause: ranges.Text = ""
    """The line of the traceback that names the reason (`failures.root_cause`)."""
    iteration: ranges.Iteration | None = None
    micro_batch: ranges.MicroBatch | None = None  # the micro-batch of `iteration` in which it came
    culprit: ranges.Slot | None = None  # in a note: the slot of the rank at fault, if it is known
    fatal: bool = False  # it was not caught, so the process ends
    lived: ranges.Seconds = 0.0
    """If it is fatal: the seconds from the start of the process to the exception."""


class Shards(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The shards of the optimizer's state that a rank has."""

    base: ranges.Count
    """Names the generation over whose replicas the state is sharded (:func:`sharding.state_base`)."""
    version: ranges.Count  # the state's number of steps
    count: ranges.Ways  # the number of shards of the whole state
    held: ranges.Shards
    """Shards that belong to the rank's place: its own, and copies of others."""


# Name of a process group -> (collectives that the rank has begun in it, those that have ended, the last one as a text).
Collectives = Annotated[dict[ranges.Kind, tuple[ranges.Count, ranges.Count, ranges.Kind]], Meta(max_length=64)]


class RankStatus(msgspec.Struct, kw_only=True, array_like=True, omit_defaults=True, gc=False):
    """One rank as its agent knows it. On the wire it is an array that ends with the last field that has no default, so
    rare fields come last."""

    state: ranges.RankState
    """starting (no session yet) | waiting (can enter a generation) | entering (the generation `entering`) | running |
    stopped (at a known point, wants a plan) | standby (in no complete replica, keeps its training state, can enter) |
    left (a plan went on without it) | finished (trained to the end) | exited."""
    changed: ranges.Time = 0.0  # time of the last change of state, phase or done, by the agent's clock
    incarnation: ranges.Incarnation = 0
    generation: ranges.Count = 0  # the last generation that the rank has entered
    entering: ranges.Count = 0
    broken: ranges.Count = 0
    """All generations up to this one are over for the rank. If it reaches the rank's generation without a Break, the
    rank has stopped by itself."""
    iteration: ranges.Iteration = 0
    phase: ranges.RankPhase = "computing"  # computing | reducing | synced | stepped, of `iteration`
    done: ranges.MicroBatches = []  # the micro-batches in its gradient
    micro_batches: ranges.MicroBatchCount = 0
    """Micro-batches that a plan would deal: those of the next iteration if this one may be stepped."""
    train_iterations: ranges.Count = 0
    flops_per_iteration: ranges.Flop = 0.0
    iteration_seconds: ranges.Seconds = 0.0
    pid: ranges.Pid = 0
    process: ranges.ProcessState = ""
    """The state letter of proc(5) ("T": stopped by a signal); empty if unknown."""
    idle: ranges.Seconds = 0.0
    """Seconds for which the process has hardly computed, read or written; 0 if unknown."""
    loss: float | None = None
    exit: Exit | None = None
    fault: Fault | None = None
    note: Fault | None = None  # the last fault that was corrected without the controller
    moved: ranges.Count = 0
    """A number that changes while the rank's transfer or collective makes progress: bytes, and in the first seconds of
    a loss the network's retransmissions. In restart mode: the script's own heartbeats. 0 if unknown."""
    replica: ranges.Replica = 1  # ranks of a replica
    layout: ranges.Kind = ""  # of a replica, as `Layout.text` writes it
    shards: Annotated[list[Shards], Meta(max_length=ranges.MOST_COPIES)] = []
    """The shards of a distributed optimizer's state, from a stopped rank or a standby. From a waiting rank: those in
    its node's memory."""
    saved: ranges.Iteration = -1
    """The iteration with which the newest known checkpoint goes on; 0 before there is one, -1 if the script makes
    none."""
    kept: Annotated[list[tuple[ranges.Iteration, ranges.Kind]], Meta(max_length=ranges.MOST_COPIES)] = []
    """For a rank at rest: (iteration, mark) of the states with which it can go on, the newest first. They are its own,
    or those that a newcomer could take from memory, a checkpoint or the script. States that belong together have equal
    marks."""
    forgets: ranges.Kind = ""  # why its state is not kept in memory; empty if it is
    sharded: bool = False  # its optimizer's state is sharded
    remembers: bool = False  # it has a state that is kept as a whole
    waits: bool = False  # it waits on a socket, a pipe, or for a child
    collectives: Collectives = {}  # in restart mode, of a rank that stands still
    outlives: bool = False
    """Whether it ignores SIGTERM, and trains on to the next boundary when its element has to end."""
    saves_in: ranges.Kind = ""
    """The folder of the job's checkpoints, from the rank that writes them; empty if the name is too long."""
    went_back: ranges.Iteration | None = None
    """From a rank at rest that has given up its state, because that was found to be unsound: the last verified
    iteration that it knows, -1 for none."""
    share: ranges.MicroBatchCount = 0
    """The micro-batches of `iteration` that its replica gets by its speed; 0 in an equal deal."""
    verified: ranges.Iteration = -1
    """The newest iteration whose state an audit has found sound, from the job's first rank; -1 for none."""

    @property
    def end(self) -> Exit | None:
        """The end of the process, or the coming one: an exception that is not caught takes a while to end it."""
        if self.state == "exited":
            return self.exit
        if self.fault is not None and self.fault.fatal and self.state != "finished":
            return Exit(code=1, at=self.fault.at, lived=self.fault.lived)
        return None

    @property
    def lanes(self) -> int:
        """Micro-batches that the rank's replica computes at the same time."""
        lanes = lanes_of(self.layout) if self.replica > 1 else 1
        return lanes if self.replica % lanes == 0 else 1  # no rank of ours says so

    def with_vitals_of(self, other: RankStatus) -> RankStatus:
        """Return this status with the time and the vitals of another, which change though the rank does nothing new."""
        return msgspec.structs.replace(
            self,
            changed=other.changed,
            iteration_seconds=other.iteration_seconds,
            loss=other.loss,
            process=other.process,
            idle=other.idle,
            waits=other.waits,
        )


# The phases of an iteration, in order; `reduce` includes the wait for the others, `outside` is the script's own code
# before the iteration.
PHASES = ("data", "forward", "backward", "reduce", "step", "outside")


class RankStep(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One optimizer step of one rank: the ledger's proof."""

    slot: ranges.Slot
    micro_batches: ranges.MicroBatches
    seconds: ranges.StepSeconds
    loss: float | None  # None if unknown, as for a plain program
    computed: ranges.MicroBatches | None = None
    """Each micro-batch as often as it was computed; None if that is `micro_batches`."""
    phases: Annotated[list[ranges.Seconds], Meta(max_length=len(PHASES))] = []
    """Seconds in the order of :data:`PHASES`; empty if not measured."""


MERGE_SECONDS = 0.2  # for which an agent holds such a report back at most, for others that come soon


def with_status(period: float, progress: float) -> bool:
    """Whether an agent that got these values in its :class:`wire.Welcome` keeps step reports for its next status,
    because mere progress may wait for a whole period."""
    return progress >= period


def hold_seconds(period: float, progress: float) -> float:
    """Return the seconds for which such an agent holds a step report back, at most."""
    return MERGE_SECONDS + (period if with_status(period, progress) else 0.0)


class StepReport(msgspec.Struct, omit_defaults=True):
    """One optimizer step of the ranks of one agent."""

    generation: ranges.Count
    iteration: ranges.Count
    total: ranges.MicroBatchCount  # micro-batches of the iteration
    at: ranges.Time
    ranks: Annotated[list[RankStep], Meta(max_length=ranges.MOST_RANKS)]
    number: ranges.Count = 0
    """Counts the agent's reports, so that the receiver notices lost ones."""

    def __post_init__(self) -> None:
        if len({rank.slot for rank in self.ranks}) < len(self.ranks):
            raise ValueError("each slot has one step")


StepReports = Annotated[list[StepReport], Meta(max_length=ranges.MOST_STEP_REPORTS)]
NO_TIME = -1.0  # seconds of a phase that is not measured


class StepTable(msgspec.Struct, omit_defaults=True):
    """A :class:`StepReport` by columns, which takes a fraction of the time to read."""

    generation: ranges.Count
    iteration: ranges.Count
    total: ranges.MicroBatchCount
    at: ranges.Time
    slots: ranges.NodeSlots  # ascending; the other columns have their order
    micro_batches: Annotated[list[ranges.MicroBatches], Meta(max_length=ranges.MOST_RANKS)]
    seconds: Annotated[list[ranges.StepSeconds], Meta(max_length=ranges.MOST_RANKS)]
    phases: Annotated[bytes, Meta(max_length=8 * len(PHASES) * ranges.MOST_RANKS)]
    """Little-endian doubles, len(PHASES) of each rank. Any bytes decode, so that the reader checks them."""
    losses: Annotated[list[float | None], Meta(max_length=ranges.MOST_RANKS)]
    """One of each rank, or a single one that all have."""
    computed: ranges.Assignment = {}
    """Slot -> its micro-batches as often as they were computed, if that differs."""
    number: ranges.Count = 0

    def __post_init__(self) -> None:
        slots, count = self.slots, len(self.slots)
        if slots and slots != list(range(slots[0], slots[0] + count)) and slots != sorted(set(slots)):
            raise ValueError("each slot has one step, in ascending order")
        if not count == len(self.micro_batches) == len(self.seconds) or len(self.losses) not in (1, count):
            raise ValueError("each slot has its micro-batches, its seconds and its loss")
        if len(self.phases) != 8 * len(PHASES) * count or not self.computed.keys() <= set(slots):
            raise ValueError("each slot has its phases, and no other slot is named")

    def rows(self) -> list[RankStep]:
        """Return the steps rank by rank."""
        count, width = len(self.slots), len(PHASES)
        losses = self.losses if len(self.losses) == count else self.losses * count
        values = struct.unpack(f"<{width * count}d", self.phases)
        phases = [list(values[first : first + width]) for first in range(0, width * count, width)]
        columns = zip(self.slots, self.micro_batches, self.seconds, losses, phases, strict=True)
        return [
            RankStep(slot, batches, seconds, loss, self.computed.get(slot), times if min(times) >= 0.0 else [])
            for slot, batches, seconds, loss, times in columns
        ]

    def only(self, wanted: Collection[int]) -> StepTable:
        """Return the table of these slots alone."""
        ranks = [rank for rank in self.rows() if rank.slot in wanted]
        return step_table(self.generation, self.iteration, self.total, self.at, ranks, self.number)

    def report(self) -> StepReport:
        """Return it as a controller of release 0.2 reads it."""
        return StepReport(self.generation, self.iteration, self.total, self.at, self.rows(), self.number)


def step_table(
    generation: int, iteration: int, total: int, at: float, ranks: Collection[RankStep], number: int = 0
) -> StepTable:
    """Return the table of these ranks' steps."""
    ranks = sorted(ranks, key=lambda rank: rank.slot)
    losses = [rank.loss for rank in ranks]
    unmeasured = [NO_TIME] * len(PHASES)
    phases = [time for r in ranks for time in (r.phases if len(r.phases) == len(PHASES) else unmeasured)]
    return StepTable(
        generation,
        iteration,
        total,
        at,
        [rank.slot for rank in ranks],
        [rank.micro_batches for rank in ranks],
        [rank.seconds for rank in ranks],
        struct.pack(f"<{len(phases)}d", *phases),
        losses[:1] if all(loss == losses[0] for loss in losses) else losses,
        {rank.slot: rank.computed for rank in ranks if rank.computed is not None},
        number,
    )


StepTables = Annotated[list[StepTable], Meta(max_length=ranges.MOST_STEP_REPORTS)]


class Progress(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The point that ranks have reached, and where they stand, if that is not as the whole status said."""

    iteration: ranges.Iteration
    phase: ranges.RankPhase
    slots: Annotated[list[ranges.Slot], Meta(max_length=ranges.MOST_RANKS)] = []
    """Empty: all of the node's that are in no other entry."""
    state: ranges.RankState = "running"
    generation: ranges.Count = 0
    entering: ranges.Count = 0
    broken: ranges.Count = 0
    kept: Annotated[list[tuple[ranges.Iteration, ranges.Kind]], Meta(max_length=ranges.MOST_COPIES)] = []

    @property
    def states(self) -> bool:
        """Whether it says where the ranks stand: one that runs is in a generation."""
        return self.generation > 0 or self.state != "running"


# ---------------------------------------------------------------- other agents
class LostRank(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A process without which a plan goes on."""

    slot: ranges.Slot
    agent: ranges.NoName
    incarnation: ranges.Incarnation


class Peer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An agent as others of its job reach it."""

    element: ranges.Element
    agent: ranges.Name
    address: ranges.NoName  # host:port
    key: ranges.NoName  # its public key (CURVE, Z85)


# ---------------------------------------------------------------- images of training state
class Image(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Training state in a node's memory, which outlives its ranks (:class:`image_format.Key`)."""

    kind: ranges.Kind
    slot: ranges.Slot  # the rank whose part of the state it is
    iteration: ranges.Count  # the iteration with which the state goes on
    place: ranges.Slot  # the place of the rank among the `size` ranks of a replica
    size: ranges.Replica
    shard: ranges.Shard  # the number of the shard, of `count`
    count: ranges.Ways
    base: ranges.Count
    """Names the generation that made the state, as in :class:`Shards`."""
    mark: ranges.NoName  # the same in all images that belong together
    bytes: ranges.Count = 0  # the size of the image


class Failing(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An agent with which transfers of images failed."""

    times: ranges.Count  # failures in a row
    why: ranges.Kind  # the last time


class Holder(msgspec.Struct, frozen=True, gc=False):
    """An agent of the job that takes and gives images."""

    element: ranges.Element
    address: ranges.Name
    token: ranges.Name  # its peers show it with each transfer
