"""The controller's answers: the structs behind the JSON of `unicronctl`, with each field's audience.

Times are seconds since the epoch, durations seconds, rates FLOP/s. A field that is annotated with OWNER or ADMIN is
told to these only; others get its default. Keys may be added; none is renamed or removed.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

OWNER = Meta(extra_json_schema={"audience": "the job's owner, readers and admins"})
CUT = "cut"  # the kind of an item that stands for events that were too much for one answer
READ = "read"  # the kind of an item with the id up to which the log was read, for one who follows it
ASKED_TOO_MUCH = "the controller is asked too much at once: try again"
ADMIN = Meta(extra_json_schema={"audience": "readers and admins"})


class Ending(msgspec.Struct, kw_only=True):
    """The end of a job. disowned: Slurm knows no such job, or another's."""

    code: int
    reason: Annotated[str, OWNER] = ""
    time: float
    disowned: bool


class Failure(msgspec.Struct, kw_only=True):
    """One failure with its story; times are null for what has not happened."""

    id: int
    kind: str
    job: str
    slot: int | None
    slots: list[int]
    element: int
    node: str
    severity: int
    cause: str
    action: str
    reason: str
    detected_at: float
    detected_by: str
    broken_at: float | None
    planned_at: float | None
    resumed_at: float | None
    stepped_at: float | None
    restored_at: float | None
    whole_at: float | None
    iteration: int | None
    reused_micro_batches: int
    recomputed_micro_batches: int
    redistributed_micro_batches: int
    actions: list[str]


class Slow(msgspec.Struct, kw_only=True):
    """The present reason why a job is slow. slot: null when no rank differs from the others."""

    since: float
    iteration: int
    slot: int | None
    node: str
    phase: str
    slowdown: float | None
    reason: str
    reported: bool


class Anomaly(msgspec.Struct, kw_only=True):
    """A node or rank that stands out among its peers by a metric."""

    peer: str
    nodes: list[str]
    slot: int | None
    metric: str
    since: float
    reason: str


class Waiting(msgspec.Struct, kw_only=True):
    """Pending elements for which Slurm gives the same reason. starts: they can start once there are nodes; else `words`
    names what has to happen first."""

    elements: list[int]
    reason: str
    words: str
    starts: bool


class Spare(msgspec.Struct, kw_only=True):
    """An element that waits to take a lost one's place; state is ready or starting."""

    element: int
    node: str
    state: str


class Rank(msgspec.Struct, kw_only=True):
    """One rank as its agent knows it. start: how its process was started. forgets: why its state is not in memory."""

    slot: int
    state: str
    incarnation: int
    generation: int
    iteration: int
    phase: str
    pid: int
    start: str
    forgets: str


class Element(msgspec.Struct, kw_only=True):
    """One agent with its ranks. gone: why, or "". copies_failed: snapshots that came to nothing on their way."""

    element: int
    node: str
    agent: str
    gone: str
    last_heard: float | None
    copies_failed: int
    ranks: list[Rank]


class JobBase(msgspec.Struct, kw_only=True):
    """The common part of the list of jobs and of the explanation of one.

    layout: how the ranks of a replica share its model; replica: how many they are. replicas: those that train.
    standbys: slots of living ranks that complete none and have kept their state. spares_wanted: spares that were asked
    for; spares_ready: those that could come in now. lost_seconds: between the last step before a Break (before any
    step: the first failure) and the first after it, and of iterations that were made again; trained_seconds: all others
    to the last step; goodput: their share. blocks: the elements that have several nodes each, with these.
    checkpoints: the folder into which the job saves, where one of its ranks says so.
    """

    job: str
    name: str
    mode: str
    state: str
    generation: int
    planned_nodes: int | None
    layout: str
    layouts: list[str]
    planned_layout: str
    replica: int
    replicas: int
    standbys: Annotated[list[int], OWNER] = []
    spares: Annotated[list[Spare], OWNER] = []
    spares_wanted: Annotated[int | None, OWNER] = None
    spares_ready: Annotated[int | None, OWNER] = None
    ended: Ending | None
    set_aside: Annotated[str, OWNER] = ""
    waits: Annotated[str, OWNER] = ""
    nan_since: Annotated[int | None, OWNER] = None
    goodput: float | None = None
    trained_seconds: float = 0.0
    lost_seconds: float = 0.0
    blocks: Annotated[list[str], OWNER] = []
    checkpoints: Annotated[str, OWNER] = ""


