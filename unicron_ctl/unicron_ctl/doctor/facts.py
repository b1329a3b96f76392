"""The facts about a host and the cluster, and the checks that judge them.

A host's facts travel as JSON (`on_nodes`). `examination.CHECKS` is the table of checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from unicron_ctl.shared.settings.config import Config
from unicron_ctl.shared.slurm.slurm_client import NodeInfo, PartitionInfo
from unicron_ctl.shared.slurm.slurm_settings import SlurmSettings

Role = Literal["head", "login", "compute"]
HEAD: Role = "head"
LOGIN: Role = "login"
COMPUTE: Role = "compute"
NO_LIMIT = -1  # for a resource


class Question(msgspec.Struct, kw_only=True):
    """Tells a host where to look. Texts and lists are empty if Slurm did not answer, or has no such setting."""

    role: Role
    config: str = ""
    """unicron.toml, "" if programs find it themselves."""
    controller: str = ""
    """The address to ask instead of the file's."""
    plugstack: list[str] = []
    """Paths; the first that exists counts."""
    plugin_dir: str = ""
    """Slurm's PluginDir, folders with colons between them."""
    prolog: list[str] = []
    """The paths as in slurm.conf, with wildcards."""
    epilog: list[str] = []
    health_program: str = ""
    users: list[str] = []
    """Names whose uids are wanted."""
    door: float = 0.0
    """Seconds for which the host opens a port that the controller's host tries; 0 for no port."""


class ConfigFacts(msgspec.Struct, kw_only=True):
    """A host's unicron.toml."""

    path: str = ""
    """ "" if there is none."""
    digest: str = ""
    """Hash of the file's bytes."""
    problems: list[str] = []
    """One line each."""
    address: str = ""
    """The controller's; several with commas between them."""
    auth: str = "munge"
    believed: dict[str, int | None] = {}
    """Uids of `controller_users` on this host; None for an unknown name."""


class ControllerFacts(msgspec.Struct, kw_only=True):
    """The controller's answer."""

    address: str = ""
    problem: str = ""
    """Why there was no answer, else ""."""
    tcp: bool | None = None
    """Whether its port takes connections; None if that was not tried."""
    release: str = ""
    uid: int = 0
    ahead: float = 0.0
    """Seconds by which its clock is ahead of this host's."""
    within: float = 0.0
    """The largest error of `ahead`, in seconds."""


class PluginFacts(msgspec.Struct, kw_only=True):
    """The plugin's line and its file."""

    plugstack: str = ""
    """The file that Slurm reads, "" if there is none."""
    line: str = ""
    """ "" if none names unicron.so."""
    path: str = ""
    is_there: bool = False
    required: bool = False
    release: str = ""
    """Its own release, "" if the file does not say."""
    slurm: str = ""
    """The Slurm that it was built for."""
    controller: str = ""
    config: str = ""
    late: list[str] = []
    """Container plugins that come after it in plugstack.conf."""


class AgentFacts(msgspec.Struct, kw_only=True):
    """The program in the plugin's line."""

    path: str = ""
    problem: str = ""
    """Why it cannot be executed, else ""."""
    release: str = ""


class ScriptFacts(msgspec.Struct, kw_only=True):
    """Programs that Slurm starts on a node."""

    found: list[str] = []
    """All that the setting leads to."""
    ours: list[str] = []
    """Scripts that are Unicron's or call it."""
    blocked: list[str] = []
    """Scripts of `ours` that cannot be executed."""


class HealthFacts(msgspec.Struct, kw_only=True):
    """health.conf and prolog.conf."""

    conf: str = ""
    """ "" if there is none."""
    python: str = ""
    """UNICRON_PYTHON, or the scripts' default."""
    problem: str = ""
    """Why this Python cannot run the checks, else ""."""
    seconds: int = 0
    """The time limit of the admission checks in the prolog; 0 if it does not run them."""


class ShmFacts(msgspec.Struct, kw_only=True):
    """/dev/shm, in bytes."""

    size: int = 0
    """0 if it is not mounted."""
    free: int = 0
    memory: int = 0
    """The host's memory."""


class KernelLogFacts(msgspec.Struct, kw_only=True):
    """The kernel log that agents read."""

    watched: bool = True
    """[agent] node_events."""
    path: str = "/dev/kmsg"
    restricted: bool = False
    """kernel.dmesg_restrict is 1."""
    is_there: bool = True
    readable: bool = True
    """Every user may read the file."""


class ContainerFacts(msgspec.Struct, kw_only=True):
    """Container runtimes."""

    enroot: bool = False
    enroot_mounts: bool = False
    enroot_missing: list[str] = []
    """Sources of Unicron's mounts that this host lacks."""
    apptainer: bool = False
    apptainer_binds: bool = False
    """Its configuration binds the agent's folder."""


