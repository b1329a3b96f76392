"""What can stand in the event log: one struct per kind, so that a misspelt kind or field cannot be written.

A record says what was decided or seen; when, of which job and in which generation is said by the :class:`Event` around
it. `reason` is for people and is in every record that somebody may ask about. Sources: a finding's, see
:mod:`unicron.ctl.controller.model.finding`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec

from unicron.ctl.protocol.ranges import TEXT
from unicron.ctl.protocol.wire import Plan, Settings
from unicron.ctl.system.errors import shortened

REASON = 4000  # characters of a reason; other texts have TEXT, as in messages
THIS_FAILURE = (
    -1
)  # as a record's `failure`: the failure recorded before it in the same outcome; the core puts its id in


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """Base of all records. A field that has its default is not written."""

    reason: str = ""

    @property
    def kind(self) -> str:
        """The name of its kind in the log."""
        return str(self.__struct_config__.tag)


class Event(msgspec.Struct, frozen=True, dict=True):
    """A record in the log. time: seconds since the epoch, the controller's clock. job: "" where none is concerned."""

    id: int
    time: float
    job: str
    generation: int
    record: Record

    @property
    def kind(self) -> str:
        return self.record.kind

    @cached_property
    def payload(self) -> bytes:
        """The record as JSON; made once, for the bounds on a job's records and for the log."""
        return encode(self.record)

    def as_dict(self) -> dict[str, Any]:
        """For `unicronctl events`: the envelope's keys and the record's."""
        where = {"id": self.id, "time": self.time, "job": self.job, "generation": self.generation}
        return where | {"kind": self.kind} | full(self.record)


def full(record: Record) -> dict[str, Any]:
    """All fields of a record as plain data, those with their defaults included."""
    return {name: msgspec.to_builtins(getattr(record, name)) for name in record.__struct_fields__}


class Crew(msgspec.Struct, frozen=True, array_like=True):
    """The processes of one agent that belong to a plan: a slot's process is its agent's incarnation of it."""

    agent: str
    slots: list[int]
    incarnations: list[int]


class Lost(msgspec.Struct, frozen=True, array_like=True):
    """One process that a generation goes on without."""

    slot: int
    agent: str
    incarnation: int


def amended(record: Record, reason: str) -> Record:
    """The record with another reason."""
    return msgspec.structs.replace(record, reason=reason)


def bounded(record: Record) -> Record:
    """The record with its texts cut to REASON and TEXT characters: much in them was said by others, by jobs, Slurm and
    libraries."""
    texts = {name: getattr(record, name) for name in record.__struct_fields__}
    bounds = {name: REASON if name == "reason" else TEXT for name, text in texts.items() if isinstance(text, str)}
    changed = {name: shortened(texts[name], most) for name, most in bounds.items() if len(texts[name]) > most}
    return msgspec.structs.replace(record, **changed) if changed else record


# ---------------------------------------------------------------- the controller itself
class Started(Record, frozen=True, tag="started"):
    """jobs: how many its log holds."""

    pid: int
    address: str
    jobs: int


class Configured(Record, frozen=True, tag="configured"):
    """The configuration was read again."""


class BadMessage(Record, frozen=True, tag="bad_message"):
    """peer: its routing id in hexadecimal."""

    peer: str


class RegistrationRefused(Record, frozen=True, tag="registration_refused"):
    """peer: job and element."""

    peer: str


class JobSetAside(Record, frozen=True, tag="job_set_aside"):
    """The controller leaves the job alone; its ranks train on. It cannot handle the job's input, or elements of the job
    do not fit together.

    input: what was being handled, for a report; where: the end of the traceback.
    """

    input: str
    where: str = ""


# ---------------------------------------------------------------- jobs and their agents
class JobRegistered(Record, frozen=True, tag="job_registered"):
    """step: the number of the srun in its batch script. uid: its owner's, by the credential of the agent that began it;
    None where nobody proves who he is, or an admin's agent began it. submitted: when, as Slurm shows it, in seconds
    since the epoch; 0 while Slurm has not confirmed the job. trains: its command may train, as its agent says."""

    settings: Settings
    step: int = 0
    trains: bool = True
    uid: int | None = None
    submitted: float = 0.0