class Job(JobBase, kw_only=True):
    """One job of `unicronctl jobs`. partitions: as Slurm shows them; of one that has ended, for its owner and admins,
    those of its nodes. nodes: those that train. silent: elements that the controller does not hear and does not take
    for lost. left_out: elements that others do not reach."""

    user: str
    partitions: list[str] = []
    since: float
    nodes: int
    min_nodes: int
    max_nodes: int
    members: list[int]
    iteration: int
    train_iterations: int
    iteration_seconds: float | None
    loss: Annotated[float | None, OWNER] = None
    degraded: Annotated[Slow | None, OWNER] = None
    anomalies: Annotated[list[Anomaly], OWNER] = []
    weight: float
    flops: float
    waf: float
    ledger_violations: Annotated[int | None, OWNER] = None
    silent: Annotated[list[str], OWNER] = []
    left_out: Annotated[list[str], OWNER] = []
    failures: int
    last_failure: Annotated[Failure | None, OWNER] = None
    reason: Annotated[str, OWNER] = ""
    elements: Annotated[list[Element], OWNER] = []
    barred: Annotated[list[Waiting], OWNER] = []


class Decision(msgspec.Struct, kw_only=True):
    """A decision about a job."""

    time: float
    kind: str
    generation: int
    reason: str


class Ahead(msgspec.Struct, kw_only=True):
    """The plan after an event: words such as "lose job NAME"."""

    event: list[str]
    assignment: dict[str, int]


class Assignment(msgspec.Struct, kw_only=True):
    """A plan: nodes and reasons by job. waf: FLOP/s, weighted. `unicronctl plan` prints one."""

    assignment: dict[str, int]
    objective: float
    waf: float
    reasons: dict[str, str]
    spares: int
    layouts: dict[str, str] | UnsetType = UNSET
    shares: dict[str, int] | UnsetType = UNSET
    explanation: Alternative | UnsetType = UNSET
    ahead: list[Ahead] | UnsetType = UNSET


class Alternative(msgspec.Struct, kw_only=True):
    """Why a job gets what it gets, and the second-best plan. margin: by how much that one lost, in FLOP over `seconds`,
    the expected time to the next failure."""

    job: str
    nodes: int
    reason: str
    margin: float | None
    seconds: float | None
    text: str
    second: Assignment | None


class Explanation(JobBase, kw_only=True):
    """The answer of `unicronctl explain`, for owner and admins only.

    log_dir: with a file for each rank's output, or empty. cold, forgets: reason -> slots. bounds: what limits the job's
    part of the plan. waiting: pending elements. alternative: the planner's choice of this moment, which `unicronctl`
    adds; null where there is nothing to choose.
    """

    mode_reason: str
    log_dir: str
    cold: dict[str, list[int]]
    forgets: dict[str, list[int]]
    plan_reason: str
    plan_trigger: str
    bounds: str
    waiting: list[Waiting]
    decisions: list[Decision]
    failures: list[Failure]
    alternative: Alternative | UnsetType | None = UNSET


class HealthReport(msgspec.Struct, kw_only=True):
    """The verdict of the admission checks or a paired test on a node."""

    verdict: str
    reason: str
    source: str
    at: float


class NodeEvent(msgspec.Struct, kw_only=True):
    """The last event that a node's kernel, memory cgroup or links reported."""

    time: float
    source: str
    text: str
    code: str
    count: int
    cause: str
    severity: int
    action: str
    reason: str


class NodeChecks(msgspec.Struct, kw_only=True):
    """The results of a node's checks. unverified: back without passed checks. suspect: why it should be tested.
    admission: why it is not given back yet."""

    health: Annotated[HealthReport | None, ADMIN] = None
    pair_test: Annotated[HealthReport | None, ADMIN] = None
    unverified: Annotated[bool | None, ADMIN] = None
    suspect: Annotated[str, ADMIN] = ""
    admission: Annotated[str, ADMIN] = ""


class Node(NodeChecks, kw_only=True):
    """One node of `unicronctl nodes`. asked_since: since when other agents are asked who reaches it. spare_of: hot
    spares on it -> ready or starting."""

    node: str
    partitions: list[str] = []
    states: list[str]
    healthy: bool
    reason: str
    used_by: list[str]
    downed_by_unicron: bool
    lost_at: float | None
    last_heard: float | None
    asked_since: float | None
    anomalies: Annotated[list[Anomaly], ADMIN] = []
    spare_of: dict[str, str]
    metrics: Annotated[dict[str, float], ADMIN] = {}
    last_event: Annotated[NodeEvent | None, ADMIN] = None


class SlurmStatus(msgspec.Struct, kw_only=True):
    """Whether Slurm answers. last_answer: when it was asked for what it said last."""

    used: bool
    last_answer: float | None
    error: str


class Controller(msgspec.Struct, kw_only=True):
    """The controller itself. modes: by partition, as they are now. paused: by partition ("" for all), until when an
    admin has nothing changed in Slurm; 0 until somebody ends it. events: the id of the last one. alone_since: since
    when it hears no agent; most_silent_since: since when most are silent."""

    pid: int
    since: float
    time: float
    alone_since: float | None
    most_silent_since: float | None
    modes: dict[str, str]
    paused: dict[str, float]
    events: int
    slurm: SlurmStatus


class Attention(msgspec.Struct, kw_only=True):
    """Something that needs an admin: a node, or "" and a limit that was reached."""

    node: str
    since: float
    job: str
    reason: str


