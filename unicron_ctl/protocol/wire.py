"""Messages between agents and the controller: MessagePack maps with a version and a kind, checked against these types
at the edge.

The protocol is level-triggered. An agent's :class:`Status` always tells the whole state of its ranks, and is sent at
every change and at every heartbeat; the controller repeats :class:`Break` and :class:`Plan` until the statuses show
that they were obeyed. So any message may be lost or repeated, and either side may be restarted, without harm
(docs/design/generations.md). All traffic of a node goes through its agent, which merges what its ranks say, so that
the controller's work grows with nodes, not with ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

VERSION = 2
HINT_VERSION = 1  # of the SPANK plugin's datagrams
SESSION, RESTART = "session", "restart"  # modes of healing
MAX_BYTES = 4 * 1024 * 1024  # a message over this size is hostile: 100,000 micro-batch indices fit in a tenth of it


class BadMessage(Exception):
    """A message that does not fit the schema; its text is the reason, sent back to the peer."""


class Message(msgspec.Struct, kw_only=True, tag_field="kind", omit_defaults=True):
    """Base of all messages: `v` is the protocol version."""

    v: int = VERSION


# ---------------------------------------------------------------- agent -> controller
class Settings(msgspec.Struct, kw_only=True):
    """What the submission says of the job. mode: session (its ranks speak this protocol) or restart (their agent
    speaks it for them: plain programs, ended and started again as a whole), with the agent's reason."""

    name: str
    user: str
    weight: float = 1.0
    min_nodes: int = 1
    max_nodes: int = 1
    ranks_per_node: int = 1
    mode: str = SESSION
    mode_reason: str = ""


class Exit(msgspec.Struct, kw_only=True, gc=False):
    """How a rank's process ended: `code` is the exit status, negative for a signal (as in subprocess)."""

    code: int
    at: float
    lived: float  # seconds since its start
    last_line: str = ""
    oom: bool = False  # its memory cgroup has counted an out-of-memory kill that this end explains


class Fault(msgspec.Struct, kw_only=True, gc=False):
    """An exception that a rank saw. fatal: nothing caught it, so the process ends; it had then `lived` so many
    seconds."""

    type: str
    text: str
    at: float
    traceback: str = ""
    fatal: bool = False
    lived: float = 0.0


class RankStatus(msgspec.Struct, kw_only=True, array_like=True, omit_defaults=True, gc=False):
    """One rank as its agent knows it.

    state: starting (no session yet) | waiting (can enter a generation) | entering (the generation `entering`) | running
    | stopped (at a known point, wants a plan; by itself when `broken` reaches its generation without a Break) | left
    (a plan went on without it) | finished (trained to the end) | exited.
    phase: computing | reducing | synced | stepped, of `iteration`; `done` are the micro-batches in its gradient.
    broken: all generations up to this one are over for the rank.
    process: the state letter of proc(5) at the last look ("T": stopped by a signal), empty when unknown. idle: seconds
    for which the process has neither computed nor read or written anything worth mentioning; 0 when unknown.
    On the wire an array that ends with the last field that says something, so what is rare comes last.
    """

    state: str
    changed: float = 0.0  # the agent's clock when the state, phase or done list last changed
    incarnation: int = 0
    generation: int = 0
    entering: int = 0
    broken: int = 0
    iteration: int = 0
    phase: str = "computing"
    done: list[int] = []
    micro_batches: int = 0
    train_iterations: int = 0
    flops_per_iteration: float = 0.0
    iteration_seconds: float = 0.0
    pid: int = 0
    process: str = ""
    idle: float = 0.0
    loss: float | None = None
    exit: Exit | None = None
    fault: Fault | None = None
    note: Fault | None = None  # what last went wrong and was put right without the controller

    @property
    def end(self) -> Exit | None:
        """How the process ended, or is about to: what nothing catches ends it, though that may take a while."""
        if self.state == "exited":
            return self.exit
        if self.fault is not None and self.fault.fatal and self.state != "finished":
            return Exit(code=1, at=self.fault.at, lived=self.fault.lived)
        return None


