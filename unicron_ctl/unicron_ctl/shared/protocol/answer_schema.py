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
    """The end of a job."""

    code: int
    """The job's exit code: of its command, or by the way in which Slurm or Unicron ended it."""
    reason: Annotated[str, OWNER] = ""
    time: float
    disowned: bool
    """Slurm knows no such job, or another user's under this id."""


class Failure(msgspec.Struct, kw_only=True):
    """One failure with its story. The time of a step that has not happened is null."""

    id: int
    kind: str
    job: str
    slot: int | None
    """The first of its slots; null if it has none."""
    slots: list[int]
    element: int
    """-1 if it belongs to no single element."""
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
    """When as many ranks as wanted trained again, or exactly the lost ones."""
    iteration: int | None
    """The iteration with which the job went on."""
    reused_micro_batches: int
    recomputed_micro_batches: int
    redistributed_micro_batches: int
    """Micro-batches of lost ranks that survivors computed."""
    actions: list[str]


class Slow(msgspec.Struct, kw_only=True):
    """The present reason why a job is slow."""

    since: float
    iteration: int
    slot: int | None
    """Null if no rank differs from the others."""
    node: str
    phase: str
    slowdown: float | None
    reason: str
    reported: bool
    swap: str = ""
    """Why its node keeps its place in the job; empty if it leaves, or nobody has asked."""


class Anomaly(msgspec.Struct, kw_only=True):
    """A node or rank that stands out among its peers by a metric."""

    peer: str
    nodes: list[str]
    slot: int | None
    metric: str
    since: float
    reason: str


class Waiting(msgspec.Struct, kw_only=True):
    """Pending elements with the same reason in Slurm."""

    elements: list[int]
    reason: str
    """Slurm's word for it."""
    words: str
    """The reason for people; if they cannot start, it names what has to happen first."""
    starts: bool
    """They can start once there are nodes."""


class Spare(msgspec.Struct, kw_only=True):
    """An element that waits to take a lost one's place."""

    element: int
    node: str
    state: str
    """`ready` or `starting`."""


class Rank(msgspec.Struct, kw_only=True):
    """One rank as its agent knows it."""

    slot: int
    state: str
    incarnation: int
    generation: int
    iteration: int
    phase: str
    pid: int
    start: str
    """The way its process was started: `warm`, or `cold: ` and why. Empty while there is no process."""
    forgets: str
    """Why its state is not kept in memory, or empty."""


class Element(msgspec.Struct, kw_only=True):
    """One agent with its ranks."""

    element: int
    node: str
    agent: str
    gone: str
    """Why the agent is gone; empty while it is there."""
    last_heard: float | None
    copies_failed: int
    """Snapshots whose transfer failed."""
    ranks: list[Rank]


class JobBase(msgspec.Struct, kw_only=True):
    """The common part of the list of jobs and of the explanation of one."""

    job: str
    name: str
    mode: str
    state: str
    generation: int
    planned_nodes: int | None
    """Its nodes in the last plan; null if that has no place for it."""
    layout: str
    """The way in which the ranks of a replica share the model."""
    layouts: list[str]
    """All layouts in which it can run, the preferred one first; empty if it has stated none."""
    planned_layout: str
    """The layout that the plan wants, or empty."""
    replica: int
    """Ranks of a replica."""
    replicas: int
    """Replicas that train."""
    standbys: Annotated[list[int], OWNER] = []
    """Slots of living ranks that complete no replica and wait."""
    spares: Annotated[list[Spare], OWNER] = []
    spares_wanted: Annotated[int | None, OWNER] = None
    """The number of hot spares that its owner requests."""
    spares_ready: Annotated[int | None, OWNER] = None
    """Spares that could take part now."""
    ended: Ending | None
    set_aside: Annotated[str, OWNER] = ""
    """Why the controller leaves the job alone, or empty."""
    waits: Annotated[str, OWNER] = ""
    """Why the job cannot go on at present, or empty."""
    nan_since: Annotated[int | None, OWNER] = None
    """The first of the latest iterations without a finite loss; null while the loss is finite."""
    unsound_until: Annotated[int | None, OWNER] = None
    """The job makes iterations up to this one again, because their state was found to be wrong; null otherwise."""
    goodput: float | None = None
    """`trained_seconds` / (`trained_seconds` + `lost_seconds`); null before the first step."""
    trained_seconds: float = 0.0
    """The time to the last step that is not in `lost_seconds`."""
    lost_seconds: float = 0.0
    """From the last step before a Break to the next step, and in repeated iterations. Before any step: from the first
    failure."""
    blocks: Annotated[list[str], OWNER] = []
    """Elements of several nodes, each with its nodes."""
    checkpoints: Annotated[str, OWNER] = ""
    """The folder into which the job saves; empty if no rank has reported it."""
    verified: Annotated[int | None, OWNER] = None
    """The newest iteration whose state an audit has found sound: the job goes back to it if the state turns out to be
    wrong; null for none."""


