"""Parts of messages: a job's settings, a rank's status and steps, images of training state, other agents."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from unicron_ctl.shared.protocol import ranges

SESSION, RESTART = "session", "restart"  # modes of healing


class Settings(msgspec.Struct, kw_only=True):
    """The submission's settings of a job. min_stated: the owner, or the launcher in the command, has said min_nodes.
    mode: session (its ranks speak this protocol) or restart (their agent speaks it for them: plain programs, ended and
    started again as a whole), with the agent's reason. layouts: ways to split the model, the preferred first ("TP2
    PP2"), where there are several; model: its sizes, for the planner. copies: in how many other nodes' memory each part
    of the training state is to be. spares: elements that are to wait, ready, for a member to be lost
    (docs/design/hot-spares.md). allocation: its nodes are one allocation of Slurm's, and no array
    (docs/design/allocations.md); no_kill: its srun goes on without a node. block: nodes of each of the array's elements
    (docs/design/blocks.md). log_dir: the folder with a file for each rank's output, empty where there is none. command:
    digests of what each rank of an array runs, with full stops between them; commands are the same where one is."""

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
        """Whether both are of the same command."""
        pairs = zip(self.command.split("."), other.command.split("."), strict=False)
        return any(mine == theirs for mine, theirs in pairs)


# ---------------------------------------------------------------- ranks
class Exit(msgspec.Struct, kw_only=True, gc=False):
    """The end of a rank's process: `code` is the exit status, negative for a signal (as in subprocess)."""

    code: ranges.ExitCode
    at: ranges.Time
    lived: ranges.Seconds  # seconds since its start
    last_line: ranges.Text = ""
    oom: bool = False  # its memory cgroup has counted an out-of-memory kill that this end explains


class Fault(msgspec.Struct, kw_only=True, gc=False):
    """An exception that a rank saw. fatal: nothing caught it, so the process ends; it had then `lived` so many
    seconds. cause: the line that its traceback names as the reason (failures.root_cause). micro_batch: that it came in,
    of `iteration`."""

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
    """A rank's part of the optimizer's state after `version` steps, which is sharded `count` ways over the replicas
    of a generation, that is named by `base` (:func:`sharding.state_base`): the shards `held` of its place, its
    own and copies of others'."""

    base: ranges.Count
    version: ranges.Count
    count: ranges.Ways
    held: ranges.Shards


# Name of a process group -> (collectives that the rank has begun in it, that have ended there, the last one in words).
Collectives = Annotated[dict[ranges.Kind, tuple[ranges.Count, ranges.Count, ranges.Kind]], Meta(max_length=64)]


class RankStatus(msgspec.Struct, kw_only=True, array_like=True, omit_defaults=True, gc=False):
    """One rank as its agent knows it.

    state: starting (no session yet) | waiting (can enter a generation) | entering (the generation `entering`) | running
    | stopped (at a known point, wants a plan; by itself when `broken` reaches its generation without a Break) | standby
    (in no complete replica, its training state kept; can enter) | left (a plan went on without it) | finished (trained
    to the end) | exited.
    replica: ranks of a replica; layout: its shape, for people. shards: of a distributed optimizer's state, said when
    stopped or standby, and when waiting: what its node's memory has. saved: the iteration with which the newest
    checkpoint of which the rank knows goes on; 0 before there is one, -1 where the script makes none.
    kept: of a rank at rest, (iteration, mark) of the states with which it can go on, the newest first: what it has, or
    what a newcomer could take from memory, from a checkpoint, or from the script. Marks are the same in states that
    belong together. forgets: why its state is not kept in memory. sharded: its optimizer's state is. remembers: it has
    one that is kept as a whole.
    phase: computing | reducing | synced | stepped, of `iteration`; `done` are the micro-batches in its gradient.
    broken: all generations up to this one are over for the rank.
    process: the state letter of proc(5) at the last look ("T": stopped by a signal), empty when unknown. idle: seconds
    for which the process has neither computed nor read or written anything worth mentioning; 0 when unknown.
    waits: it waits for an answer from somebody else: on a socket, a pipe, or for a child.
    moved: changes as long as the transfer, or the collective, in which the rank is gets on: bytes, and for the first
    seconds of a loss the network's tries to send them again; in restart mode, heartbeats of the script's own. 0 when
    nothing is said of it.
    collectives: in restart mode, of a rank that stands, where that is known.
    outlives: SIGTERM does nothing to it, so that it trains on to the next boundary when its element is to end.
    saves_in: the folder of the job's checkpoints, from the rank that writes them; empty where it is a longer name.
    On the wire an array that ends with the last field that says something, so what is rare comes last.
    """

    state: ranges.RankState
    changed: ranges.Time = 0.0  # the agent's clock when the state, phase or done list last changed
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
    note: Fault | None = None  # what last went wrong and was put right without the controller
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
        """The end of the process, or the one to come: an exception that nothing catches takes a while to end it."""
        if self.state == "exited":
            return self.exit
        if self.fault is not None and self.fault.fatal and self.state != "finished":
            return Exit(code=1, at=self.fault.at, lived=self.fault.lived)
        return None


# What a rank does in an iteration, in this order; `reduce` includes the wait for the others, `outside` is the script's
# own code before the iteration.
PHASES = ("data", "forward", "backward", "reduce", "step", "outside")


class RankStep(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One optimizer step of one rank: the ledger's proof.

    computed: an index once for every time it was computed; None when that is `micro_batches`. loss: None where it is
    not known, as of a plain program. phases: seconds in the order of :data:`PHASES`, empty when not measured.
    """

    slot: ranges.Slot
    micro_batches: ranges.MicroBatches
    seconds: ranges.StepSeconds
    loss: float | None
    computed: ranges.MicroBatches | None = None
    phases: Annotated[list[ranges.Seconds], Meta(max_length=len(PHASES))] = []


MERGE_SECONDS = 0.2  # that an agent holds such a report back, at most, for others that come soon


def with_status(period: float, progress: float) -> bool:
    """Whether an agent that got these in its :class:`wire.Welcome` keeps step reports for its next status: what tells
    of mere progress may wait for a whole period."""
    return progress >= period


def hold_seconds(period: float, progress: float) -> float:
    """Return the seconds for which such an agent holds a step report back, at most."""
    return MERGE_SECONDS + (period if with_status(period, progress) else 0.0)


class StepReport(msgspec.Struct, omit_defaults=True):
    """One optimizer step of the ranks of one agent; `total` micro-batches are in the iteration.

    number: how many of these the agent has made with this one; what is left out in the receiver's count was lost.
    """

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
    """A process that a plan goes on without."""

    slot: ranges.Slot
    agent: ranges.NoName
    incarnation: ranges.Incarnation


class Peer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An agent as others of its job reach it: `address` is host:port, `key` its public key (CURVE, Z85)."""

    element: ranges.Element
    agent: ranges.Name
    address: ranges.NoName
    key: ranges.NoName


# ---------------------------------------------------------------- images of training state
class Image(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Training state in the memory of a node that outlives its ranks (:class:`image_format.Key`): a rank's
    part of what `iteration` goes on from, at `place` of `size`, shard `shard` of `count`, made in generation `base`;
    `bytes` of it in all."""

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
    """An agent from which images could not be got, or to which none could be given: how often, one after the other, and
    why the last time."""

    times: ranges.Count
    why: ranges.Kind


class Holder(msgspec.Struct, frozen=True, gc=False):
    """An agent of the job that takes and gives images."""

    element: ranges.Element
    address: ranges.Name
    token: ranges.Name
