"""Defines the settings of `unicron.toml`, with their defaults and ranges.

Rules between settings are in `settings.limits`. Only unicrond checks those, because an agent that refuses its
configuration would leave its job unprotected. `settings.config_file` reads the file.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from unicron_ctl.shared.settings import limits, partitions
from unicron_ctl.shared.settings.limits import DAY, FENCES, HEARTBEATS, Range
from unicron_ctl.shared.settings.notify import NotifyConfig, wrong_targets
from unicron_ctl.shared.settings.partitions import PartitionConfig, Rules
from unicron_ctl.shared.settings.power_off import power_off_problem
from unicron_ctl.shared.system.addresses import canonical, is_loopback, is_numeric, split, split_addresses
from unicron_detector.failures.classify import Classifier, default_classifier
from unicron_detector.health.checks import CHECKS, HealthConfig
from unicron_detector.health.programs import program_problem

DEFAULT_PORT = 7451
MOST_CONTROLLERS = 4  # the plugin's limit, too
ALL_ADDRESSES = ("0.0.0.0", "*", "[::]")  # hosts to listen on, but not to connect to
WEB_URL = re.compile(r"https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/?", re.ASCII)
HOST = re.compile(r"[\w.-]*|\*", re.ASCII)  # a name or an address of IPv4
OTHER_TABLES = ("partitions", "planner")  # fields of ControllerConfig that are no keys of [controller]
# Settings of [controller] that a reload does not change.
UNTIL_RESTART = "listen address state_dir auth public_key metrics slurm slurm_timeout probe_timeout".split()

Seconds = Annotated[float, Range(0.001, DAY)]
SecondsOrZero = Annotated[float, Range(0.0, DAY)]
LongSeconds = Annotated[float, Range(0.001, 30 * DAY)]
Share = Annotated[float, Range(0.0, 1.0)]


class PlannerConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The section [planner]: how the plan divides the nodes."""

    compare: Literal["user", "account", "flops"] = "user"
    """Which jobs' FLOP/s are compared: one user's, one Slurm account's, or all. Others share the nodes by weight,
    because jobs report their own FLOP/s."""


SYMPTOM_LOOKS = 5  # at the symptoms of a node, in the time between two rounds of its metrics


class ControllerConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The section [controller]; times are in seconds."""

    # ---- connections
    listen: str = f"tcp://0.0.0.0:{DEFAULT_PORT}"
    """The address at which the controller listens."""
    address: str | list[str] = ""
    """The address at which others reach it: tcp://HOST:PORT. Login nodes need it if it listens on all addresses. With
    several, as a list, the controllers on these hosts share a state folder; all but one wait (docs/head-node.md)."""
    state_dir: str = ""
    """Folder of the event log; by default /var/lib/unicron for root, else below the user's home."""
    public_key: str = ""
    """The only controller to believe, by its key (`unicrond --make-key`); by default munge says whose key it is."""
    auth: Literal["munge", "none"] = "munge"
    """The proof of who agents and users are; "none" is for one user at a loopback address and encrypts nothing."""
    metrics: str = ""
    """The address at which Prometheus asks for metrics: HOST:PORT, or ":7453" for loopback alone; by default none.
    Whoever reaches it sees the names and users of all jobs."""
    web_url: str = ""
    """The address at which people open the page of `unicronctl web`: https://HOST; by default http://127.0.0.1:7454."""
    admins: list[str] = []
    """Users who may do what a job's owner may, besides root."""
    readers: list[str] = []
    """Users who are told what admins are told, and may order nothing: whoever runs `unicronctl web` for all."""
    heartbeat_period: Annotated[float, HEARTBEATS] = 1.0
    """Between two messages of an agent that has no news."""
    lease_periods: Annotated[float, Range(1.1, 100.0, why="one late heartbeat must not look like a lost node")] = 1.8
    """Heartbeat periods without a message after which an agent's lease expires. Its node counts as lost if other agents
    or Slurm confirm it."""
    state_wait_seconds: Annotated[float, Range(10.0, 30 * DAY)] = 600.0
    """For a silent node that nothing shows dead to come back: its ranks may hold the only state. If copies are in
    memory, no longer than the work that these lack."""
    fence_seconds: Annotated[float, FENCES] = 5.0
    """Restart mode: without an answer from the controller, and for half as long from most of the other nodes, processes
    end. A new world waits for that, and a little longer, unless a silent node is shown dead."""
    power_off: str = ""
    """A program that switches a lost node of a job in restart mode off, with %n for its name: "/usr/local/sbin/off %n".
    If it ends with 0 the node counts as dead, and no lease is waited for; it has 30 s. By default there is none."""
    restart_grace: Seconds = 5.0
    """For agents to come back after the controller was restarted."""
    repeat_seconds: Seconds = 0.5
    """Between two repeats of an order that is not obeyed yet."""

    # ---- Slurm
    slurm: Literal["auto", "command", "none"] = "auto"
    """The way in which Unicron calls Slurm: by pyslurm if it fits the cluster, by its commands, or not at all."""
    slurm_poll_seconds: Seconds = 2.0
    """Between two listings of Slurm's jobs and nodes."""
    slurm_timeout: Seconds = 10.0
    """For one command to Slurm."""
    probe_timeout: Seconds = 0.5
    """For a silent agent, or its node's slurmd, to accept a connection of the controller. Beyond 1.5 the controller
    sets down no node that only witnesses find silent."""

    # ---- generations
    forming_settle_seconds: Seconds = 5.0
    """That a job waits for further nodes before it starts."""
    offer_delay: SecondsOrZero = 0.2
    """Newcomers within this time join together, if more ranks of the job are starting."""
    join_after_seconds: SecondsOrZero = 5.0
    """Seconds for further newcomers in restart mode, counted from the last newcomer."""
    fault_grace: SecondsOrZero = 0.15
    """That a rank which stopped by itself waits for the cause to show: its peers fail because it did."""
    report_timeout: Seconds = 10.0
    """For a survivor to stop and report."""
    enter_timeout: Seconds = 30.0
    """For a member to enter its generation."""

    # ---- monitoring
    monitor_iterations: bool = True
    """Judge iteration times; if false, only the time-out of collectives ends a hang."""
    hang_floor_seconds: Seconds = 1.0
    """No iteration counts as hung before this."""
    hang_outside_seconds: Seconds = 600.0
    """For the script's own code between two iterations: a checkpoint, an evaluation."""
    hang_idle_seconds: Seconds = 60.0
    """For a process that does nothing in that code, if it has been quick so far."""
    first_iteration_seconds: Seconds = 600.0
    """For a job's first iteration: it compiles and opens its data."""
    stacks_seconds: SecondsOrZero = 1.0
    """For the stacks of a hanging rank to arrive before it is stopped."""
    metrics_seconds: Annotated[float, Range(1.0, DAY, zero=True)] = 10.0
    """Between two rounds of the metrics that compare nodes and ranks."""
    metrics_directory: str = ""
    """The folder for measuring file latency on each node; by default a local one."""

    # ---- actions
    regroup_seconds: Seconds = 300.0
    """For all ranks to train again after a reattempt; then the process is restarted."""
    restart_seconds: Seconds = 600.0
    """For a restarted process to take part; then the job leaves its node."""
    isolate_seconds: Seconds = 300.0
    """For an element to leave its node and run elsewhere; then it is requested again."""
    max_isolated_nodes: Annotated[int, Range(0, 1_000_000)] = 4
    """Nodes that are taken out of service within the window, dead ones and those that are back included."""
    max_isolated_share: Share = 0.1
    """That number as a share of the cluster; the larger of the two counts."""
    max_isolated_job_share: Share = 0.5
    """The share of its nodes that a job may leave within the window; one is always allowed."""
    isolation_window_seconds: LongSeconds = 3600.0
    """The window for those three, and for the next."""
    max_requeues_per_job: Annotated[int, Range(0, 1_000_000)] = 20
    """Elements of a job that are requeued within the window, preemptions aside; or as many as it has if more."""
    max_requeues_per_minute: Annotated[int, Range(0, 1_000_000)] = 60
    """Elements of all jobs that are requeued within a minute."""
    max_holds_per_minute: Annotated[int, Range(0, 1_000_000)] = 1000
    """Elements of all jobs that are held within a minute because the plan has no node for them."""
    pair_tests: bool = True
    """A suspect node, and one that stood out among its peers, is tested in pairs with other nodes while they are idle,
    where the partition's mode is "act". The tests are jobs of unicrond's own user."""
    swap_slow_nodes: Literal["session", "always", "off"] = "session"
    """When a slow node gives its place to a ready spare: in session mode, where nothing stops for it; "always" also in
    restart mode, where all processes start again."""
    act_on_node_events: bool = True
    """A job leaves a node because of its kernel log alone; if false, the event is only recorded."""
    allow_inject: bool = False
    """Let `unicronctl inject` and `punish` break jobs on purpose."""

    # ---- coming back
    admission: Literal["require", "prefer", "off"] = "prefer"
    """Whether a node that was set down has to pass its health checks to come back; a drained one always has to."""
    admission_seconds: Seconds = 30.0
    """For a report of those checks under "prefer"; then the node comes back unverified."""

    # ---- planning
    mtbf_node_hours: Annotated[float, Range(0.001, 1e9)] = 1000.0
    """Hours between two failures of one node, as the planner assumes them."""
    transition_seconds: SecondsOrZero = 5.0
    """For a job to change its number of nodes, as the planner assumes it."""
    replacement_seconds: Seconds = 60.0
    """For a free node to replace a lost one and start its processes, as the planner assumes it: what a hot spare
    saves."""
    repair_seconds: LongSeconds = 21600.0
    """Until a node is repaired, if none is free."""
    throughput: Literal["measured", "linear"] = "measured"
    """"measured" fits T(t,x) to all sizes at which the job, or an earlier one of its name, has run; "linear" scales one
    size."""
    checkpoint_seconds: Annotated[float, Range(0.0, 30 * DAY)] = 1800.0
    """Between two checkpoints of a script in restart mode: a restart costs half of it."""

    # ---- not of this section
    partitions: dict[str, PartitionConfig] = {}
    """The tables [partition.NAME]: see `unicron_ctl.shared.settings.partitions`."""
    planner: PlannerConfig = msgspec.field(default_factory=PlannerConfig)
    """The section [planner]."""

    def rules(self, partition: str) -> Rules:
        """Return the admin's rules for this Slurm partition."""
        return partitions.rules(self.partitions, partition)

    @property
    def addresses(self) -> list[str]:
        """The controllers' addresses: possibly none, several with a standby."""
        return split_addresses(self.address) if isinstance(self.address, str) else self.address

    @property
    def symptom_seconds(self) -> float:
        """Between two looks at a node's symptoms."""
        return self.metrics_seconds / SYMPTOM_LOOKS

    @property
    def lease(self) -> float:
        """Seconds without a message after which a node counts as lost."""
        return self.heartbeat_period * self.lease_periods


class AgentConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The section [agent], read by the agents on their nodes; times are in seconds."""

    node_events: bool = True
    """Watch the kernel log, the memory cgroup and the links."""
    kmsg: str = "/dev/kmsg"
    """The file from which the kernel log is read; the variable UNICRON_KMSG takes precedence."""
    link_seconds: Annotated[float, Range(0.1, 3600.0)] = 5.0
    """Between two readings of the links' counters."""
    audit: Annotated[int, Range(0, 1_000_000)] = 256
    """For jobs without UNICRON_AUDIT: one in so many micro-batches of each rank is computed again by another rank, to
    find silent corruption. It costs that share of an iteration's compute; 0: none. The same on all nodes."""
    compare: Annotated[int, Range(0, 1_000_000)] = 64
    """For jobs without UNICRON_COMPARE: iterations between two comparisons of what replicas must have in common. Each
    reads all parameters and the optimizer's state once; 0: none. The same on all nodes."""
    controller_users: list[str] = []
    """Users who may run the controller, besides root, SlurmUser and the user of the agent or command."""


Section = ControllerConfig | AgentConfig | PlannerConfig | HealthConfig | NotifyConfig


class Config(msgspec.Struct, kw_only=True):
    """The whole file."""

    controller: ControllerConfig = msgspec.field(default_factory=ControllerConfig)
    agent: AgentConfig = msgspec.field(default_factory=AgentConfig)
    health: HealthConfig = msgspec.field(default_factory=HealthConfig)
    notify: NotifyConfig = msgspec.field(default_factory=NotifyConfig)
    severity: dict[str, Any] = {}
    """The admin's own rules, as the classifier reads them."""
    path: str = ""
    """Empty without a file."""

    def classifier(self) -> Classifier:
        """Return the shipped severity table with the admin's rules before it."""
        return default_classifier().load({"severity": self.severity}) if self.severity else default_classifier()