class PlanReport(msgspec.Struct, kw_only=True):
    """The planner's last word; empty before there is one."""

    time: float | UnsetType = UNSET
    reasons: dict[str, str] | UnsetType = UNSET
    objective: float | UnsetType = UNSET
    waf: float | UnsetType = UNSET
    trigger: str | UnsetType = UNSET


class Sharing(msgspec.Struct, kw_only=True):
    """By what rules others are told less than admins, for `unicronctl web`, which asks once for all who look.

    auth: how users prove who they are. uid: the controller's own user, an admin as root is. admins: further ones, by
    name; readers: users who are told as much. private: Slurm's PrivateData, kinds of things that users see of their own
    only. owners: job -> uid, null where only a name is known. names: job -> its name in Slurm, where that shows it.
    """

    auth: str
    uid: int
    admins: list[str]
    private: list[str]
    owners: dict[str, int | None]
    names: dict[str, str]
    readers: list[str] = []


class Status(msgspec.Struct, kw_only=True):
    """The answer of `unicronctl status`. failures: of the asker's jobs. observed: what acting would have saved."""

    controller: Controller
    jobs: list[Job]
    nodes: list[Node]
    failures: list[Failure]
    attention: list[Attention]
    observed: list[str]
    waf: float
    plan: PlanReport
    sharing: Annotated[Sharing | None, ADMIN] = None


class CauseSum(msgspec.Struct, kw_only=True):
    """Failures of one cause and severity in a report: how many, of how many jobs, on how many nodes."""

    cause: str
    severity: int
    failures: int
    jobs: int
    nodes: int


class JobSum(msgspec.Struct, kw_only=True):
    """A job with failures in a report. healed: how often it trained again. ended_with: its exit code, if not 0."""

    job: str
    failures: int = 0
    healed: int = 0
    lost_node_hours: float = 0.0
    saved_node_hours: float = 0.0
    ended_with: int = 0


class NodeSum(msgspec.Struct, kw_only=True):
    """A node with failures in a report. lost, out_of_service: how often it was."""

    node: str
    failures: int
    lost: int
    out_of_service: int


class Report(msgspec.Struct, kw_only=True):
    """The answer of `unicronctl report week`: of the asker's own jobs, to admins of all.

    healed: recoveries. lost_node_hours: of the jobs' time. saved_node_hours: against a requeue and a start from the
    last checkpoint, which is taken to cost `spared_seconds` of all nodes of a job. observed: what acting would have
    saved. cut_at: since when the report counts, where there were too many events; else null."""

    since: float
    until: float
    causes: list[CauseSum]
    jobs: list[JobSum]
    nodes: Annotated[list[NodeSum], ADMIN] = []
    healed: int
    lost_node_hours: float
    saved_node_hours: float
    spared_seconds: float
    needed_admin: Annotated[int, ADMIN] = 0
    observed: Annotated[list[str], ADMIN] = []
    cut_at: float | None = None


class Event(msgspec.Struct, kw_only=True):
    """One event of the log; its kind adds further keys."""

    id: int
    time: float
    job: str
    generation: int
    kind: str
    reason: str = ""


class Pong(msgspec.Struct, kw_only=True):
    """The answer of a controller that is asked for a sign of life. time: its clock, in seconds since the epoch. uid:
    whose process it is."""

    release: str
    time: float
    uid: int


class PauseState(msgspec.Struct, kw_only=True):
    """The answer of `unicronctl pause` and `resume`. until: by partition ("" for all); 0 until somebody ends it.
    modes: by partition, as they are now."""

    time: float
    until: dict[str, float]
    modes: dict[str, str]


class Injection(msgspec.Struct, kw_only=True):
    """A fault that was injected on purpose, or would be. event: the id of its record; none in a dry run."""

    fault: str
    job: str
    slot: int
    node: str
    seconds: float
    at: float
    dry_run: bool
    event: int | UnsetType = UNSET


class ScenarioCluster(msgspec.Struct, kw_only=True):
    """The section [cluster] of a scenario."""

    nodes: int
    mtbf_node_hours: float
    transition_seconds: float


class ScenarioJob(msgspec.Struct, kw_only=True):
    """A [[job]] of a scenario: see unicron_planner/problem/scenario.py."""

    name: str
    weight: float
    min_nodes: int
    max_nodes: int
    nodes: int
    lost_worker: bool
    owner: str
    unit: int
    keep: int
    node_names: list[str]
    flops: dict[str, float] | UnsetType = UNSET
    layouts: dict[str, dict[str, float]] | UnsetType = UNSET
    layout: str | UnsetType = UNSET
    transition: dict[str, float] | UnsetType = UNSET
    spares: dict[str, float] | UnsetType = UNSET


class Scenario(msgspec.Struct, kw_only=True):
    """The planner's input of this moment, in the structure of a scenario file."""

    cluster: ScenarioCluster
    job: list[ScenarioJob]


Jobs = list[Job]
Nodes = list[Node]
