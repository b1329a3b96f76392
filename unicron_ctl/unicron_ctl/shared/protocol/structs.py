"""Defines parts of messages: a job's settings, a rank's status and steps, images of training state, other agents."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from unicron_ctl.shared.protocol import ranges

SESSION, RESTART = "session", "restart"  # modes of healing


class Settings(msgspec.Struct, kw_only=True):
    """A job's settings from its submission.

    min_stated: the owner, or the launcher in the command, has set min_nodes. mode: session (the ranks speak this
    protocol) or restart (plain programs, for which the agent speaks it, and which end and start together). mode_reason:
    the agent's. layouts: ways to split the model, the preferred first ("TP2 PP2"), if there are several. model: its
    sizes, for the planner. copies: how many other nodes keep each part of the training state in memory. spares:
    elements that wait, ready to replace a lost member (docs/design/hot-spares.md). allocation: the job is one
    allocation of Slurm, not an array (docs/design/allocations.md). no_kill: its srun goes on without a node. block:
    nodes of each element of the array (docs/design/blocks.md). log_dir: the folder with the ranks' output files, or
    empty. command: digests of the commands of an array's ranks, joined by full stops; two commands are the same if one
    digest is.
    """

    name: ranges.Kind
    user: ranges.Name
    weight: ranges.Weight = 1.0
    min_nodes: ranges.Elements = 1
    min_stated: bool = False
    max_nodes: ranges.Elements = 1
    ranks_per_node: ranges.RanksPerNode = 1
    mode: ranges.Mode = SESSION
    mode_reason: ranges.Text = ""
    layouts: ranges.Layouts = []
    model: ranges.Sizes = {}
    copies: ranges.Copies = 1
    spares: ranges.Spares = 0
    allocation: bool = False
    no_kill: bool = False
    block: ranges.Elements = 1
    log_dir: ranges.Text = ""
    command: ranges.NoName = ""

    def runs_as(self, other: Settings) -> bool:
        """Whether both have the same command."""
        pairs = zip(self.command.split("."), other.command.split("."), strict=False)
        return any(mine == theirs for mine, theirs in pairs)


# ---------------------------------------------------------------- ranks
class Exit(msgspec.Struct, kw_only=True, gc=False):
    """The end of a rank's process. code: the exit status, negative for a signal (as in subprocess)."""

    code: ranges.ExitCode
    at: ranges.Time
    lived: ranges.Seconds  # seconds since its start
    last_line: ranges.Text = ""
    oom: bool = False  # its memory cgroup has counted an out-of-memory kill that explains this end


class Fault(msgspec.Struct, kw_only=True, gc=False):
    """An exception in a rank. fatal: it was not caught, so the process ends, after it has `lived` for so many seconds.
    cause: the line of the traceback that names the reason (failures.root_cause). micro_batch: in which it came, of
    `iteration`."""

    type: ranges.Text
    text: ranges.Text
    at: ranges.Time
    traceback: ranges.Text = ""
    cause: ranges.Text = ""
    iteration: ranges.Iteration | None = None
    micro_batch: ranges.MicroBatch | None = None
    fatal: bool = False
    lived: ranges.Seconds = 0.0