def all_problems(config: Config, environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the problems of all sections, in one line each. environment: see :func:`problems`."""
    sections: dict[str, Section] = {
        "controller": config.controller,
        "planner": config.controller.planner,
        "agent": config.agent,
        "health": config.health,
        "notify": config.notify,
    }
    return [f"[{name}] {line}" for name, section in sections.items() for line in problems(section, environment)]


def problems(section: Section, environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the values that are out of range or contradict each other, in one line each.

    environment: unicrond's, to check the limits of agents, ranks and plugin as well.
    """
    wrong = {field.name: problem for field in fields_of(type(section)) if (problem := _field_problem(section, field))}
    lines = list(wrong.values())
    if isinstance(section, NotifyConfig):
        lines += wrong_targets(section).values()
    if isinstance(section, ControllerConfig):
        values, variables = rule_values(section, environment)
        # Rules that a value out of range breaks would say nothing new.
        sound = {name: value for name, value in values.items() if name not in wrong}
        if {"heartbeat_period", "lease_periods"} & wrong.keys():
            sound.pop("lease")
        lines += [*variables, *limits.contradictions(sound, section.slurm != "none")]
        lines += _standby_problems(section) if "metrics" not in wrong else []
    return lines


def _standby_problems(section: ControllerConfig) -> list[str]:
    """Refuse the name of one host in `metrics` if there is a standby, which has the same file and could not listen
    there when it takes over."""
    host = split(section.metrics, listens=True)[0] if section.metrics else ""
    if len(section.addresses) < 2 or not host or host in ("0.0.0.0", "::", "*") or is_loopback(host):
        return []
    return [f'metrics = "{section.metrics}": with a standby write 0.0.0.0 in place of {host}, which is one host alone']


def port_notes(section: ControllerConfig) -> list[str]:
    """Return notes on ports that differ in `address` and `listen`, which is right if something forwards between
    them."""
    at = section.listen.rpartition(":")[2]
    return [
        f'[controller] address = "{address}" and listen = "{section.listen}": agents connect to port '
        f"{address.rpartition(':')[2]}, and unicrond listens at {at}; write the same port in both, unless something "
        "forwards the one to the other"
        for address in section.addresses
        if at != "0" and address.rpartition(":")[2] != at
    ]


def rule_values(section: ControllerConfig, environment: Mapping[str, str] | None) -> tuple[dict[str, float], list[str]]:
    """Return the values for the rules of `limits`, by name, and the problems of the environment's variables."""
    values, found = ({}, []) if environment is None else limits.fixed_values(environment)
    values["lease"] = section.lease
    for field in fields_of(type(section)):
        if isinstance(value := getattr(section, field.name), int | float):
            values[field.name] = value
    return values, found


def loopback_problems(section: ControllerConfig) -> list[str]:
    """Return the problems of `auth`: without munge, everybody who reaches the port may do everything."""
    host = section.listen.removeprefix("tcp://").rpartition(":")[0]
    if section.auth != "none" and section.public_key == "none":
        return ['[controller] public_key = "none" with auth = "munge": nothing is unencrypted with munge, leave it out']
    if section.auth != "none" or is_loopback(host):
        return []
    here = f"tcp://127.0.0.1:{section.listen.rpartition(':')[2]}"
    return [f'[controller] auth = "none" with listen = "{section.listen}": write listen = "{here}", or auth = "munge"']


@functools.cache
def fields_of(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return the fields of a section. They are cached because msgspec evaluates their annotations each time."""
    return msgspec.structs.fields(kind)


def _field_problem(section: msgspec.Struct, field: msgspec.structs.FieldInfo) -> str:
    """Return the problem of one field, or ""."""
    value, allowed = getattr(section, field.name), field.type
    if get_origin(allowed) is Literal:
        choices = get_args(allowed)
        return "" if value in choices else f'{field.name} = "{value}": use one of {", ".join(choices)}'
    for note in getattr(allowed, "__metadata__", ()):
        if isinstance(note, Range):
            return note.problem(field.name, value)
    if isinstance(section, HealthConfig):
        if field.name == "skip":
            return skip_problem(value, section.programs)
        if field.name == "programs":
            return next((wrong for name in value if (wrong := program_problem(name, value[name], [*CHECKS]))), "")
    problem = _PROBLEMS.get(field.name)
    return problem(value) if problem is not None else ""


def skip_problem(value: tuple[str, ...], programs: Collection[str] = ()) -> str:
    """Return the problem of names of health checks, or "". programs: names of the site's checks."""
    odd = next((name for name in value if name not in (*CHECKS, *programs, "all")), "")
    return f'skip = "{odd}": use some of {", ".join((*CHECKS, *programs))}, or all' if odd else ""


def metrics_problem(value: str) -> str:
    """Return the problem of an address for metrics, or ""."""
    try:
        split(value or ":0", listens=True)
    except ValueError:
        return f'metrics = "{value}": write HOST:PORT, or :7453 for this machine alone'
    return ""


def web_url_problem(value: str) -> str:
    """Return the problem of a page's address, or ""."""
    good = not value or WEB_URL.fullmatch(value)
    return "" if good else f'web_url = "{value}": write https://HOST or http://HOST:PORT'


def listen_problem(value: str) -> str:
    """Return the problem of an address to listen on, or ""."""
    host, _, port = value.removeprefix("tcp://").rpartition(":")
    if not (value.startswith("tcp://") and port.isascii() and port.isdecimal() and int(port) <= 65535):
        return f'listen = "{value}": write tcp://ADDRESS:PORT'
    bare = host.removeprefix("[").removesuffix("]")
    if ":" not in host and bare == host:
        return "" if HOST.fullmatch(host) else f'listen = "{value}": write tcp://ADDRESS:PORT'
    if f"[{bare}]" == host and is_numeric(bare.partition("%")[0]) and ":" in bare:
        return ""
    good = f"tcp://[{canonical(bare)}]:{port}" if is_numeric(bare) and ":" in bare else "tcp://[::]:7451"
    return f'listen = "{value}": write an address of IPv6 in brackets, as in {good}'


def address_problem(value: str | list[str]) -> str:
    """Return the problem of the controller's addresses for others, or ""."""
    addresses = split_addresses(value) if isinstance(value, str) else value
    if len(addresses) > MOST_CONTROLLERS:
        return f"address: {len(addresses)} of them: one and a standby are enough, {MOST_CONTROLLERS} are the most"
    for one in addresses:
        host, _, port = one.removeprefix("tcp://").rpartition(":")
        if listen_problem(one) or not int(port) or not host or host in ALL_ADDRESSES:
            return f'address = "{one}": write tcp://HOST:PORT, the name of unicrond\'s host as all nodes know it'
    twice = next((one for one in addresses if addresses.count(one) > 1), "")
    return f'address = "{twice}": named twice' if twice else ""


# Of settings whose text has a form of its own.
_PROBLEMS: dict[str, Callable[[Any], str]] = {
    "listen": listen_problem,
    "address": address_problem,
    "metrics": metrics_problem,
    "web_url": web_url_problem,
    "power_off": power_off_problem,
}
