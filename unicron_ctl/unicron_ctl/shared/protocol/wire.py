"""Messages between agents and the controller: MessagePack maps with a version and a kind, checked at the edge against
these types and the ranges of their fields (`ranges`). `structs` has what they are made of.

The protocol is level-triggered. An agent's :class:`Status` always tells the whole state of its ranks, and is sent at
every change and at every heartbeat; the controller repeats :class:`Break` and :class:`Plan` until the statuses show
that they were obeyed. So any message may be lost or repeated, and either side may be restarted, without harm
(docs/design/generations.md). All traffic of a node goes through its agent, which merges what its ranks say, so that
the controller's work grows with nodes, not with ranks.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from unicron_ctl.shared.protocol import ranges
from unicron_ctl.shared.protocol.structs import (
    Failing,
    Holder,
    Image,
    LostRank,
    Peer,
    RankStatus,
    Settings,
    StepReports,
)
from unicron_detector.formats import PROTOCOL, Format

VERSION = PROTOCOL.number
MAX_BYTES = 4 * 1024 * 1024  # a message over this size is hostile: 100,000 micro-batch indices fit in a tenth of it
STRANGER_BYTES = 128 * 1024  # of a message of a key that is not registered: a Register of 1,024 ranks has some 10,000


class BadMessage(Exception):
    """A message that does not fit the schema; its text is the reason, sent back to the peer."""


class OtherRelease(BadMessage):
    """A message of a release that is too far from this one."""


class Message(msgspec.Struct, kw_only=True, tag_field="kind", omit_defaults=True):
    """Base of all messages: `v` is the protocol version, `term` the number of the controller's term in what it says to
    agents. What a message says as a whole is checked in its `__post_init__`."""

    v: ranges.Version = VERSION
    term: ranges.Count = 0


# ---------------------------------------------------------------- agent -> controller
class Register(Message, tag="register"):
    """An agent's first message, repeated until it is welcomed."""

    job: ranges.JobId
    element: ranges.Element
    agent: ranges.Name  # unique per agent process
    node: ranges.Name
    address: ranges.Name
    slots: ranges.NodeSlots
    settings: Settings
    credential: ranges.Credential = ""
    step: ranges.Step = 0  # rises by ranges.LAUNCHES with each srun of the batch script, by 1 with each launch in it
    requeues: ranges.Count = 0  # how often Slurm has run the batch script of the whole job again
    trains: bool = True  # its command may train; else it is the job only until a later step of the script comes
    door: ranges.NoName = ""  # host:port at which other agents can see that this one lives
    peer: ranges.NoName = ""  # host:port on which other agents of the job reach this one, empty when they cannot
    key: ranges.NoName = ""  # the agent's public key (CURVE, Z85): by it the others know it, and it the others
    images: ranges.NoName = ""  # host:port at which it takes and gives images of training state; empty: it does not
    token: ranges.NoName = ""  # who has it may do so

    def __post_init__(self) -> None:
        count = self.settings.ranks_per_node
        first = self.element * count
        if self.slots != list(range(first, first + count)):
            last = first + count - 1
            raise ValueError(f"element {self.element} with {count} ranks must have the slots {first} to {last}")


