"""Defines the messages between agents and the controller: MessagePack maps with a version and a kind, checked on
arrival against these types and the ranges of their fields (`ranges`). `structs` has their parts.

The protocol is level-triggered. An agent's :class:`Status` always holds the whole state of its ranks, and is sent at
every change and every few heartbeats; between them a :class:`Going` says what is new since the last one. The
controller repeats :class:`Break` and :class:`Plan` until the statuses show that they were obeyed. So any message may be
lost or repeated, and either side may restart, without harm (docs/design/generations.md). An agent merges the messages
of its ranks, so that the controller's work grows with nodes, not with ranks.
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
    Progress,
    RankStatus,
    Settings,
    StepReports,
    StepTables,
)
from unicron_detector.formats import PROTOCOL, Format

VERSION = PROTOCOL.number
MAX_BYTES = 4 * 1024 * 1024  # a larger message is hostile: 100,000 micro-batch indices fit in a tenth of it
STRANGER_BYTES = 128 * 1024  # of a message from an unregistered key: a Register of 1,024 ranks has some 10,000


class BadMessage(Exception):
    """A message does not fit the schema; the text is the reason, which the peer gets."""


class OtherRelease(BadMessage):
    """A message comes from a release that is too far from this one."""


class Message(msgspec.Struct, kw_only=True, tag_field="kind", omit_defaults=True):
    """Base of all messages. Rules between fields are checked in `__post_init__`."""

    v: ranges.Version = VERSION  # the protocol's version
    term: ranges.Count = 0  # the controller's, in its messages to agents


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
    trains: bool = True  # its command may train; else it is the job only until a later step of the script begins
    door: ranges.NoName = ""  # host:port at which other agents can see that this one lives
    peer: ranges.NoName = ""  # host:port at which other agents of the job reach this one, or empty
    key: ranges.NoName = ""  # the agent's public key (CURVE, Z85), by which other agents know it
    images: ranges.NoName = ""  # host:port at which it takes and gives images of training state, or empty
    token: ranges.NoName = ""  # that its peers need for images

    def __post_init__(self) -> None:
        count = self.settings.ranks_per_node
        first = self.element * count
        if self.slots != list(range(first, first + count)):
            last = first + count - 1
            raise ValueError(f"element {self.element} with {count} ranks must have the slots {first} to {last}")


class Agreement(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The plan on which the agents of generation `since` agreed without the controller (docs/design/consensus.md)."""

    generation: ranges.Count
    since: ranges.Count
    plan: Plan
    """Generation, members, store and prefix are the same at all agents, and no other plan has this prefix. The
    assignment is for the agent's own slots, or for all at the first agents."""
    lost: Annotated[list[LostRank], Meta(max_length=ranges.MOST_SLOTS)]
    reason: ranges.Reason
    by: ranges.NoName  # the agent that made the plan
    chosen: bool = True
    """The ranks follow it. Before that, a majority may or may not have accepted it, and its number is used either
    way."""