class JobConfirmed(Record, frozen=True, tag="job_confirmed"):
    """Slurm shows whose a job is that began while it did not answer. most: its elements."""

    uid: int
    user: str
    submitted: float
    most: int


class AgentRegistered(Record, frozen=True, tag="agent_registered"):
    """key: the agent's CURVE public key, to which its credential was bound; empty where nothing is encrypted.
    confirmed: Slurm shows the element at work on this node, or is not used."""

    element: int
    agent: str
    node: str
    address: str
    slots: list[int]
    door: str = ""
    key: str = ""
    peer: str = ""
    peer_key: str = ""
    confirmed: bool = True


class AgentConfirmed(Record, frozen=True, tag="agent_confirmed"):
    """Slurm shows the element at work on the agent's node."""

    element: int
    agent: str


class AgentGone(Record, frozen=True, tag="agent_gone"):
    element: int
    agent: str


class AgentBack(Record, frozen=True, tag="agent_back"):
    element: int
    agent: str
    node: str


class RanksReady(Record, frozen=True, tag="ranks_ready"):
    """Processes that can enter a generation: slot -> incarnation."""

    agent: str
    incarnations: dict[int, int]


class RankStart(Record, frozen=True, tag="rank_start"):
    """A new process is wanted in the slot, not before `not_before` (seconds since the epoch). failure: whose remedy it
    is, 0 for none's."""

    slot: int
    incarnation: int
    not_before: float
    failure: int = 0


class StartedCold(Record, frozen=True, tag="started_cold"):
    """Ranks of the job were not forked from their node's zygote. Once for each reason."""

    element: int


class ExitNoted(Record, frozen=True, tag="exit_noted"):
    """An end that is no failure: it was wanted, or the script ended well."""

    slot: int
    agent: str
    incarnation: int
    code: int


# ---------------------------------------------------------------- failures
class Escalated(msgspec.Struct, frozen=True, kw_only=True):
    """What the escalation's memory needs of a failure (unicron.detector.failures.escalation)."""

    slot: int
    node: str
    scope: str
    severity: int
    uptime: float | None
    worked: bool
    event: str
    state: str