class Agreement(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The plan on which the agents of generation `since` agreed without the controller (docs/design/consensus.md).

    plan: generation, members, store and prefix are the same everywhere, the prefix is that of no other plan; the
    assignment is that of the agent's own slots, in the first agents' word of all. by: the agent that made the plan.
    chosen: the ranks follow it. Until then a majority may or may not have taken it: its number is used either way.
    """

    generation: ranges.Count
    since: ranges.Count
    plan: Plan
    lost: Annotated[list[LostRank], Meta(max_length=ranges.MOST_SLOTS)]
    reason: ranges.Reason
    by: ranges.NoName
    chosen: bool = True


class Status(Message, tag="status"):
    """The whole state of an agent; also its heartbeat."""

    job: ranges.JobId
    element: ranges.Element
    agent: ranges.Name
    sent: ranges.Time
    number: ranges.Count = 0  # counts the agent's statuses: what comes late is known by it, whatever the clocks say
    store: ranges.NoName = ""  # host:port of the rendezvous store that this agent keeps, empty until it answers
    leaving: ranges.Text = ""  # why the agent is about to end by itself: "finished", or "stopped by Slurm (SIGTERM)"
    noticed: bool = False  # its element is to end: its ranks leave at the next boundary, and then it is let go
    pinged: ranges.Count = 0  # the number of the last Ping that the agent has heard
    answer: bool = False  # say that you live (Pong): the agent has something that needs the controller
    agreed: Agreement | None = None  # until a plan of the controller's with a higher number
    over: ranges.Count = 0  # the agent votes no more on what follows generations up to this one
    cut: ranges.Count = 0  # the number of the last Cut that the agent has heard of
    moved: ranges.Count = 0  # bytes of images that it has sent and received; rises while one is on its way
    unmoved: ranges.Count = 0  # images that came to nothing on their way; they are tried again
    rates: ranges.Rates = {}  # element -> bytes a second of the last image that went between it and this one
    # address -> an agent from which images could not be got of late; they are tried again
    failing: Annotated[dict[ranges.Name, Failing], Meta(max_length=ranges.MOST_FAILING)] = {}
    # address -> an agent to which images could not be given of late
    refusing: Annotated[dict[ranges.Name, Failing], Meta(max_length=ranges.MOST_FAILING)] = {}
    # Those that stay: of cuts. While no rank trains, those of the last iterations too.
    images: Annotated[list[Image], Meta(max_length=ranges.MOST_IMAGES)] = []
    saved: Image | None = None  # the newest that a script without a session keeps in this node
    fenced: bool = False  # restart mode: its processes end by themselves where it is cut off from their world
    ranks: Annotated[dict[ranges.Slot, RankStatus], Meta(max_length=ranges.MOST_RANKS)] = {}
    # why they did not start warm
    cold: Annotated[dict[ranges.Slot, ranges.Text], Meta(max_length=ranges.MOST_RANKS)] = {}
    steps: StepReports = []  # what its ranks have stepped, oldest first; it comes before what `ranks` says


class Envelope(msgspec.Struct):
    """Which kind of message this is. All else is passed over, which takes a tenth of the time of decoding it."""

    kind: ranges.Kind
    v: ranges.Version = VERSION


class StatusHead(Message, tag="status"):
    """The sender of a :class:`Status`; what it says is passed over."""

    job: ranges.JobId
    element: ranges.Element
    agent: ranges.Name
    sent: ranges.Time

    def status(self) -> Status:
        """Without what it says."""
        return Status(job=self.job, element=self.element, agent=self.agent, sent=self.sent)


class Steps(Message, tag="steps"):
    """The steps of an agent's ranks, oldest first, where no :class:`Status` is about to take them along."""

    job: ranges.JobId
    element: ranges.Element
    agent: ranges.Name
    reports: StepReports


class Timing(Message, tag="timing"):
    """When the parts of one recovery ended in one rank: seconds since it began, and the rank's clock when it had
    stepped, which was the last of them (`unicron_transition.session.session`)."""

    job: ranges.JobId
    slot: ranges.Slot
    generation: ranges.Count
    at: ranges.Time
    seconds: ranges.Durations


class ReachAnswer(Message, tag="reached"):
    """The answer to :class:`Reach`: one word of :class:`reach.Reach` for each address, in their order."""

    job: ranges.JobId
    element: ranges.Element
    agent: ranges.Name
    number: ranges.Count
    words: ranges.Words


class RecallAnswer(Message, tag="held"):
    """The answer to :class:`Recall`: the plan as the agent was told it."""

    job: ranges.JobId
    element: ranges.Element
    agent: ranges.Name
    share: PlanShare


class InjectRefused(Message, tag="inject_refused"):
    """A fault that was ordered and cannot be injected here."""

    job: ranges.JobId
    slot: ranges.Slot
    fault: ranges.Kind
    reason: ranges.Text


class StackTrace(Message, tag="stack_trace"):
    """The answer to :class:`Stacks`. how: py-spy | faulthandler | none; state: the process's, as in proc(5)."""

    job: ranges.JobId
    slot: ranges.Slot
    incarnation: ranges.Incarnation
    how: ranges.Text
    state: ranges.Text
    text: ranges.Text


class NodeEvent(Message, tag="node_event"):
    """An event of the node itself. source: kernel (a line of its log) | memory (kills counted by the cgroup) | link.

    code: "xid 79", the link's name, or the id of the rule that the agent found. number: counts the agent's events, so
    that one that comes twice is known. count: so many of the kind since the last one.
    """

    job: ranges.JobId
    element: ranges.Element
    agent: ranges.Name
    number: ranges.Count
    source: ranges.EventSource
    text: ranges.Text
    at: ranges.Time
    code: ranges.Kind = ""
    count: ranges.Count = 1


class Metrics(Message, tag="metrics"):
    """An agent's measurements of its node and its ranks' processes, for the comparison with peers.

    host: the machine behind the node; nodes with the same one share their counters. node: metric -> value, rates per
    second, as in :mod:`unicron_detector.iterations.peer_metrics`. ranks: slot -> metric -> value.
    """

    job: ranges.JobId
    element: ranges.Element
    agent: ranges.Name
    host: ranges.Kind = ""
    node: ranges.Values = {}
    ranks: Annotated[dict[ranges.Slot, ranges.Values], Meta(max_length=ranges.MOST_RANKS)] = {}


# ---------------------------------------------------------------- controller -> agent
class Welcome(Message, tag="welcome"):
    """The controller takes an agent in.

    metrics_seconds: between two :class:`Metrics`, 0 for none. metrics_directory: whose latency is measured, empty
    for the agent's own folder. progress_seconds: a status that tells of nothing but progress waits so long for more.
    layout: in which the ranks are to be started, where the job has stated several. run: a name for this training that
    no other has, of whatever cluster; what is left of it in memory is known by that. notice_seconds: an agent whose
    element is to end waits so long for the next boundary, and then ends all the same."""

    heartbeat_period: ranges.Beat
    controller: ranges.Kind
    progress_seconds: ranges.Progress = 0.2
    metrics_seconds: ranges.Seconds = 0.0
    metrics_directory: ranges.Text = ""
    layout: ranges.Kind = ""
    run: ranges.Run = ""
    notice_seconds: ranges.Seconds = 0.0


class Ping(Message, tag="ping"):
    """Say at once that you live: an agent answers with its status. A status whose `pinged` is `number` was made
    later. over: vote no more on what follows generations up to this one."""

    number: ranges.Count = 0
    over: ranges.Count = 0


class Pong(Message, tag="pong"):
    """The controller lives, and has the status with this number."""

    number: ranges.Count = 0


class Reach(Message, tag="reach"):
    """Another node is silent: say whether these addresses ("host:port") answer you. Empty ones are not tried."""

    number: ranges.Count
    targets: ranges.Addresses


class Recall(Message, tag="recall"):
    """The controller does not know the generation that your ranks are in: say what its plan was."""

    generation: ranges.Count


class Refusal(Message, tag="refused"):
    """The controller does not accept the last message. final: asking again is useless, the job goes on unprotected.
    replaced: another agent has taken its place, so it ends. alone: the command is to run in a world of its own node;
    where that is not final, whoever was taken in before knows that its step is over.
    apart: the job's other nodes train protected, so it ends: a plain world would wait for them in vain."""

    reason: ranges.Reason
    final: bool = False
    replaced: bool = False
    alone: bool = False
    apart: bool = False


class Break(Message, tag="break"):
    """All generations up to `generation` are over: stop at a known point and report. killed: all that is lost was
    killed from outside, so no rank has an error of its own to show."""

    generation: ranges.Count
    lost: ranges.Slots
    reason: ranges.Reason
    killed: bool = False


class Withdraw(Message, tag="withdraw"):
    """The offer of this generation is not to be taken, and no newcomer waits for it; whoever trains goes on."""

    generation: ranges.Count
    reason: ranges.Reason


class Plan(Message, tag="plan"):
    """A generation. With `boundary` it is an offer, taken at the end of the iteration in which every member holds
    it.

    replica: ranks of a replica; the members are replica-major and the assignment is by the heads' slots
    (:mod:`generations.layout`). joiners: they get the state of the source's replica, place by place. state: (base,
    version) of the optimizer's shards from which all go on (:class:`structs.Shards`).
    """

    generation: ranges.Count
    members: ranges.Slots
    store: ranges.NoName
    prefix: ranges.Kind
    boundary: bool = False
    joiners: ranges.Slots = []
    source: ranges.Slot | None = None
    step: ranges.Count | None = None  # whoever is synced at this iteration steps
    iteration: ranges.Iteration | None = None
    assignment: ranges.Assignment = {}
    reason: ranges.Reason = ""
    replica: ranges.Replica = 1
    state: ranges.State | None = None


class PlanShare(Message, tag="plan_share"):
    """A :class:`Plan` on its way to one agent: the common part, which is encoded once for all of them, and the
    micro-batches of the replicas in which it has a slot. peers: all agents of the generation, for its leaders only.
    doors: in restart mode those of other agents of the generation, host:port."""

    common: msgspec.Raw
    assignment: ranges.Assignment = {}
    peers: Annotated[list[Peer], Meta(max_length=ranges.MOST_ELEMENTS)] = []
    doors: Annotated[list[ranges.NoName], Meta(max_length=ranges.MOST_DOORS)] = []


class Cut(Message, tag="cut"):
    """Keep the training state of `iteration` when it comes, and give it to `targets`, so many `parts` of it; of a
    script without a session the first that it saves from then on. That of `good`, which is in enough nodes, stays until
    then; older ones are not needed any more. -1: none. none: no copies are needed any more, so nothing is kept, and
    what is there goes. number: the highest counts, for iterations may begin anew from an old file,
    and targets change."""

    iteration: ranges.Iteration
    number: ranges.Count = 0
    good: ranges.Iteration = -1
    parts: ranges.Count = 1
    none: bool = False
    targets: Annotated[list[Holder], Meta(max_length=ranges.MOST_TAKERS)] = []


class Fetch(Message, tag="fetch"):
    """Get an image into the memory of this node, and tell the ranks that it is there."""

    image: Image
    holder: Holder


class StartRank(Message, tag="start_rank"):
    """Start the rank again in place, unless its incarnation is already at `incarnation` or later. layout: as in
    :class:`Welcome`."""

    slot: ranges.Slot
    incarnation: ranges.Incarnation
    reason: ranges.Reason
    layout: ranges.Kind = ""


class StopRank(Message, tag="stop_rank"):
    """Kill the rank's process if it is still this incarnation. save: it is told to save its state and to end by itself;
    the order is repeated without that when it has had its time."""

    slot: ranges.Slot
    incarnation: ranges.Incarnation
    reason: ranges.Reason
    save: bool = False


class Stacks(Message, tag="stacks"):
    """Send the stack traces of the rank's threads, if it is still this incarnation; answered in about a second."""

    slot: ranges.Slot
    incarnation: ranges.Incarnation


class Inject(Message, tag="inject"):
    """Break something on purpose; `fault` as in :mod:`chaos.inject`. Sent only where the configuration allows it."""

    fault: ranges.Kind
    slot: ranges.Slot
    incarnation: ranges.Incarnation
    seconds: ranges.Seconds = 0.0


class End(Message, tag="end"):
    """End the agent: its ranks are stopped and it exits with `code`."""

    code: ranges.ExitCode
    reason: ranges.Reason


class Release(Message, tag="released"):
    """An agent whose element is to end need not wait any more. out: its ranks have left the job, which goes on; else
    nobody goes on without them, and it saves their state. stay: Slurm preempts the element, and starts it again only if
    it has not ended by itself."""

    out: bool
    stay: bool = False


class Grace(Message, tag="grace"):
    """Slurm preempts the agent's element, and sends SIGTERM again so many seconds after the first one: until then it
    may wait for the boundary."""

    seconds: ranges.Seconds


class Note(Message, tag="note"):
    """A line for the job's log: now, or where the job ends while this agent is there (at_end). Of several for the end
    the last counts; an empty one is none."""

    text: ranges.Text
    at_end: bool = False


# ---------------------------------------------------------------- unicronctl -> controller
class Ask(Message, tag="ask"):
    """A question or an order of `unicronctl`; the answer is an :class:`Answer`."""

    what: ranges.Kind
    args: ranges.Arguments = {}
    user: ranges.Kind = ""
    credential: ranges.Credential = ""


class Answer(Message, tag="answer"):
    ok: bool
    error: ranges.Reason = ""
    data: Any = None


ToController = (
    Register
    | Status
    | Steps
    | Timing
    | StackTrace
    | InjectRefused
    | Metrics
    | NodeEvent
    | ReachAnswer
    | RecallAnswer
    | Ask
)
# What only a registered agent says, beside its Status.
OF_AGENTS = frozenset(("steps", "timing", "stack_trace", "inject_refused", "metrics", "node_event", "reached", "held"))
_Orders = (
    Break | Withdraw | PlanShare | StartRank | StopRank | Stacks | Inject | End | Release | Grace | Note | Cut | Fetch
)
ToAgent = Welcome | Ping | Pong | Reach | Recall | Refusal | _Orders
_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """One message as MessagePack."""
    return _encoder.encode(message)


@cache
def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """The decoder of one kind of message, or of several; made once."""
    return msgspec.msgpack.Decoder(kind)


def decode(data: bytes, kind: Any = ToController, form: Format = PROTOCOL) -> Any:
    """The message in `data`, checked against `kind`. form: what its version is a number of. Raises
    :class:`BadMessage` with the reason, :class:`OtherRelease` where it is that."""
    if len(data) > MAX_BYTES:
        raise BadMessage(f"{len(data)} bytes are over the limit of {MAX_BYTES}")
    try:
        message = decoder(kind).decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        if refusal := form.refusal(_number(data, form)):
            raise OtherRelease(refusal) from None
        raise BadMessage(str(error)) from None
    if refusal := form.refusal(message.v):
        raise OtherRelease(refusal)
    return message


class _VersionOnly(msgspec.Struct):
    """Any message; all but its version is passed over."""

    v: ranges.Version


def _number(data: bytes, form: Format) -> int:
    """The version of a message that does not fit; this side's own where it has none."""
    try:
        found: int = decoder(_VersionOnly).decode(data).v
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return form.number
    return found