class HostFacts(msgspec.Struct, kw_only=True):
    """All facts about one host. Nodes of other releases send them, so fields may only be added."""

    name: str
    """Slurm's name for a node, else the host's own."""
    role: Role
    user: str = ""
    uid: int = 0
    release: str = ""
    python: str = ""
    torch: str = ""
    megatron: str = ""
    config: ConfigFacts = msgspec.field(default_factory=ConfigFacts)
    controller: ControllerFacts = msgspec.field(default_factory=ControllerFacts)
    munge: str = ""
    """Why munge does not work here, else ""."""
    users: dict[str, int | None] = {}
    """Uids by name, None for an unknown name."""
    plugin: PluginFacts = msgspec.field(default_factory=PluginFacts)
    agent: AgentFacts = msgspec.field(default_factory=AgentFacts)
    prolog: ScriptFacts = msgspec.field(default_factory=ScriptFacts)
    epilog: ScriptFacts = msgspec.field(default_factory=ScriptFacts)
    health_program: ScriptFacts = msgspec.field(default_factory=ScriptFacts)
    health: HealthFacts = msgspec.field(default_factory=HealthFacts)
    shm: ShmFacts = msgspec.field(default_factory=ShmFacts)
    limits: dict[str, int] = {}
    """By name; :data:`NO_LIMIT` for none."""
    infiniband: bool = False
    kernel_log: KernelLogFacts = msgspec.field(default_factory=KernelLogFacts)
    containers: ContainerFacts = msgspec.field(default_factory=ContainerFacts)
    unicrond_files: int | None = None
    """The number of files that the running unicrond may open; None if none is seen here."""


@dataclass(frozen=True)
class SiteFacts:
    """The cluster."""

    slurm_problem: str = ""
    """Why Slurm did not answer, else ""."""
    settings: SlurmSettings = field(default_factory=SlurmSettings)
    nodes: tuple[NodeInfo, ...] = ()
    partitions: tuple[PartitionInfo, ...] = ()
    config: Config = field(default_factory=Config)
    """The valid part of this host's unicron.toml."""
    controller_name: str = ""
    """The name of the controller's user on this host, "" if no controller has answered."""
    admin_level: str = ""
    """This user's level in slurmdbd, "" for none."""
    level_problem: str = ""
    """Why the level is not known."""


@dataclass(frozen=True)
class Ports:
    """Whether the controller's host reaches the nodes' ports: by node the reason why not, or ""."""

    agents: dict[str, str] = field(default_factory=dict)
    slurmds: dict[str, str] = field(default_factory=dict)
    why_not: str = ""
    """Why no port was tried, else ""."""


Verdict = Literal["problem", "advice", "unknown", "good"]
PROBLEM: Verdict = "problem"  # Unicron does not work, or not as its documents say
ADVICE: Verdict = "advice"  # it works, but this would be better
UNKNOWN: Verdict = "unknown"  # it could not be checked
GOOD: Verdict = "good"


class Finding(msgspec.Struct, frozen=True):
    """A result of a check."""

    verdict: Verdict
    text: str
    do: str = ""
    """The command or the line that mends it, "" if all is well."""


class Case(NamedTuple):
    """All that a check judges."""

    host: HostFacts
    """The host in question."""
    first: HostFacts
    """The host on which the doctor was started."""
    site: SiteFacts
    ports: Ports | None = None
    """None unless the nodes were asked."""


@dataclass(frozen=True)
class Inspection:
    """All that a host needs to collect its facts."""

    question: Question
    config: Config = field(default_factory=Config)
    """The valid part of its unicron.toml."""
    config_facts: ConfigFacts = field(default_factory=ConfigFacts)
    plugin: PluginFacts = field(default_factory=PluginFacts)
    agent: str = ""
    """The agent's path in the plugin's line, "" if there is none."""


class Check(NamedTuple):
    """A check of the doctor."""

    name: str
    roles: frozenset[str]
    """The hosts to check; none for a check of the whole cluster, which is judged once."""
    judge: Callable[[Case], Iterator[Finding]]
    """Yields problems and advice, each with what to do; or what is good."""
    collect: dict[str, Callable[[Inspection], Any]] = {}
    """Collects the fields of HostFacts that only this check needs."""


def or_good(findings: Iterator[Finding], text: str) -> Iterator[Finding]:
    """Yield the findings, or that the text is good if there are none."""
    found = list(findings)
    yield from found or [good(text)]


def good(text: str) -> Finding:
    return Finding(GOOD, text)


def problem(text: str, do: str) -> Finding:
    return Finding(PROBLEM, text, do)


def advice(text: str, do: str) -> Finding:
    return Finding(ADVICE, text, do)


def unknown(text: str, do: str = "") -> Finding:
    return Finding(UNKNOWN, text, do)