class Status(Message, tag="status"):
    """The whole state of an agent; also its heartbeat."""

    job: ranges.Kind
    element: ranges.Element
    agent: ranges.Kind
    sent: ranges.Time
    number: ranges.Count = 0  # counts the agent's statuses, to recognise a late one whatever the clocks show
    store: ranges.NoName = ""  # host:port of the rendezvous store that this agent keeps, empty until it answers
    leaving: ranges.Text = ""  # why the agent is about to end by itself: "finished", or "stopped by Slurm (SIGTERM)"
    noticed: bool = False  # its element has to end: its ranks leave at the next boundary, and then it is released
    pinged: ranges.Count = 0  # the number of the last Ping that the agent has heard
    answer: bool = False  # asks for a Pong: the agent has something that needs the controller
    agreed: Agreement | None = None  # until the controller's plan with a higher number
    over: ranges.Count = 0  # the agent votes no more on what follows generations up to this one
    cut: ranges.Count = 0  # the number of the last Cut that the agent has heard
    moved: ranges.Count = 0  # bytes of images that it has sent and received; rises during a transfer
    unmoved: ranges.Count = 0  # images whose transfer failed; they are tried again
    rates: ranges.Rates = {}  # element -> bytes a second of the last image that went between it and this one
    # address -> an agent from which recent images could not be fetched; they are tried again
    failing: Annotated[dict[ranges.Name, Failing], Meta(max_length=ranges.MOST_FAILING)] = {}
    # address -> an agent that did not take recent images
    refusing: Annotated[dict[ranges.Name, Failing], Meta(max_length=ranges.MOST_FAILING)] = {}
    # Images that stay: those of cuts, and while no rank trains also those of the last iterations.
    images: Annotated[list[Image], Meta(max_length=ranges.MOST_IMAGES)] = []
    saved: Image | None = None  # the newest that a script without a session keeps in this node
    fenced: bool = False  # restart mode: its processes end by themselves if it is cut off from their world
    lease: ranges.Seconds = 0.0  # so many seconds after the last status that the controller has answered
    begins: ranges.Count = 0  # the generation of the world that it begins once the controller has answered this status
    world: ranges.Port = 0  # the port that is open while this node is in its world, and refuses for ever after
    left: ranges.Count = 0  # the newest Break that it has heard: its port for worlds up to this one refuses
    ranks: Annotated[dict[ranges.Slot, RankStatus], Meta(max_length=ranges.MOST_RANKS)] = {}
    # slot -> why its rank did not start warm
    cold: Annotated[dict[ranges.Slot, ranges.Text], Meta(max_length=ranges.MOST_RANKS)] = {}
    steps: StepReports = []  # the steps of its ranks, oldest first; they come before the state in `ranks`
    tables: StepTables = []  # the same, to a controller that reads them


class Going(Message, tag="going"):
    """A status of an agent whose ranks have come further than its whole status `on` described them, or have stopped,
    entered or run on, and are otherwise as it says. It takes a tenth of the time to read. A controller without that
    status asks for a whole one (:class:`Ping`)."""

    job: ranges.Kind
    element: ranges.Element
    agent: ranges.Kind
    sent: ranges.Time
    number: ranges.Count  # counts together with the statuses
    on: ranges.Count
    progress: Annotated[list[Progress], Meta(min_length=1, max_length=ranges.MOST_RANKS)]
    """All of them say where the ranks stand, or none does."""
    moved: ranges.Count = 0
    tables: StepTables = []
    done: ranges.Assignment = {}
    """slot -> the micro-batches in its gradient: if they say where the ranks stand, of all that have any; else of those
    that have finished one since the agent's last message and have not come to another phase."""

    def __post_init__(self) -> None:
        if len(self.progress) == 1:
            return
        slots, others, states = list[int](), 0, self.progress[0].states
        for part in self.progress:
            slots += part.slots
            others += not part.slots
            if part.states != states:
                raise ValueError("all ranks say where they stand, or none does")
        if len(set(slots)) < len(slots) or len(slots) > ranges.MOST_RANKS or others > 1:
            raise ValueError("each slot is in one place")


class Envelope(msgspec.Struct):
    """The kind of a message. Skipping all else takes a tenth of the time of decoding it."""

    kind: ranges.Kind
    v: ranges.Version = VERSION


class StatusHead(msgspec.Struct):
    """The sender of a :class:`Status` or of a :class:`Going`; all else is skipped."""

    job: ranges.JobId
    element: ranges.Element
    agent: ranges.Name
    sent: ranges.Time
    v: ranges.Version = VERSION

    def status(self) -> Status:
        """Return a status without content."""
        return Status(job=self.job, element=self.element, agent=self.agent, sent=self.sent)


class Steps(Message, tag="steps"):
    """The steps of an agent's ranks, oldest first, when no :class:`Status` is about to carry them."""

    job: ranges.Kind
    element: ranges.Element
    agent: ranges.Kind
    reports: StepReports = []
    tables: StepTables = []  # the same, to a controller that reads them


class Timing(Message, tag="timing"):
    """The times of one recovery in one rank."""

    job: ranges.JobId
    slot: ranges.Slot
    generation: ranges.Count
    at: ranges.Time  # the rank's clock at the step that ends the recovery (`unicron_transition.session.session`)
    seconds: ranges.Durations  # part -> from the start of the recovery to the end of the part