class Shards(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The shards of the optimizer's state that a rank has. held: of its place, its own and copies of others. version:
    the state's number of steps. count: the shards of the state. base: names the generation over whose replicas it is
    sharded (:func:`sharding.state_base`)."""

    base: ranges.Count
    version: ranges.Count
    count: ranges.Ways
    held: ranges.Shards


# Name of a process group -> (collectives that the rank has begun in it, those that have ended, the last one as a text).
Collectives = Annotated[dict[ranges.Kind, tuple[ranges.Count, ranges.Count, ranges.Kind]], Meta(max_length=64)]


class RankStatus(msgspec.Struct, kw_only=True, array_like=True, omit_defaults=True, gc=False):
    """One rank as its agent knows it. On the wire it is an array that ends with the last field that has no default, so
    rare fields come last.

    state: starting (no session yet) | waiting (can enter a generation) | entering (the generation `entering`) | running
    | stopped (at a known point, wants a plan; by itself if `broken` reaches its generation without a Break) | standby
    (in no complete replica, keeps its training state, can enter) | left (a plan went on without it) | finished (trained
    to the end) | exited.
    broken: all generations up to this one are over for the rank.
    phase: computing | reducing | synced | stepped, of `iteration`. done: the micro-batches in its gradient.
    process: the state letter of proc(5) ("T": stopped by a signal), empty if unknown. idle: for how many seconds the
    process has hardly computed, read or written; 0 if unknown.
    moved: changes while the rank's transfer or collective makes progress: bytes, and in the first seconds of a loss the
    network's retransmissions; in restart mode, the script's own heartbeats. 0 if unknown.
    replica: ranks of a replica. layout: its shape, for people.
    shards: of a distributed optimizer's state, from a stopped rank or a standby; from a waiting rank, those in its
    node's memory. saved: the iteration with which the newest known checkpoint goes on; 0 before there is one, -1 if the
    script makes none. kept: for a rank at rest, (iteration, mark) of the states with which it can go on, the newest
    first: its own, or what a newcomer could take from memory, a checkpoint or the script. States that belong together
    have equal marks. forgets: why its state is not kept in memory. sharded: its optimizer's state is sharded.
    remembers: it has a state that is kept as a whole. waits: it waits on a socket, a pipe, or for a child. collectives:
    in restart mode, of a rank that stands still. outlives: it ignores SIGTERM, and trains on to the next boundary when
    its element has to end. saves_in: the folder of the job's checkpoints, from the rank that writes them; empty if the
    name is too long.
    """

    state: ranges.RankState
    changed: ranges.Time = 0.0  # time of the last change of state, phase or done, by the agent's clock
    incarnation: ranges.Incarnation = 0
    generation: ranges.Count = 0
    entering: ranges.Count = 0
    broken: ranges.Count = 0
    iteration: ranges.Iteration = 0
    phase: ranges.RankPhase = "computing"
    done: ranges.MicroBatches = []
    micro_batches: ranges.MicroBatchCount = 0
    train_iterations: ranges.Count = 0
    flops_per_iteration: ranges.Flop = 0.0
    iteration_seconds: ranges.Seconds = 0.0
    pid: ranges.Pid = 0
    process: ranges.ProcessState = ""
    idle: ranges.Seconds = 0.0
    loss: float | None = None
    exit: Exit | None = None
    fault: Fault | None = None
    note: Fault | None = None  # the last fault that was corrected without the controller
    moved: ranges.Count = 0
    replica: ranges.Replica = 1
    layout: ranges.Kind = ""
    shards: Annotated[list[Shards], Meta(max_length=ranges.MOST_COPIES)] = []
    saved: ranges.Iteration = -1
    kept: Annotated[list[tuple[ranges.Iteration, ranges.Kind]], Meta(max_length=ranges.MOST_COPIES)] = []
    forgets: ranges.Kind = ""
    sharded: bool = False
    remembers: bool = False
    waits: bool = False
    collectives: Collectives = {}
    outlives: bool = False
    saves_in: ranges.Kind = ""

    @property
    def end(self) -> Exit | None:
        """The end of the process, or the coming one: an exception that is not caught takes a while to end it."""
        if self.state == "exited":
            return self.exit
        if self.fault is not None and self.fault.fatal and self.state != "finished":
            return Exit(code=1, at=self.fault.at, lived=self.fault.lived)
        return None


# The phases of an iteration, in order; `reduce` includes the wait for the others, `outside` is the script's own code
# before the iteration.
PHASES = ("data", "forward", "backward", "reduce", "step", "outside")


class RankStep(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One optimizer step of one rank: the ledger's proof.

    computed: each index as often as it was computed; None if that is `micro_batches`. loss: None if unknown, as for a
    plain program. phases: seconds in the order of :data:`PHASES`, empty if not measured.
    """

    slot: ranges.Slot
    micro_batches: ranges.MicroBatches
    seconds: ranges.StepSeconds
    loss: float | None
    computed: ranges.MicroBatches | None = None
    phases: Annotated[list[ranges.Seconds], Meta(max_length=len(PHASES))] = []


MERGE_SECONDS = 0.2  # for which an agent holds such a report back at most, for others that come soon


def with_status(period: float, progress: float) -> bool:
    """Whether an agent that got these values in its :class:`wire.Welcome` keeps step reports for its next status,
    because mere progress may wait for a whole period."""
    return progress >= period


def hold_seconds(period: float, progress: float) -> float:
    """Return the seconds for which such an agent holds a step report back, at most."""
    return MERGE_SECONDS + (period if with_status(period, progress) else 0.0)


class StepReport(msgspec.Struct, omit_defaults=True):
    """One optimizer step of the ranks of one agent. total: micro-batches of the iteration. number: counts the agent's
    reports, so that the receiver notices lost ones."""

    generation: ranges.Count
    iteration: ranges.Count
    total: ranges.MicroBatchCount
    at: ranges.Time
    ranks: Annotated[list[RankStep], Meta(max_length=ranges.MOST_RANKS)]
    number: ranges.Count = 0

    def __post_init__(self) -> None:
        if len({rank.slot for rank in self.ranks}) < len(self.ranks):
            raise ValueError("each slot has one step")


StepReports = Annotated[list[StepReport], Meta(max_length=ranges.MOST_STEP_REPORTS)]


# ---------------------------------------------------------------- other agents
class LostRank(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A process without which a plan goes on."""

    slot: ranges.Slot
    agent: ranges.NoName
    incarnation: ranges.Incarnation


class Peer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An agent as others of its job reach it. address: host:port. key: its public key (CURVE, Z85)."""

    element: ranges.Element
    agent: ranges.Name
    address: ranges.NoName
    key: ranges.NoName


# ---------------------------------------------------------------- images of training state
class Image(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Training state in a node's memory, which outlives its ranks (:class:`image_format.Key`): the part of a rank with
    which `iteration` goes on, at `place` of `size`, shard `shard` of `count`, made in generation `base`. bytes: its
    size."""

    kind: ranges.Kind
    slot: ranges.Slot
    iteration: ranges.Count
    place: ranges.Slot
    size: ranges.Replica
    shard: ranges.Shard
    count: ranges.Ways
    base: ranges.Count
    mark: ranges.NoName
    bytes: ranges.Count = 0


class Failing(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An agent with which transfers of images failed: how often in a row, and why the last time."""

    times: ranges.Count
    why: ranges.Kind


class Holder(msgspec.Struct, frozen=True, gc=False):
    """An agent of the job that takes and gives images."""

    element: ranges.Element
    address: ranges.Name
    token: ranges.Name