class Register(Message, tag="register"):
    """An agent's first message, repeated until it is welcomed."""

    job: str
    element: int
    agent: str  # unique per agent process
    node: str
    address: str
    slots: list[int]
    settings: Settings
    credential: str = ""
    step: int = 0  # of Slurm: the number of the srun in its batch script
    peer: str = ""  # host:port on which other agents of the job reach this one, empty when they cannot
    key: str = ""  # the agent's public key (CURVE, Z85): by it the others know it, and it the others


class LostRank(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A process that a plan goes on without."""

    slot: int
    agent: str
    incarnation: int


class Agreed(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the agents of generation `since` agreed on while the controller was away (docs/design/agreement.md).

    plan: generation, members, store and prefix are the same everywhere, the prefix is that of no other plan; the
    assignment is that of the agent's own slots, in the first agents' word of all. by: the agent that made the plan.
    chosen: the ranks follow it. Until then a majority may or may not have taken it: its number is used either way.
    """

    generation: int
    since: int
    plan: Plan
    lost: list[LostRank]
    reason: str
    by: str
    chosen: bool = True


class Status(Message, tag="status"):
    """The whole state of an agent; also its heartbeat."""

    job: str
    element: int
    agent: str
    sent: float
    number: int = 0  # counts the agent's statuses: what comes late is known by it, whatever the clocks say
    store: str = ""  # host:port of the rendezvous store that this agent keeps, empty until it answers
    leaving: str = ""  # why the agent is about to end by itself: "finished", or "stopped by Slurm (SIGTERM)"
    pinged: int = 0  # the number of the last Ping that the agent has heard
    answer: bool = False  # say that you live (Pong): the agent has something that needs the controller
    agreed: Agreed | None = None  # until a plan of the controller's with a higher number
    ranks: dict[int, RankStatus] = {}


# What a rank does in an iteration, in this order; `reduce` includes the wait for the others, `outside` is the script's
# own code before the iteration.
PHASES = ("data", "forward", "backward", "reduce", "step", "outside")


class RankStep(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One optimizer step of one rank: the ledger's proof.

    computed: an index once for every time it was computed; None when that is `micro_batches`. phases: seconds in the
    order of :data:`PHASES`, empty when not measured.
    """

    slot: int
    micro_batches: list[int]
    seconds: float
    loss: float
    computed: list[int] | None = None
    phases: list[float] = []


class Steps(Message, tag="steps"):
    """One optimizer step of the ranks of one agent; `total` micro-batches are in the iteration.

    number: how many of these the agent has made with this one; what is left out in the receiver's count was lost.
    """

    job: str
    element: int
    agent: str
    generation: int
    iteration: int
    total: int
    at: float
    ranks: list[RankStep]
    number: int = 0


class Timing(Message, tag="timing"):
    """How long the parts of one recovery took in one rank, in seconds."""

    job: str
    slot: int
    generation: int
    seconds: dict[str, float]


class InjectRefused(Message, tag="inject_refused"):
    """A fault that was ordered and cannot be injected here."""

    job: str
    slot: int
    fault: str
    reason: str


class StackTrace(Message, tag="stack_trace"):
    """The answer to :class:`Stacks`. how: py-spy | faulthandler | none; state: the process's, as in proc(5)."""

    job: str
    slot: int
    incarnation: int
    how: str
    state: str
    text: str


class NodeEvent(Message, tag="node_event"):
    """What the node itself says. source: kernel (a line of its log) | memory (kills counted by the cgroup) | link.

    code: "xid 79", the link's name, or the id of the rule that the agent found. number: counts the agent's events, so
    that one that comes twice is known. count: so many of the kind since the last one.
    """

    job: str
    element: int
    agent: str
    number: int
    source: str
    text: str
    at: float
    code: str = ""
    count: int = 1


class Metrics(Message, tag="metrics"):
    """What an agent measured of its node and its ranks' processes, for the comparison with peers.

    host: the machine behind the node; nodes with the same one share their counters. node: metric -> value, rates per
    second, as in :mod:`detector.metrics`. ranks: slot -> metric -> value.
    """

    job: str
    element: int
    agent: str
    host: str = ""
    node: dict[str, float] = {}
    ranks: dict[int, dict[str, float]] = {}


# ---------------------------------------------------------------- controller -> agent
class Welcome(Message, tag="welcome"):
    """metrics_seconds: between two :class:`Metrics`, 0 for none. metrics_directory: whose latency is measured, empty
    for the agent's own folder. progress_seconds: a status that tells of nothing but progress waits so long for more."""

    heartbeat_period: float
    controller: str
    progress_seconds: float = 0.2
    metrics_seconds: float = 0.0
    metrics_directory: str = ""


class Ping(Message, tag="ping"):
    """Say at once that you live: an agent answers with its status. A status whose `pinged` is `number` was made
    later."""

    number: int = 0


class Pong(Message, tag="pong"):
    """The controller lives, and has the status with this number."""

    number: int = 0


class Refused(Message, tag="refused"):
    """The controller does not accept the last message; `final` means that asking again is useless, `alone`
    that the command is to run in a world of its own node."""

    reason: str
    final: bool = False
    alone: bool = False


class Break(Message, tag="break"):
    """All generations up to `generation` are over: stop at a known point and report."""

    generation: int
    lost: list[int]
    reason: str


class Plan(Message, tag="plan"):
    """A generation. With `boundary` it is an offer, taken at the end of the iteration in which every member holds
    it."""

    generation: int
    members: list[int]
    store: str
    prefix: str
    boundary: bool = False
    joiners: list[int] = []
    source: int | None = None
    step: int | None = None  # whoever is synced at this iteration steps
    iteration: int | None = None
    assignment: dict[int, list[int]] = {}
    reason: str = ""


class Peer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An agent as others of its job reach it: `address` is host:port, `key` its public key (CURVE, Z85)."""

    element: int
    agent: str
    address: str
    key: str


class PlanCommon(msgspec.Struct, omit_defaults=True):
    """What all agents are told of a plan; members and joiners as runs [first, last]. leaders: the agents of the first
    members' elements, who act for the controller while it is away."""

    generation: int
    members: list[tuple[int, int]]
    store: str
    prefix: str
    boundary: bool = False
    joiners: list[tuple[int, int]] = []
    source: int | None = None
    step: int | None = None
    iteration: int | None = None
    reason: str = ""
    leaders: list[Peer] = []


class PlanShare(Message, tag="plan_share"):
    """A :class:`Plan` on its way to one agent: the common part, which is encoded once for all of them, and the
    micro-batches of the agent's own slots. peers: all agents of the generation, for its leaders only."""

    common: msgspec.Raw
    assignment: dict[int, list[int]] = {}
    peers: list[Peer] = []


class StartRank(Message, tag="start_rank"):
    """Start the rank again in place, unless its incarnation is already at `incarnation` or later."""

    slot: int
    incarnation: int
    reason: str


class StopRank(Message, tag="stop_rank"):
    """Kill the rank's process if it is still this incarnation."""

    slot: int
    incarnation: int
    reason: str


class Stacks(Message, tag="stacks"):
    """Send the stack traces of the rank's threads, if it is still this incarnation; answered in about a second."""

    slot: int
    incarnation: int


class Inject(Message, tag="inject"):
    """Break something on purpose; `fault` as in :mod:`detector.inject`. Sent only where the configuration allows it."""

    fault: str
    slot: int
    incarnation: int
    seconds: float = 0.0


class End(Message, tag="end"):
    """End the agent: its ranks are stopped and it exits with `code`."""

    code: int
    reason: str


# ---------------------------------------------------------------- hints from the SPANK plugin (UDP, never trusted
# alone)
class Hint(msgspec.Struct, kw_only=True):
    """A datagram of the plugin: kind is task_exit (a plugin of 0.1 also sends prolog and epilog)."""

    v: int
    kind: str
    job: str
    element: int
    node: str
    status: int


# ---------------------------------------------------------------- unicronctl -> controller
class Ask(Message, tag="ask"):
    """A question or an order of `unicronctl`; the answer is an :class:`Answer`."""

    what: str
    args: dict[str, Any] = {}
    user: str = ""
    credential: str = ""


class Answer(Message, tag="answer"):
    ok: bool
    error: str = ""
    data: Any = None


ToController = Register | Status | Steps | Timing | StackTrace | InjectRefused | Metrics | NodeEvent | Ask
ToAgent = Welcome | Ping | Pong | Refused | Break | PlanShare | StartRank | StopRank | Stacks | Inject | End
_encoder = msgspec.msgpack.Encoder()
_decoders = {kind: msgspec.msgpack.Decoder(kind) for kind in (ToController, ToAgent, Answer, Hint)}
_common_decoder = msgspec.msgpack.Decoder(PlanCommon)
MAX_MEMBERS = 1 << 20  # of a plan


def encode(message: msgspec.Struct) -> bytes:
    """One message as MessagePack."""
    return _encoder.encode(message)


def decode(data: bytes, kind: Any = ToController) -> Any:
    """The message in `data`, checked against `kind`. Raises :class:`BadMessage` with the reason."""
    if len(data) > MAX_BYTES:
        raise BadMessage(f"{len(data)} bytes are over the limit of {MAX_BYTES}")
    try:
        message = _decoders[kind].decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(str(error)) from None
    speaks = HINT_VERSION if kind is Hint else VERSION
    if message.v != speaks:
        raise BadMessage(
            f"protocol version {message.v}, this side speaks {speaks}: install the same release on both sides"
        )
    return message


def runs(slots: Iterable[int]) -> list[tuple[int, int]]:
    """The slots, ascending, as runs (first, last): 16,384 members are one pair."""
    found: list[tuple[int, int]] = []
    for slot in sorted(slots):
        if found and found[-1][1] == slot - 1:
            found[-1] = found[-1][0], slot
        else:
            found.append((slot, slot))
    return found


def expand(found: Sequence[tuple[int, int]]) -> list[int]:
    """The slots of such runs. Raises :class:`BadMessage` for runs that are none."""
    if any(last < first for first, last in found) or sum(last - first + 1 for first, last in found) > MAX_MEMBERS:
        raise BadMessage("the plan's members are no runs of slots")
    return [slot for first, last in found for slot in range(first, last + 1)]


def common(plan: Plan, leaders: Sequence[Peer] = ()) -> msgspec.Raw:
    """The part of the plan that all agents get, encoded."""
    part = PlanCommon(
        plan.generation,
        runs(plan.members),
        plan.store,
        plan.prefix,
        plan.boundary,
        runs(plan.joiners),
        plan.source,
        plan.step,
        plan.iteration,
        plan.reason,
        list(leaders),
    )
    return msgspec.Raw(_encoder.encode(part))


def share(plan: Plan, encoded: msgspec.Raw, slots: Iterable[int], peers: Sequence[Peer] = ()) -> PlanShare:
    """What the agent with these slots is told; `encoded` is :func:`common` of the plan."""
    own = {slot: plan.assignment[slot] for slot in slots if slot in plan.assignment}
    return PlanShare(common=encoded, assignment=own, peers=list(peers))


def whole(part: PlanShare) -> Plan:
    """The plan as the agent's ranks see it: everything but other agents' micro-batches. Raises :class:`BadMessage`."""
    known = _known(part)
    return Plan(
        generation=known.generation,
        members=expand(known.members),
        store=known.store,
        prefix=known.prefix,
        boundary=known.boundary,
        joiners=expand(known.joiners),
        source=known.source,
        step=known.step,
        iteration=known.iteration,
        assignment=part.assignment,
        reason=known.reason,
    )


def leaders(part: PlanShare) -> list[Peer]:
    """Who acts for the controller while it is away, the first first. Raises :class:`BadMessage`."""
    return _known(part).leaders


def _known(part: PlanShare) -> PlanCommon:
    try:
        return _common_decoder.decode(part.common)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadMessage(str(error)) from None