class ReachAnswer(Message, tag="reached"):
    """The answer to :class:`Reach`: a value of :class:`reach.Reach` for each address, in order."""

    job: ranges.JobId
    element: ranges.Element
    agent: ranges.Name
    number: ranges.Count
    words: ranges.Words


class RecallAnswer(Message, tag="held"):
    """The answer to :class:`Recall`: the plan as the agent got it."""

    job: ranges.JobId
    element: ranges.Element
    agent: ranges.Name
    share: PlanShare


class InjectRefused(Message, tag="inject_refused"):
    """The ordered fault cannot be injected here."""

    job: ranges.JobId
    slot: ranges.Slot
    fault: ranges.Kind
    reason: ranges.Text


class StackTrace(Message, tag="stack_trace"):
    """The answer to :class:`Stacks`."""

    job: ranges.JobId
    slot: ranges.Slot
    incarnation: ranges.Incarnation
    how: ranges.Text  # py-spy | faulthandler | none
    state: ranges.Text  # the process's, as in proc(5)
    text: ranges.Text


class NodeEvent(Message, tag="node_event"):
    """An event of the node itself."""

    job: ranges.JobId
    element: ranges.Element
    agent: ranges.Name
    number: ranges.Count  # counts the agent's events, to recognise a repeated one
    source: ranges.EventSource  # kernel (a line of its log) | memory (kills counted by the cgroup) | link
    text: ranges.Text
    at: ranges.Time
    code: ranges.Kind = ""  # "xid 79", the link's name, or the id of the matching rule
    count: ranges.Count = 1  # events of the kind since the last message


class Metrics(Message, tag="metrics"):
    """An agent's measurements of its node and its ranks' processes, for the comparison with peers."""

    job: ranges.JobId
    element: ranges.Element
    agent: ranges.Name
    host: ranges.Kind = ""
    """The machine behind the node; nodes on the same one share their counters."""
    node: ranges.Values = {}
    """Metric -> value, rates per second (:mod:`unicron_detector.iterations.peer_metrics`)."""
    ranks: Annotated[dict[ranges.Slot, ranges.Values], Meta(max_length=ranges.MOST_RANKS)] = {}
    """Slot -> metric -> value."""
    whole: bool = True  # with `node` and `ranks`, not only what follows
    symptoms: ranges.Values = {}
    """Symptom -> value (:mod:`unicron_detector.health.symptoms`); none of those that were not looked for."""
    losses: ranges.Losses = {}
    """Peers to which packets were lost."""
    addresses: ranges.OwnAddresses = []
    """The node's own, by which others name it in their `losses`."""


# ---------------------------------------------------------------- controller -> agent
class Welcome(Message, tag="welcome"):
    """The controller takes an agent in."""

    heartbeat_period: ranges.Beat
    controller: ranges.Kind
    progress_seconds: ranges.Progress = 0.2
    """Seconds that a status with nothing but progress waits for more."""
    metrics_seconds: ranges.Seconds = 0.0  # seconds between two `Metrics`; 0 for none
    metrics_directory: ranges.Text = ""
    """The folder whose latency is measured; empty for the agent's own."""
    symptom_seconds: ranges.Seconds = 0.0
    """Seconds between two looks at symptoms, which are told only if there are any; 0 for none in between."""
    layout: ranges.Kind = ""
    """The layout of the ranks; empty unless the job has stated several."""
    run: ranges.Run = ""
    """A name that no other training on any cluster has. The job's state in memory is known by it."""
    notice_seconds: ranges.Seconds = 0.0
    """Seconds that an agent whose element has to end waits for the next boundary."""
    brief: bool = False  # the controller reads :class:`Going` and tables of steps
    fence_seconds: ranges.Seconds = 0.0
    """Restart mode: the lease of an agent's processes; 0.0 for the default."""


class Ping(Message, tag="ping"):
    """Send your status at once."""

    number: ranges.Count = 0  # a status whose `pinged` is this was made later
    over: ranges.Count = 0  # vote no more on what follows generations up to this one


