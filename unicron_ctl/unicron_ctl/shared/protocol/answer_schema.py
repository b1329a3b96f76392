"""Defines the controller's answers: the structs behind the JSON of `unicronctl`, with each field's audience.

Times are seconds since the epoch, durations seconds, rates FLOP/s. A field with OWNER or ADMIN is for these only;
others get its default. Keys may be added, but none is renamed or removed.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

OWNER = Meta(extra_json_schema={"audience": "the job's owner, readers and admins"})
CUT = "cut"  # the kind of an item that stands for events that did not fit into an answer
READ = "read"  # the kind of an item with the id up to which the log was read, for a reader that follows it
ASKED_TOO_MUCH = "the controller is asked too much at once: try again"
ADMIN = Meta(extra_json_schema={"audience": "readers and admins"})


class Ending(msgspec.Struct, kw_only=True):
    """The end of a job. disowned: Slurm knows no such job, or another user's."""

    code: int
    reason: Annotated[str, OWNER] = ""
    time: float
    disowned: bool


class Failure(msgspec.Struct, kw_only=True):
    """One failure with its story; times of steps that have not happened are null."""

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
    """The present reason why a job is slow. slot: null if no rank differs from the others."""

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
    """Pending elements with the same reason in Slurm. starts: they can start once there are nodes; otherwise `words`
    names what has to happen first."""

    elements: list[int]
    reason: str
    words: str
    starts: bool


class Spare(msgspec.Struct, kw_only=True):
    """An element that waits to take a lost one's place. state: ready or starting."""

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
    """One agent with its ranks. gone: why, or "". copies_failed: snapshots whose transfer failed."""

    element: int
    node: str
    agent: str
    gone: str
    last_heard: float | None
    copies_failed: int
    ranks: list[Rank]


class JobBase(msgspec.Struct, kw_only=True):
    """The common part of the list of jobs and of the explanation of one.

    layout: how the ranks of a replica share the model. replica: their number. replicas: those that train. standbys:
    slots of living ranks that complete no replica and keep their state. spares_wanted: the requested spares.
    spares_ready: those that could take part now. lost_seconds: from the last step before a Break (before any step: from
    the first failure) to the next step, and in repeated iterations. trained_seconds: all other time to the last step.
    goodput: its share. blocks: elements of several nodes, with these. checkpoints: the folder into which the job saves,
    if a rank has reported it.
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
    """One job of `unicronctl jobs`. partitions: as Slurm shows them; for an ended job those of its nodes, for its owner
    and admins. nodes: those that train. silent: elements that the controller does not hear but does not count as lost.
    left_out: elements that others do not reach."""

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
    """The plan after an event, such as "lose job NAME"."""

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
    """The reason for a job's share of the plan, and the second-best plan. margin: how much worse that one is, in FLOP
    over `seconds`, the expected time to the next failure."""

    job: str
    nodes: int
    reason: str
    margin: float | None
    seconds: float | None
    text: str
    second: Assignment | None


class Explanation(JobBase, kw_only=True):
    """The answer of `unicronctl explain`, for owner and admins only.

    log_dir: the folder with a file for each rank's output, or empty. cold, forgets: reason -> slots. bounds: the limits
    of the job's share of the plan. waiting: pending elements. alternative: the planner's present choice, which
    `unicronctl` adds; null if there is no choice.
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
    """The results of a node's checks. unverified: back in service without passed checks. suspect: why it should be
    tested. admission: why it is not back in service yet."""

    health: Annotated[HealthReport | None, ADMIN] = None
    pair_test: Annotated[HealthReport | None, ADMIN] = None
    unverified: Annotated[bool | None, ADMIN] = None
    suspect: Annotated[str, ADMIN] = ""
    admission: Annotated[str, ADMIN] = ""


class Node(NodeChecks, kw_only=True):
    """One node of `unicronctl nodes`. asked_since: when the controller began to ask other agents whether they reach it.
    spare_of: hot spares on it -> ready or starting."""

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
    """Whether Slurm answers. last_answer: the time of the question for the last answer."""

    used: bool
    last_answer: float | None
    error: str


class Controller(msgspec.Struct, kw_only=True):
    """The controller itself. modes: by partition, at present. paused: by partition ("" for all), the end of an admin's
    pause, or 0 for no end. events: the id of the last one. alone_since: since when it hears no agent.
    most_silent_since: since when most agents are silent."""

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
    """The last plan; empty before there is one."""

    time: float | UnsetType = UNSET
    reasons: dict[str, str] | UnsetType = UNSET
    objective: float | UnsetType = UNSET
    waf: float | UnsetType = UNSET
    trigger: str | UnsetType = UNSET


class Sharing(msgspec.Struct, kw_only=True):
    """The rules by which others see less than admins, for `unicronctl web`, which asks once for all its viewers.

    auth: how users prove who they are. uid: the controller's own user, an admin like root. admins: further ones, by
    name. readers: users who see as much. private: Slurm's PrivateData, the kinds of things that users see only of their
    own. owners: job -> uid, null if only a name is known. names: job -> its name in Slurm, if Slurm shows it.
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
    """Failures of one cause and severity in a report, and the number of their jobs and nodes."""

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
    """A node with failures in a report. lost, out_of_service: how often the node was that."""

    node: str
    failures: int
    lost: int
    out_of_service: int


class Report(msgspec.Struct, kw_only=True):
    """The answer of `unicronctl report week`: on the asker's own jobs, for admins on all.

    healed: recoveries. lost_node_hours: of the jobs' time. saved_node_hours: compared with a requeue and a start from
    the last checkpoint, assumed to cost `spared_seconds` on all nodes of a job. observed: what acting would have saved.
    cut_at: the time from which the report counts, if there were too many events; otherwise null.
    """

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
    """One event of the log. Its kind adds further keys."""

    id: int
    time: float
    job: str
    generation: int
    kind: str
    reason: str = ""


class Pong(msgspec.Struct, kw_only=True):
    """The controller's sign of life. time: its clock, in seconds since the epoch. uid: the user of its process."""

    release: str
    time: float
    uid: int


class PauseState(msgspec.Struct, kw_only=True):
    """The answer of `unicronctl pause` and `resume`. until: by partition ("" for all); 0 for no end. modes: by
    partition, at present."""

    time: float
    until: dict[str, float]
    modes: dict[str, str]


class Injection(msgspec.Struct, kw_only=True):
    """A fault that was injected on purpose, or would be in a dry run. event: the id of its record; none in a dry
    run."""

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
    """A [[job]] of a scenario (unicron_planner/problem/scenario.py)."""

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
    """The planner's present input, in the structure of a scenario file."""

    cluster: ScenarioCluster
    job: list[ScenarioJob]


Jobs = list[Job]
Nodes = list[Node]