class Job(JobBase, kw_only=True):
    """One job of `unicronctl jobs`."""

    user: str
    partitions: list[str] = []
    """Partitions as Slurm shows them; for an ended job those of its nodes, which only its owner and admins see."""
    since: float
    nodes: int
    """Nodes that train."""
    min_nodes: int
    max_nodes: int
    members: list[int]
    """Slots that train."""
    iteration: int
    train_iterations: int
    """Iterations that the whole training takes."""
    iteration_seconds: float | None
    """Median of the latest iterations with the present number of nodes; null before the first of these."""
    loss: Annotated[float | None, OWNER] = None
    degraded: Annotated[Slow | None, OWNER] = None
    anomalies: Annotated[list[Anomaly], OWNER] = []
    weight: float
    """The factor for its FLOP/s in the plan, within the limits of its partitions."""
    flops: float
    """Measured with its present number of nodes."""
    waf: float
    """`flops` times `weight`; 0 with fewer nodes than `min_nodes`."""
    ledger_violations: Annotated[int | None, OWNER] = None
    """Recorded iterations whose reports do not show each micro-batch exactly once; of many in a row, only some."""
    silent: Annotated[list[str], OWNER] = []
    """Elements that the controller does not hear but does not count as lost."""
    left_out: Annotated[list[str], OWNER] = []
    """Elements that others do not reach."""
    failures: int
    last_failure: Annotated[Failure | None, OWNER] = None
    reason: Annotated[str, OWNER] = ""
    """That of the last decision about the job."""
    elements: Annotated[list[Element], OWNER] = []
    barred: Annotated[list[Waiting], OWNER] = []
    """Pending elements that do not start once there are nodes."""


class Decision(msgspec.Struct, kw_only=True):
    """A decision about a job."""

    time: float
    kind: str
    generation: int
    reason: str


class Ahead(msgspec.Struct, kw_only=True):
    """The plan after an event."""

    event: list[str]
    """Its words, such as "lose job NAME"."""
    assignment: dict[str, int]
    """Nodes by job."""


class Assignment(msgspec.Struct, kw_only=True):
    """A plan, as `unicronctl plan` prints it."""

    assignment: dict[str, int]
    """Nodes by job."""
    objective: float
    """The sum that the planner maximises, in FLOP."""
    waf: float
    """FLOP/s, weighted."""
    reasons: dict[str, str]
    """Why each job gets its nodes."""
    spares: int
    """Nodes that no job gets."""
    layouts: dict[str, str] | UnsetType = UNSET
    """Layout of each job that can run in several."""
    shares: dict[str, int] | UnsetType = UNSET
    """Nodes by owner, if there are several owners."""
    explanation: Alternative | UnsetType = UNSET
    ahead: list[Ahead] | UnsetType = UNSET