class Pong(Message, tag="pong"):
    """The controller lives, and has the status with this number."""

    number: ranges.Count = 0


class Reach(Message, tag="reach"):
    """Report whether these addresses ("host:port") of silent nodes answer you. Empty ones are not tried."""

    number: ranges.Count
    targets: ranges.Addresses


class Recall(Message, tag="recall"):
    """Send the plan of your ranks' generation, which the controller does not know."""

    generation: ranges.Count


class Refusal(Message, tag="refused"):
    """The controller does not accept the last message."""

    reason: ranges.Reason
    final: bool = False  # asking again is useless, and the job goes on unprotected
    replaced: bool = False  # another agent has this one's place, so it ends
    alone: bool = False
    """The command should run in a world of its own node. If that is not final, the step of an agent that was taken in
    before is over."""
    apart: bool = False
    """The job's other nodes train protected. This agent ends, because a plain world would wait for them in vain."""


class Break(Message, tag="break"):
    """All generations up to `generation` are over: stop at a known point and report."""

    generation: ranges.Count
    lost: ranges.Slots
    reason: ranges.Reason
    killed: bool = False  # all lost ranks were killed from outside, so no rank has an error of its own


class Withdraw(Message, tag="withdraw"):
    """Do not take the offer of this generation. No newcomer waits for it, and ranks that train go on."""

    generation: ranges.Count
    reason: ranges.Reason


class Plan(Message, tag="plan"):
    """A generation: its members, and the micro-batches of each."""

    generation: ranges.Count
    members: ranges.Slots
    """Replica-major: the head of a replica comes first (:mod:`generations.layout`)."""
    store: ranges.NoName
    prefix: ranges.Kind
    boundary: bool = False
    """Whether it is an offer, taken at the end of the iteration in which every member has it."""
    joiners: ranges.Slots = []
    """Slots that get the state of the source's replica, place by place."""
    source: ranges.Slot | None = None
    step: ranges.Count | None = None  # ranks that are synced at this iteration step
    iteration: ranges.Iteration | None = None
    assignment: ranges.Assignment = {}  # micro-batches by the slot of a replica's head
    reason: ranges.Reason = ""
    replica: ranges.Replica = 1  # ranks of a replica
    state: ranges.State | None = None
    """(base, version) of the optimizer's shards from which all go on (:class:`structs.Shards`)."""


class PlanShare(Message, tag="plan_share"):
    """A :class:`Plan` for one agent."""

    common: msgspec.Raw
    """The part that is the same for all agents (`shared_plans.PlanCommon`), encoded once."""
    assignment: ranges.Assignment = {}
    """The micro-batches of the replicas in which the agent has a slot."""
    peers: Annotated[list[Peer], Meta(max_length=ranges.MOST_ELEMENTS)] = []
    """All agents of the generation, for its proposers only."""
    doors: Annotated[list[ranges.NoName], Meta(max_length=ranges.MOST_DOORS)] = []
    """In restart mode: host:port of other agents of the generation."""


class Cut(Message, tag="cut"):
    """Keep the training state of `iteration` when it comes, and give `parts` of it to `targets`."""

    iteration: ranges.Iteration
    """-1: of none. For a script without a session: the first state that it saves from then on."""
    number: ranges.Count = 0
    """The highest one counts, because iterations may begin anew from an old file, and targets change."""
    good: ranges.Iteration = -1
    """The iteration whose state is in enough nodes and stays until then; older states are not needed."""
    parts: ranges.Count = 1
    none: bool = False
    """No copies are needed any more: keep nothing and delete what is there."""
    targets: Annotated[list[Holder], Meta(max_length=ranges.MOST_TAKERS)] = []


class Fetch(Message, tag="fetch"):
    """Fetch an image into the memory of this node, and tell the ranks."""

    image: Image
    holder: Holder


class StartRank(Message, tag="start_rank"):
    """Start the rank again in place, unless it already is this incarnation or a later one."""

    slot: ranges.Slot
    incarnation: ranges.Incarnation
    reason: ranges.Reason
    layout: ranges.Kind = ""  # as in `Welcome`