class SeenExit(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a process that a failure is about."""

    slot: int
    agent: str
    incarnation: int


class FailureDetected(Record, frozen=True, tag="failure_detected"):
    """What the judge made of a finding; `id` of the event is the failure's number.

    kind_of_failure: rank | node | agent | network | hang | exception | transfer | action. source: who said it.
    leave_out: slots that the job has to go on without. regroup: a new generation is needed although nobody is lost.
    noted: the time of a note. micro_batch: the iteration and the index of the one
    that the rank computed when it failed. detected_in: the highest generation at that time.
    """

    kind_of_failure: str
    slots: list[int]
    severity: int
    cause: str
    action: str
    detected_by: str
    source: str
    element: int = -1
    node: str = ""
    member: bool = False
    leave_out: dict[int, str] = {}
    regroup: str = ""
    wait_seconds: float = 0.0
    escalation: Escalated | None = None
    exits: list[SeenExit] = []
    iteration: int | None = None
    micro_batch: tuple[int, int] | None = None
    detected_in: int = 0
    exit_code: int | None = None
    pid: int | None = None
    last_line: str = ""
    lived: float | None = None
    fault_at: float | None = None
    noted: float | None = None


class FailureVerdict(Record, frozen=True, tag="failure_verdict"):
    """More is known of a failure; None leaves a field as it was. slurm: the state that Slurm showed."""

    failure: int
    severity: int | None = None
    cause: str | None = None
    action: str | None = None
    slurm: str | None = None


class FailureAction(Record, frozen=True, tag="failure_action"):
    """Something was done about a failure, in words."""

    failure: int
    text: str


class LeaveOut(Record, frozen=True, tag="leave_out"):
    """Members that the job has to go on without, slot -> why; their failure was recorded before."""

    failure: int
    slots: dict[int, str]


class ActionFailed(Record, frozen=True, tag="action_failed"):
    """An action came to its time limit or was refused; slot -1: Slurm refused to take the node out of service."""

    slot: int
    node: str
    failed: str
    action: str
    severity: int
    state: str = ""
    failure: int = 0


# ---------------------------------------------------------------- generations
class Break(Record, frozen=True, tag="break"):
    """All generations up to `number` are over. tries: time-outs of entering in a row."""

    number: int
    lost: list[Lost]
    tries: int = 0
    planned: bool = False  # nothing failed: the membership of a job in restart mode changes
    saved: int = -1  # restart mode: the newest iteration whose state the world is known to have saved


class PlanMade(Record, frozen=True, tag="plan"):
    """The next generation, and what became of the micro-batches."""

    plan: Plan
    crews: list[Crew]
    reused: int = 0
    recomputed: int = 0
    redistributed: int = 0


class Adopted(Record, frozen=True, tag="adopted"):
    """A generation that the log did not hold, as its agents show it. whole: all of its members are there, in it or on
    their way."""

    plan: Plan
    crews: list[Crew]
    whole: bool


class NumberUsed(Record, frozen=True, tag="number_used"):
    """The number of a generation that agents had begun to agree on, and did not: it is never used again."""


class Reinstated(Record, frozen=True, tag="reinstated"):
    """Members that were taken for lost and have come back in time."""

    slots: list[int]


class StateAwaited(Record, frozen=True, tag="state_awaited"):
    """The job is not formed anew yet: these lost members may hold its training state."""

    slots: list[int]


class Parted(Record, frozen=True, tag="parted"):
    """An element that takes no part: it and others of the job do not reach each other."""

    element: int


class Rejoined(Record, frozen=True, tag="rejoined"):
    """... and they do again."""

    element: int


class Offer(Record, frozen=True, tag="offer"):
    """A generation that begins at an iteration boundary; crews: of the joiners."""

    plan: Plan
    crews: list[Crew]
    joiners: list[int]
    leavers: list[int]


class OfferWithdrawn(Record, frozen=True, tag="offer_withdrawn"):
    """The job trains on without what was offered. lost: newcomers that failed before they were in."""

    number: int
    lost: list[Lost] = []


class LastCopy(Record, frozen=True, tag="last_copy"):
    """Nobody but these is left that knows the training state: no time limit condemns them."""

    slots: list[int]


class Entered(Record, frozen=True, tag="entered"):
    members: list[int]
    left: list[int] = []


class Reform(Record, frozen=True, tag="reform"):
    """Nobody is left who knows the training state."""


class LayoutWanted(Record, frozen=True, tag="layout_wanted"):
    """The plan has the job go on in this layout; the one that it is in: it stays."""

    layout: str


class LayoutChosen(Record, frozen=True, tag="layout_chosen"):
    """All ranks are started in this layout. save_seconds: those that live may save their state so long."""

    layout: str
    save_seconds: float = 0.0


class Step(Record, frozen=True, tag="step"):
    """One iteration of the whole job; loss: None when it is not finite (JSON has no such number). nan_since: the
    first of the last iterations whose loss is not, or -1. flops: of the iteration. unreported: the first hundred
    micro-batches that nobody reported."""

    iteration: int
    loss: float | None
    seconds: float
    ranks: int
    nodes: int
    flops: float
    train_iterations: int
    micro_batches: int
    computed: int
    nan_since: int = -1
    unreported: list[int] = []


class Steady(Record, frozen=True, tag="steady"):
    """Restart mode: the world gets on."""


class LedgerViolation(Record, frozen=True, tag="ledger_violation"):
    iteration: int
    problems: list[str]


class JobEnded(Record, frozen=True, tag="job_ended"):
    """disowned: it is not this job that Slurm knows by the id; its agents are let go, and their ranks go on."""

    code: int
    disowned: bool = False


class Timing(Record, frozen=True, tag="timing"):
    """When the parts of one recovery ended in one rank, in seconds since it began."""

    slot: int
    seconds: dict[str, float]


# ---------------------------------------------------------------- iterations
class Degraded(Record, frozen=True, tag="degraded"):
    iteration: int
    slot: int | None = None
    node: str = ""
    phase: str = ""
    slowdown: float | None = None


class DegradedOver(Record, frozen=True, tag="degraded_over"):
    iteration: int


class Overdue(Record, frozen=True, tag="overdue"):
    """An iteration takes long and nothing is done about it yet."""

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
    how: str
    state: str
    text: str


class Anomaly(Record, frozen=True, tag="anomaly"):
    node: str
    nodes: list[str]
    slot: int | None
    metric: str
    metrics: dict[str, float]
    scores: dict[str, float]
    distance: float


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
    """The training state is to be copied to other nodes, and cannot be: these keep nothing in memory, and nobody else
    trains these places, or some shards of them."""

    nodes: list[str]
    places: list[int]


class CopiesRefused(Record, frozen=True, tag="copies_refused"):
    """Copies of the training state did not get through: from which nodes, to which."""

    ways: list[tuple[str, str]]


class NewcomersWait(Record, frozen=True, tag="newcomers_wait"):
    elements: list[int]


# ---------------------------------------------------------------- faults on purpose, observe mode
class Injected(Record, frozen=True, tag="injected"):
    fault: str
    slot: int
    node: str
    seconds: float


class InjectRefused(Record, frozen=True, tag="inject_refused"):
    slot: int
    fault: str


class Observed(Record, frozen=True, tag="observed"):
    """Decided and not done, for the admin does not allow it in this partition. action: the call of Slurm. nodes: what
    the plan would give the job (action "plan")."""

    would: str
    action: str = ""
    node: str = ""
    element: int = -1
    nodes: int = 0


class ObservedWeek(Record, frozen=True, tag="observed_week"):
    """What acting would have saved since `since` (seconds since the epoch). calls: of Slurm, not made, by kind.
    planned, nodes: by job, how things stand at its end."""

    since: float
    node_hours: float
    calls: dict[str, int] = {}
    planned: dict[str, int] = {}
    nodes: dict[str, int] = {}


# ---------------------------------------------------------------- Slurm and nodes
class SlurmAction(Record, frozen=True, tag="slurm_action"):
    """Asked of Slurm: the intent; `slurm_done` or `slurm_error` is the outcome. restarts: how often Slurm had requeued
    the element before, -1 where that is not known."""

    action: str
    element: int
    node: str
    slurm_reason: str = ""
    restarts: int = -1


class SlurmDone(Record, frozen=True, tag="slurm_done"):
    """Slurm has done it."""

    action: str
    node: str
    element: int = -1


class SlurmFailed(Record, frozen=True, tag="slurm_error"):
    action: str = ""
    element: int = -1
    node: str = ""


class SlurmBack(Record, frozen=True, tag="slurm_back"):
    """Slurm answers again."""


class HeldAgain(Record, frozen=True, tag="held_again"):
    """Slurm shows an element held by what was written here, and the log has it as released or at work since."""

    element: int


class Unpinned(Record, frozen=True, tag="unpinned"):
    element: int


class Allotted(Record, frozen=True, tag="allotted"):
    """The elements that have a place in the plan, and the members that leave at the next boundary."""

    elements: list[int]
    leaving: list[int]


class Replanned(Record, frozen=True, tag="replanned"):
    assignment: dict[str, int]
    reasons: dict[str, str]
    objective: float
    waf: float
    inputs: str
    trigger: str
    spares: int
    looked_up: bool
    layouts: dict[str, str] = {}


class Silence(Record, frozen=True, tag="silence"):
    """An agent is silent, and why its node is not taken for lost."""

    element: int
    node: str


class Alone(Record, frozen=True, tag="alone"):
    """No agent is heard: the controller suspects itself."""


class HeardAgain(Record, frozen=True, tag="heard_again"):
    """... and that is over; seconds: how long it lasted."""

    seconds: float


class MostSilent(Record, frozen=True, tag="most_silent"):
    """The agents on more than half of all nodes fell silent together: the controller suspects itself."""

    silent: int
    nodes: int


class MostHeard(Record, frozen=True, tag="most_heard"):
    """... and that is over; seconds: how long it lasted."""

    seconds: float


class TakeDeferred(Record, frozen=True, tag="take_deferred"):
    """A node that was lost is not taken out of service while the controller suspects itself. over: that has an end,
    for this element's loss; failure and text are what it would have been taken for."""

    node: str
    element: int
    failure: int = 0
    text: str = ""
    over: bool = False


class NodeLost(Record, frozen=True, tag="node_lost"):
    """slurmd_start: when the slurmd that is lost with it began, as Slurm shows it; 0 where it does not."""

    node: str
    element: int
    slurmd_start: float = 0.0


class SlurmdReached(Record, frozen=True, tag="slurmd_reached"):
    """A node is asked about whose slurmd the controller has reached at this address ("host:port")."""

    node: str
    address: str


class NodeResumed(Record, frozen=True, tag="node_resumed"):
    """by_others: not this controller gave it back, but a person, or Slurm itself."""

    node: str
    verified: bool = True
    by_others: bool = False


class Isolated(Record, frozen=True, tag="isolated"):
    """A node is taken out of service: set down because it is dead, or drained."""

    node: str


class IsolationWithheld(Record, frozen=True, tag="isolation_withheld"):
    """A limit keeps a node in service, or the slots' job on it."""

    node: str
    slots: list[int]


class Avoided(Record, frozen=True, tag="avoided"):
    """The job leaves the node, and its elements do not start there again for a while. agent: the one that has to go.
    suspect: what was said may be the node's fault, and a pair test should prove or clear it."""

    element: int
    node: str
    agent: str = ""
    suspect: bool = False


class TakeWithheld(Record, frozen=True, tag="take_withheld"):
    """A limit keeps the controller from asking Slurm for this."""

    action: str
    element: int
    node: str = ""


class NodeHealth(Record, frozen=True, tag="node_health"):
    """verdict: good | warning | unknown | bad. checked_at: the node's clock. drain: its admin wants a bad node
    drained."""

    node: str
    source: str
    verdict: str
    checked_at: float
    drain: bool = False


class AdmissionWaits(Record, frozen=True, tag="admission_waits"):
    node: str


class NodeEvent(Record, frozen=True, tag="node_event"):
    """What a node said of itself, by the word of an agent of `of_job`. mark: agent:number, so that it counts once. at:
    the node's clock."""

    node: str
    source: str
    text: str
    code: str
    count: int
    at: float
    pid: int | None
    mark: str
    cause: str
    severity: int
    scope: str
    rule: str
    action: str
    of_job: str = ""


class NodeVerdict(Record, frozen=True, tag="node_verdict"):
    """What became of a node event (its id) that waited for others to say the same."""

    node: str
    event: int
    action: str
    of_job: str = ""


class NodeEventsDropped(Record, frozen=True, tag="node_events_dropped"):
    """Agents of `of_job` tell more of a node than is recorded."""

    node: str
    of_job: str = ""


class Unreadable(Record, frozen=True, tag="unreadable"):
    """Stands in, when the log is read, for a record that this release cannot read. `of`: its kind."""

    of: str


def _kinds(base: type[Record]) -> dict[str, type[Record]]:
    found: dict[str, type[Record]] = {}
    for kind in base.__subclasses__():
        found[str(kind.__struct_config__.tag)] = kind
    return found


KINDS = _kinds(Record)
_decoders = {name: msgspec.json.Decoder(kind) for name, kind in KINDS.items()}
_encoder = msgspec.json.Encoder()


def encode(record: Record) -> bytes:
    """The record as JSON."""
    return _encoder.encode(record)


def decode(kind: str, payload: bytes | str) -> Record:
    """The record of that kind; :class:`Unreadable`, with the reason, for one that this release cannot read."""
    decoder = _decoders.get(kind)
    if decoder is None:
        return Unreadable(of=kind, reason=f"this release knows no record {kind!r}")
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Unreadable(of=kind, reason=f"a record {kind!r} cannot be read: {error}")