class Alternative(msgspec.Struct, kw_only=True):
    """The reason for a job's share of the plan, and the second-best plan."""

    job: str
    nodes: int
    reason: str
    margin: float | None
    """By how much the second plan is worse, in FLOP over `seconds`; null if there is none."""
    seconds: float | None
    """The expected time to the next failure."""
    text: str
    second: Assignment | None
    """Null if there is no other plan."""


class Explanation(JobBase, kw_only=True):
    """The answer of `unicronctl explain`, for owner, readers and admins only."""

    mode_reason: str
    """Why the job runs in its mode."""
    log_dir: str
    """The folder with a file for each rank's output, or empty."""
    cold: dict[str, list[int]]
    """Reason why ranks did not start warm -> their slots."""
    forgets: dict[str, list[int]]
    """Reason why the states of ranks are not kept in memory -> their slots."""
    plan_reason: str
    """Why the plan gives the job its nodes."""
    plan_trigger: str
    """The change of the planner's input that led to the last plan: the key before and after."""
    bounds: str
    """The limits of the job's share of the plan."""
    waiting: list[Waiting]
    """Pending elements."""
    decisions: list[Decision]
    """The last ones, oldest first."""
    failures: list[Failure]
    alternative: Alternative | UnsetType | None = UNSET
    """The planner's present choice, which `unicronctl` adds; null if there is no choice."""


class NodeMark(msgspec.Struct, kw_only=True):
    """An incident of a node."""

    time: float
    kind: str
    weight: float
    reason: str


class NodeHistory(msgspec.Struct, kw_only=True):
    """The answer of `unicronctl explain --node`, for admins and readers: what the log holds against a node."""

    node: str
    since: float
    """When the part of the log that counts begins."""
    score: float
    """The weights of its incidents, halved by each week since."""
    lemon: float
    """The score from which on the node should be left out."""
    marks: list[NodeMark]
    """Oldest first; a passed pair test has the weight 0."""
    hint: str
    """An option that leaves the node out of a job; empty below `lemon`."""


class HealthReport(msgspec.Struct, kw_only=True):
    """The verdict of the admission checks or a paired test on a node."""

    verdict: str
    reason: str
    source: str
    """The occasion of the check: `prolog`, `interval` or `pair-test`."""
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
    """The results of a node's checks."""

    health: Annotated[HealthReport | None, ADMIN] = None
    pair_test: Annotated[HealthReport | None, ADMIN] = None
    unverified: Annotated[bool | None, ADMIN] = None
    """Whether it is back in service without passed checks."""
    suspect: Annotated[str, ADMIN] = ""
    """Why the node should be tested, or empty."""
    admission: Annotated[str, ADMIN] = ""
    """Why the node is not back in service yet, or empty."""


class Node(NodeChecks, kw_only=True):
    """One node of `unicronctl nodes`."""

    node: str
    partitions: list[str] = []
    states: list[str]
    """States as Slurm shows them."""
    healthy: bool
    reason: str
    """The reason that Slurm shows."""
    used_by: list[str]
    """Elements on it, as Slurm labels them."""
    downed_by_unicron: bool
    lost_at: float | None
    last_heard: float | None
    asked_since: float | None
    """The last sign of life of its agent, if others are asked whether they reach it; null if nobody is asked."""
    anomalies: Annotated[list[Anomaly], ADMIN] = []
    spare_of: dict[str, str]
    """Hot spares on it -> `ready` or `starting`."""
    metrics: Annotated[dict[str, float], ADMIN] = {}
    """The last measurements, by name."""
    last_event: Annotated[NodeEvent | None, ADMIN] = None


class SlurmStatus(msgspec.Struct, kw_only=True):
    """Whether Slurm answers."""

    used: bool
    """False with `slurm = "none"`."""
    last_answer: float | None
    """The time of the question for the last answer; null before there is one."""
    error: str
    """Why the last question got no answer, or empty."""