class StopRank(Message, tag="stop_rank"):
    """Kill the rank's process if it is still this incarnation."""

    slot: ranges.Slot
    incarnation: ranges.Incarnation
    reason: ranges.Reason
    save: bool = False
    """Ask it to save its state and end by itself. The order is repeated without `save` when its time is over."""


class Stacks(Message, tag="stacks"):
    """Send the stack traces of the rank's threads within about a second, if it is still this incarnation."""

    slot: ranges.Slot
    incarnation: ranges.Incarnation


class Inject(Message, tag="inject"):
    """Break something on purpose; `fault` as in :mod:`chaos.inject`. Sent only if the configuration allows it."""

    fault: ranges.Kind
    slot: ranges.Slot
    incarnation: ranges.Incarnation
    seconds: ranges.Seconds = 0.0


class End(Message, tag="end"):
    """Stop the ranks, and exit with `code`."""

    code: ranges.ExitCode
    reason: ranges.Reason


class Release(Message, tag="released"):
    """An agent whose element has to end need not wait any more."""

    out: bool
    """Its ranks have left the job, which goes on. Otherwise the job cannot go on without them, and the agent saves
    their state."""
    stay: bool = False
    """Slurm preempts the element, and starts it again only if it has not ended by itself."""


class Grace(Message, tag="grace"):
    """Slurm preempts the agent's element, and sends SIGTERM again so many seconds after the first one. Until then the
    agent may wait for the boundary."""

    seconds: ranges.Seconds


class Note(Message, tag="note"):
    """A line for the job's log."""

    text: ranges.Text
    at_end: bool = False
    """Write it when the job ends. The last such line counts, and an empty one deletes it."""


# ---------------------------------------------------------------- unicronctl -> controller
class Ask(Message, tag="ask"):
    """A question or an order of `unicronctl`; the answer is an :class:`Answer`."""

    what: ranges.Kind
    args: ranges.Arguments = {}
    user: ranges.Kind = ""
    credential: ranges.Credential = ""
    unpacks: bool = False  # it reads `Answer.packed`


class Answer(Message, tag="answer"):
    ok: bool
    error: ranges.Reason = ""
    data: Any = None
    packed: ranges.LongAnswer = b""  # `data`, compressed, if it is long (`long_answers`)


ToController = (
    Register
    | Status
    | Going
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
# Messages of registered agents only, besides Status.
OF_AGENTS = frozenset(("steps", "timing", "stack_trace", "inject_refused", "metrics", "node_event", "reached", "held"))
_Orders = (
    Break | Withdraw | PlanShare | StartRank | StopRank | Stacks | Inject | End | Release | Grace | Note | Cut | Fetch
)
ToAgent = Welcome | Ping | Pong | Reach | Recall | Refusal | _Orders
_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Encode one message as MessagePack."""
    return _encoder.encode(message)


@cache
def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of one or several kinds of messages; it is made once."""
    return msgspec.msgpack.Decoder(kind)


_of_controller = decoder(ToController)  # the hash of its many kinds takes longer than the decoding of a short message


def decode(data: bytes, kind: Any = ToController, form: Format = PROTOCOL) -> Any:
    """Decode a message and check it against `kind`. form: the format whose version it has. Raises :class:`BadMessage`
    with the reason, or :class:`OtherRelease`."""
    if len(data) > MAX_BYTES:
        raise BadMessage(f"{len(data)} bytes are over the limit of {MAX_BYTES}")
    try:
        message = (_of_controller if kind is ToController else decoder(kind)).decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        if refusal := form.refusal(_number(data, form)):
            raise OtherRelease(refusal) from None
        raise BadMessage(str(error)) from None
    if refusal := form.refusal(message.v):
        raise OtherRelease(refusal)
    return message


class _VersionOnly(msgspec.Struct):
    """The version of any message."""

    v: ranges.Version


def _number(data: bytes, form: Format) -> int:
    """Return the version of a message that does not fit; this side's own if it has none."""
    try:
        number: int = decoder(_VersionOnly).decode(data).v
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return form.number
    return number