class Controller(msgspec.Struct, kw_only=True):
    """The controller itself."""

    pid: int
    since: float
    time: float
    alone_since: float | None
    """Since when it hears no agent, or null."""
    most_silent_since: float | None
    """Since when most agents are silent, or null."""
    modes: dict[str, str]
    """Partition -> its mode at present."""
    paused: dict[str, float]
    """Partition ("" for all) -> the end of an admin's pause; 0 for no end."""
    events: int
    """The id of the last event."""
    slurm: SlurmStatus


class Attention(msgspec.Struct, kw_only=True):
    """Something that needs an admin."""

    node: str
    """Empty for a limit that was reached."""
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
    """The rules by which others see less than admins. `unicronctl web` asks for them once for all its viewers."""

    auth: str
    """The way in which users prove who they are: `munge` or `none`."""
    uid: int
    """The controller's own user, an admin like root."""
    admins: list[str]
    """Further admins, by name."""
    private: list[str]
    """Slurm's PrivateData: the kinds of things of which users see only their own."""
    owners: dict[str, int | None]
    """Job -> uid; null if only a name is known."""
    names: dict[str, str]
    """Job -> its name in Slurm, if Slurm shows it."""
    readers: list[str] = []
    """Users who see as much as admins, by name."""


class Status(msgspec.Struct, kw_only=True):
    """The answer of `unicronctl status`."""

    controller: Controller
    jobs: list[Job]
    nodes: list[Node]
    failures: list[Failure]
    """Failures of the asker's jobs, oldest first."""
    attention: list[Attention]
    observed: list[str]
    """The savings that acting would have brought: a line for the last week, and one for the time since."""
    waf: float
    """The sum over all listed jobs."""
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
    """A job with failures in a report."""

    job: str
    failures: int = 0
    healed: int = 0
    """Recoveries."""
    lost_node_hours: float = 0.0
    saved_node_hours: float = 0.0
    ended_with: int = 0
    """Its exit code; 0 also while it runs."""


class NodeSum(msgspec.Struct, kw_only=True):
    """A node with failures in a report."""

    node: str
    failures: int
    lost: int
    """Times that it was lost."""
    out_of_service: int
    """Times that it was taken out of service."""


class Report(msgspec.Struct, kw_only=True):
    """The answer of `unicronctl report week`: on the asker's own jobs, for admins on all."""

    since: float
    until: float
    causes: list[CauseSum]
    jobs: list[JobSum]
    nodes: Annotated[list[NodeSum], ADMIN] = []
    """The nodes with the most failures."""
    healed: int
    """Recoveries."""
    lost_node_hours: float
    """The jobs' time that failures cost."""
    saved_node_hours: float
    """Node-hours that a requeue and a start from the last checkpoint would have cost beyond those lost; a recovery that
    cost more counts 0."""
    spared_seconds: float
    """Seconds that a requeue and a start from the last checkpoint are assumed to cost, on all nodes of a job."""
    needed_admin: Annotated[int, ADMIN] = 0
    observed: Annotated[list[str], ADMIN] = []
    """The savings that acting would have brought, as in the status."""
    cut_at: float | None = None
    """The time from which the report counts, if there were too many events; otherwise null."""


class Event(msgspec.Struct, kw_only=True):
    """One event of the log. Its kind adds further keys."""

    id: int
    time: float
    job: str
    generation: int
    kind: str
    reason: str = ""


class Pong(msgspec.Struct, kw_only=True):
    """The controller's sign of life."""

    release: str
    time: float
    """The controller's clock."""
    uid: int
    """The user of the controller's process."""


class PauseState(msgspec.Struct, kw_only=True):
    """The answer of `unicronctl pause` and `resume`."""

    time: float
    until: dict[str, float]
    """Partition ("" for all) -> the end of its pause; 0 for no end."""
    modes: dict[str, str]
    """Partition -> its mode at present."""


class Injection(msgspec.Struct, kw_only=True):
    """A fault that was injected on purpose, or would be in a dry run."""

    fault: str
    job: str
    slot: int
    node: str
    seconds: float
    at: float
    dry_run: bool
    event: int | UnsetType = UNSET
    """The id of its record; none in a dry run."""


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
